"""All that trains, samples or saves, through the SDK and a real server; gives what it saw."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datums import datum
from safetensors.numpy import load_file
from server_process import ServerProcess

import tinkex
from tinkex.types import AdamParams, Datum, ModelInput, SamplingParams

PATIENCE_S = 300.0


@dataclass
class Seen:
    """What a client was told: numbers by what they are, whole ones and text under `exact`."""

    numbers: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)
    num_workers: float = 0.0

    def differs(self, other: Seen) -> list[str]:
        """What does not have the same bits in both."""
        ours, theirs = self._bits(), other._bits()
        return [name for name in ours | theirs if ours.get(name) != theirs.get(name)]

    def _bits(self) -> dict[str, bytes]:
        exact = {name: repr(value).encode() for name, value in self.exact.items()}
        return exact | {n: np.asarray(values).tobytes() for n, values in self.numbers.items()}


def batch(rng: np.random.Generator, num: int, **inputs: str) -> list[Datum]:
    data = []
    for _ in range(num):
        tokens = rng.integers(3, 97, int(rng.integers(3, 24)))
        drawn = {name: rng.normal(size=len(tokens) - 1).astype(np.float32) for name in inputs}
        data.append(datum(tokens.tolist(), **drawn))
    return data


def squares(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"squares": float(loss.detach())}


class Loop:
    def __init__(self, service: tinkex.ServiceClient, model: str, seed: int) -> None:
        self.service, self.rng, self.seen = service, np.random.default_rng(seed), Seen()
        self.trainer = service.create_lora_training_client(model, rank=4, seed=seed).result()

    def note(self, name: str, output: Any) -> None:
        metrics = {k: v for k, v in output.metrics.items() if not re.search("time|num_w", k)}
        self.seen.num_workers = max(
            self.seen.num_workers, output.metrics.get("num_workers:max", 1.0)
        )
        self.seen.numbers |= {f"{name} {key}": value for key, value in metrics.items()}
        for number, row in enumerate(getattr(output, "loss_fn_outputs", ())):
            for key, tensor in row.items():
                self.seen.numbers[f"{name} {number} {key}"] = tensor.to_numpy()

    def until_shared(self, by: int) -> None:
        """Go forward until so many workers share a pass; leaves no gradient behind."""
        data = batch(np.random.default_rng(0), 2 * by)
        deadline = time.monotonic() + PATIENCE_S  # a worker may still be starting
        while time.monotonic() < deadline:
            output = self.trainer.forward(data, "cross_entropy").result()
            if output.metrics.get("num_workers:max", 1.0) >= by:
                return
            time.sleep(0.02)
        raise AssertionError(f"no {by} workers share it: {output.metrics}")

    def step(self, number: int, rate: float) -> None:
        passes = {
            "cross entropy": (batch(self.rng, 9, weights=""), "cross_entropy"),
            "policy": (batch(self.rng, 5, logprobs="", advantages=""), "importance_sampling"),
        }
        waiting = {name: self.trainer.forward_backward(*given) for name, given in passes.items()}
        custom = self.trainer.forward_backward_custom(batch(self.rng, 6), squares)
        step = self.trainer.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0))
        for name, future in waiting.items():
            self.note(f"{number} {name}", future.result())
        self.seen.numbers[f"{number} custom"] = custom.result().metrics["squares"]
        self.note(f"{number} step", step.result())

    def sample(self, number: int) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client().result()
        prompt = ModelInput.from_ints([3, 1, 4, 1, 5])
        params = SamplingParams(max_tokens=6, seed=number, temperature=1.0, stop=[])
        answer = sampler.sample(prompt, 9, params).result()
        self.seen.exact[f"{number} samples"] = [list(s.tokens) for s in answer.sequences]
        for place, sequence in enumerate(answer.sequences):
            self.seen.numbers[f"{number} sample {place}"] = np.array(sequence.logprobs)

    def run(self, num_workers: int, rate: float, folder: Path, name: str) -> Seen:
        self.until_shared(num_workers)
        for number in range(2):
            self.step(number, rate)
            self.sample(number)
        path = self.trainer.save_state(f"{name}-half").result().path
        self.step(2, rate)
        self.trainer.load_state_with_optimizer(path).result()
        self.step(3, rate)
        self.until_shared(num_workers)
        self.step(4, rate)
        self.note("forward", self.trainer.forward(batch(self.rng, 7), "cross_entropy").result())
        self.trainer.save_state(f"{name}-end").result()
        for file in sorted(folder.glob(f"checkpoints/*/weights/{name}-end-*/*.safetensors")):
            for key, array in load_file(file).items():
                self.seen.numbers[f"{file.name} {key}"] = array
        return self.seen


def run_tenants(
    server: ServerProcess, model: Path, *, num_workers: int, rate: float, together: bool
) -> list[Seen]:
    """What two tenants see, each in a loop of its own: at the same time, or one after the other."""

    def run(seed: int) -> Seen:
        key = f"tml-tenant-{seed}"
        with tinkex.ServiceClient(base_url=server.base_url, api_key=key) as service:
            loop = Loop(service, str(model), seed)
            return loop.run(num_workers, rate, server.folder / "data", f"t{seed}")

    with ThreadPoolExecutor(2 if together else 1) as threads:
        return list(threads.map(run, (1, 2)))
