"""Sampling from the default model: ours against transformers' `generate`, in one process.

    python benchmarks/sample.py [--no-bar] [--write] [--repeats 5]

`sample_cpu_32`: useful tokens per second of 32 concurrent requests with ragged prompts (16-128
tokens) and ragged output lengths (16-128). The peer pads the prompts on the left and runs one batch
until the longest output is done, as its users do; tokens past a request's length do not count.
`sample_cpu_1`: one request, 64 prompt tokens, 64 output tokens. Both sides sample at temperature 1
in fp32; ours also returns logprobs. Prompts are new in every repeat, so no prefix is ever cached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import report
import torch

from tinkex.engine import jobs
from tinkex.engine.model import default_model
from tinkex.engine.torch.config import EngineConfig
from tinkex.engine.torch.engine import TorchEngine

BARS = {"sample_cpu_32": 2.0, "sample_cpu_1": 1.2}
VOCAB = 49152


@dataclass(frozen=True)
class Request:
    prompt: np.ndarray
    num_tokens: int


def ragged(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(rng.integers(100, VOCAB, rng.integers(16, 129)), int(rng.integers(16, 129)))
        for _ in range(32)
    ]


def single(seed: int) -> list[Request]:
    return [Request(np.random.default_rng(seed).integers(100, VOCAB, 64), 64)]


def ours(engine: TorchEngine, requests: list[Request]) -> None:
    """Submit everything at once and wait until all is generated."""
    left, done, errors = len(requests), threading.Event(), []

    def on_event(event: jobs.Event) -> None:
        nonlocal left
        if isinstance(event, jobs.Failed):
            errors.append(event.message)
        if isinstance(event, jobs.Done | jobs.Failed):
            left -= 1
            if left == 0:
                done.set()

    for i, request in enumerate(requests):
        job = jobs.SampleJob(
            job_id=f"{time.monotonic_ns()}-{i}",
            base_model=default_model.NAME,
            adapter_folder=None,
            prompt=request.prompt,
            max_tokens=request.num_tokens,
            stop_tokens=(),
        )
        engine.submit(job, on_event)
    done.wait()
    if errors:
        raise RuntimeError(errors[0])


def load_peer() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = default_model.folder()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def peer(model: Any, requests: list[Request]) -> None:
    width = max(len(request.prompt) for request in requests)
    length = max(request.num_tokens for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, request in enumerate(requests):
        ids[i, width - len(request.prompt) :] = torch.from_numpy(request.prompt)
        mask[i, width - len(request.prompt) :] = 1
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length,
        max_new_tokens=length,
        eos_token_id=None,
        pad_token_id=0,
    )


def measure(
    name: str, make: Callable[[int], list[Request]], engine: TorchEngine, model: Any, repeats: int
) -> report.Figure:
    """Median tokens per second of both sides, taking turns, after one short warm-up each."""
    warm = [Request(request.prompt, 4) for request in make(0)]
    ours(engine, warm)
    peer(model, warm)
    speeds: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(1, repeats + 1):
        requests = make(repeat)
        num_tokens = sum(request.num_tokens for request in requests)
        for side in ("ours", "peer"):
            began = time.perf_counter()
            ours(engine, requests) if side == "ours" else peer(model, requests)
            speeds[side].append(num_tokens / (time.perf_counter() - began))
    return report.Figure(
        name=name,
        ours=statistics.median(speeds["ours"]),
        peer=statistics.median(speeds["peer"]),
        unit="tokens/s",
        bar=BARS[name],
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_known_args()[0].repeats
    engine, model = TorchEngine(EngineConfig(device="cpu")), load_peer()
    figures = [
        measure("sample_cpu_1", single, engine, model, repeats),
        measure("sample_cpu_32", ragged, engine, model, repeats),
    ]
    engine.close()
    return report.finish("sample", figures)


if __name__ == "__main__":
    sys.exit(main())
