"""Digests of what the engine computes for each model family, to compare two trees bit by bit.

    python dev/bits.py --out before.json                 # in the old tree
    python dev/bits.py --compare before.json             # in the new one; exits 1 where bits differ

Each family is a tiny random model. Two adapters make a forward_backward, an
optimizer step and a second pass, then save; one samples from what was saved. All of it goes through
jobs of `TorchEngine`, as a server's would, once as it ships and once in deterministic mode. Bits
belong to one machine and one torch: record and compare on the same ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "engine" / folder) for folder in ("families", ".")]

from sampler_models import FAMILIES, SHAPE  # noqa: E402
from table import ROWS  # noqa: E402

from tinkex.contract.optimizers import AdamParams  # noqa: E402
from tinkex.engine import jobs  # noqa: E402
from tinkex.engine.sample.config import SamplerConfig  # noqa: E402
from tinkex.engine.torch.config import EngineConfig  # noqa: E402
from tinkex.engine.torch.engine import TorchEngine  # noqa: E402

# Sizes that the CUDA kernels take; the tests' models are smaller than those.
_ON_CUDA = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 128,
}


def configs() -> Iterator[tuple[str, Any]]:
    for name, make in ROWS.items():
        yield name, make()
    for name, (kind, extra) in FAMILIES.items():
        if name not in ROWS:
            yield name, kind(**(SHAPE | extra))


def write_model(config: Any, folder: Path, device: str) -> None:
    if device == "cuda":
        config.update({key: value for key, value in _ON_CUDA.items() if hasattr(config, key)})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start trivial; make them count
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


class Run:
    """An engine, and a digest of everything its jobs gave back."""

    def __init__(self, base: Path, *, device: str, deterministic: bool) -> None:
        self.base = str(base)
        # A card's default cache is a third of its free memory; here many runs share one card.
        sampler = (
            SamplerConfig(kv_bytes=1 << 28, max_pass_tokens=4096) if device == "cuda" else None
        )
        self.engine = TorchEngine(
            EngineConfig(device=device, deterministic=deterministic, sampler=sampler)
        )
        self.digests: dict[str, str] = {}

    def result(self, label: str, job: jobs.Job) -> Any:
        ended = threading.Event()
        events: list[jobs.Event] = []

        def emit(event: jobs.Event) -> None:
            events.append(event)
            if isinstance(event, jobs.Done | jobs.Failed):
                ended.set()

        self.engine.submit(job, emit)
        if not ended.wait(600) or not isinstance(events[-1], jobs.Done):
            raise SystemExit(f"{label} of {self.base} did not end well: {events[-1:]}")
        return events[-1].result

    def keep(self, label: str, *arrays: Any) -> None:
        whole = hashlib.sha256()
        for array in arrays:
            whole.update(np.ascontiguousarray(array).tobytes())
        self.digests[label] = whole.hexdigest()[:16]

    def train(self, adapter_id: str, vocab_size: int, turn: int) -> None:
        rng = np.random.default_rng([turn, len(adapter_id)])
        data = tuple(_datum(rng, vocab_size, length) for length in (9, 17, 30))
        label = f"{adapter_id}_pass_{turn}"
        job = jobs.TrainJob(
            job_id=label, adapter_id=adapter_id, data=data, loss_fn="importance_sampling"
        )
        result = self.result(label, job)
        self.keep(label, *[output["logprobs"] for output in result.outputs])
        step = jobs.OptimJob(
            job_id=f"{label}_step", adapter_id=adapter_id, params=AdamParams(learning_rate=0.01)
        )
        self.result(f"{label}_step", step)

    def save(self, adapter_id: str, folder: Path) -> None:
        job = jobs.SaveAdapterJob(
            job_id=f"{adapter_id}_save", adapter_id=adapter_id, folder=str(folder)
        )
        self.result(job.job_id, job)
        for path in sorted(folder.rglob("*.safetensors")):
            self.keep(f"{adapter_id}_{path.name}", np.frombuffer(path.read_bytes(), np.uint8))

    def sample(self, folder: Path | None, vocab_size: int) -> None:
        for seed, temperature in ((1, 1.0), (2, 0.0)):
            label = f"sample_{'base' if folder is None else 'adapter'}_{seed}"
            job = jobs.SampleJob(
                job_id=label,
                base_model=self.base,
                adapter_folder=None if folder is None else str(folder),
                prompt=np.random.default_rng(seed).integers(6, vocab_size, 11),
                max_tokens=12,
                stop_tokens=(),
                num_samples=3,
                seed=seed,
                temperature=temperature,
                prompt_logprobs=True,
                topk_sample_logprobs=3,
            )
            result = self.result(label, job)
            arrays = [result.prompt_logprobs]
            for sequence in result.sequences:
                arrays += [sequence.tokens, sequence.logprobs]
            self.keep(label, *[array for array in arrays if array is not None])


def _datum(rng: np.random.Generator, vocab_size: int, length: int) -> jobs.TrainDatum:
    tokens = rng.integers(3, vocab_size, length + 1).astype(np.int64)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": rng.normal(-3, 1, length).astype(np.float32),
        "advantages": rng.normal(0, 1, length).astype(np.float32),
    }
    return jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs)


def digests(config: Any, *, device: str, deterministic: bool) -> dict[str, str]:
    vocab_size = config.vocab_size
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "base")
        write_model(config, base, device)
        run = Run(base, device=device, deterministic=deterministic)
        try:
            for adapter_id, rank in (("a", 4), ("bb", 8)):
                create = jobs.CreateAdapterJob(
                    job_id=f"create_{adapter_id}",
                    adapter_id=adapter_id,
                    base_model=run.base,
                    lora=jobs.LoraSpec(rank=rank, seed=0),
                )
                run.result(create.job_id, create)
                for turn in range(2):
                    run.train(adapter_id, vocab_size, turn)
                run.save(adapter_id, Path(scratch, adapter_id))
            run.sample(None, vocab_size)
            run.sample(Path(scratch, "bb"), vocab_size)
        finally:
            run.engine.close()
    return run.digests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the digests here")
    parser.add_argument("--compare", type=Path, help="digests of another tree")
    parser.add_argument("--only", help="families, separated by commas")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else None
    torch.set_num_threads(1)
    results: dict[str, dict[str, str]] = {}
    for family, config in configs():
        if wanted is not None and family not in wanted:
            continue
        for deterministic in (False, True):
            name = f"{family}{'-deterministic' if deterministic else ''}"
            results[name] = digests(config, device=options.device, deterministic=deterministic)
            print(name, len(results[name]), "digests", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text())
    differing = [
        f"{name}: {label}"
        for name, found in results.items()
        for label, digest in found.items()
        if before.get(name, {}).get(label) != digest
    ]
    print("\n".join(differing) or "every bit is equal")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
