"""What the tests of training share: adapters that already count, ragged data, gradients by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tinkex.engine.checkpoint import writer
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoraSpec,
    SaveAdapterJob,
    TracedLoss,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.errors import TinkerError

FAMILIES = [
    "llama-tied-llama3-rope",
    "llama-biased-linear-rope",
    "mistral-window",
    "qwen2-window",
    "qwen3",
]
LENGTHS = [7, 12, 12, 1, 30]
RL = ["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"]


def save(trainer, folder, adapter_id: str = "a", **options: bool) -> int:
    """Write a checkpoint of an adapter as it is now; gives its size in bytes."""
    job = SaveAdapterJob(job_id="", adapter_id=adapter_id, folder=str(folder), **options)
    return writer.write(job.folder, trainer.capture(job)).size_bytes


def make(trainer, adapter_id: str = "a", *, noise: float = 0.1, **lora: Any):
    """An adapter that already changes the model: B is random, not zero."""
    spec = LoraSpec(**({"rank": 4, "seed": 1, "alpha": 8.0} | lora))
    trainer.create(CreateAdapterJob(job_id="", adapter_id=adapter_id, base_model="tiny", lora=spec))
    resident = trainer.adapters[adapter_id]
    generator = torch.Generator().manual_seed(spec.rank)
    with torch.no_grad():
        for _, _, b_Or in resident.adapter.modules():
            b_Or.copy_(torch.randn(b_Or.shape, generator=generator) * noise)
    return resident


def make_data(rng, loss_fn: str = "cross_entropy", lengths=LENGTHS) -> tuple[TrainDatum, ...]:
    data = []
    for length in lengths:
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 97, length)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
            inputs["weights"][: length // 3] = 0
        else:
            inputs["logprobs"] = -rng.uniform(3, 6, length).astype(np.float32)
            if loss_fn != "kl_divergence":
                inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(TrainDatum(tokens=rng.integers(0, 97, length), inputs=inputs))
    return tuple(data)


def job(data, loss_fn="cross_entropy", adapter_id="a", **options) -> TrainJob:
    return TrainJob(job_id="", adapter_id=adapter_id, data=data, loss_fn=loss_fn, **options)


def train(trainer, *jobs: TrainJob) -> list[TrainResult]:
    results = trainer.train(list(jobs))
    for result in results:
        if isinstance(result, TinkerError):
            raise result
    return results


def named_grads(trainer, adapter_id: str = "a") -> dict[str, torch.Tensor]:
    """Gathered gradients by peft's names."""
    resident = trainer.adapters[adapter_id]
    views, at, named = resident.adapter.views(resident.grad), 0, {}
    for group in resident.adapter.groups.values():
        for index, part in enumerate(group.parts):
            named[f"{part.target.module}.lora_A"] = views[at][part.row : part.row + part.rank]
            named[f"{part.target.module}.lora_B"] = views[at + 1 + index]
        at += 1 + len(group.parts)
    return named


def distance(ours, theirs) -> float:
    """The length of the difference, relative to the length of the truth."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return float((ours - theirs).norm()) / max(float(theirs.norm()), 1e-12)


def assert_close(ours, theirs, what: str, tolerance: float = 1e-5) -> None:
    assert (error := distance(ours, theirs)) < tolerance, f"{what}: off by {error:.2e}"


def custom_graph(metric_scale: float = 2.0) -> TracedLoss:
    """loss = sum(exp(logprobs) * advantages), metric = its double."""
    nodes = [
        *({"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}}
          for name in ("logprobs", "advantages")),
        {"op": "call_function", "name": "e", "target": "torch.exp",
         "args": [{"ref": "logprobs"}], "kwargs": {}},
        {"op": "call_function", "name": "m", "target": "operator.mul",
         "args": [{"ref": "e"}, {"ref": "advantages"}], "kwargs": {}},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "m"}], "kwargs": {}},
        {"op": "call_function", "name": "d", "target": "operator.mul",
         "args": [{"ref": "s"}, metric_scale], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "kwargs": {},
         "args": [{"tuple": [{"ref": "s"}, {"dict": {"custom/double:sum": {"ref": "d"}}}]}]},
    ]  # fmt: skip
    return TracedLoss(
        inputs=(("logprobs", 1), ("advantages", 1)), graph={"format": 1, "nodes": nodes}
    )
