"""Look at a base model before it is served: its files, its tensors' shapes, the memory it needs.

Reads headers only, never a weight, so it takes seconds for a model of any size. What it reports is
what loading would refuse, under the same names. Knows folders and configs, not servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tinkex.engine.device.backend import find_device, ops_for
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import native_targets
from tinkex.engine.model.loading import stays_packed, weight_bytes
from tinkex.engine.model.published import holds_mxfp4, misfits, text_names
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import SafetensorsWeights, expected_shapes
from tinkex.engine.sample.paged import kv_bytes_per_token
from tinkex.engine.sample.states import state_bytes
from tinkex.errors import TinkerError

_SHOWN = 3
"""Bad tensors that are named; the others are counted."""
LENGTH, RANK, SAMPLES = 2048, 32, 16
"""What one user does with a model: tokens of a row, rank of the adapter, answers at a time."""
OVERHEAD_BYTES = 2_000_000_000
"""Runtime, kernels, logits and what the allocator cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    what: Literal["runs", "files", "tensors", "memory"]
    ok: bool
    says: str


def how_it_runs(config: ModelConfig) -> str:
    """Natively, or through transformers."""
    if not config.native:
        return f"{config.arch}: through transformers, every feature, slower"
    kinds = ["attention"] if config.attention_layers else []
    kinds += ["delta layers"] if config.delta is not None else []
    kinds += [f"{config.experts.count} experts"] if config.experts is not None else ["dense MLPs"]
    return f"{config.arch}: natively ({', '.join(kinds)})"


def survey(source: ModelSource, *, length: int = LENGTH) -> Iterator[Remark]:
    """Check a model as a server would; memory is that of one sequence of `length` tokens."""
    try:
        config = source.config()
    except (TinkerError, OSError, ValueError) as exc:
        yield Remark(what="runs", ok=False, says=str(exc))
        return
    yield Remark(what="runs", ok=True, says=how_it_runs(config))
    stored: Mapping[str, str] = {}
    if source.is_gguf:
        yield Remark(what="files", ok=True, says=str(source.path))
    else:
        try:
            files = SafetensorsWeights(source.path)
            stored = text_names(files.names())
            yield from _files(source, config, files, stored)
        except (TinkerError, OSError, ValueError) as exc:
            yield Remark(what="files", ok=False, says=str(exc))
    if config.native:
        yield _memory(config, length, holds_mxfp4(stored))


def _files(
    source: ModelSource, config: ModelConfig, files: SafetensorsWeights, stored: Mapping[str, str]
) -> Iterator[Remark]:
    missing = files.missing_files()
    size = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
    says = f"{size / 1e9:.2f} GB in safetensors"
    if missing:
        says = f"{len(missing)} files of the index are missing, such as {missing[0]!r}"
    yield Remark(what="files", ok=not missing, says=says)
    if missing or not config.native:
        return
    bad = list(misfits(expected_shapes(config), stored, files.shape, config))
    left_out = sum(1 for _ in files.names()) - len(stored)
    says = f"all {sum(1 for _ in expected_shapes(config))} there, in the shapes of config.json"
    if left_out:
        says += f"; {left_out} of other towers stay on disk"
    if bad:
        more = f" (and {len(bad) - _SHOWN} more)" if len(bad) > _SHOWN else ""
        says = "; ".join(bad[:_SHOWN]) + more
    yield Remark(what="tensors", ok=not bad, says=says)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes that a model takes on one kind of device."""

    weights: int
    adapter: int
    """One adapter on every linear with its optimizer, 16 bytes a number."""
    training: int
    """What a training pass over one sequence keeps for its backward."""
    training_recomputed: int
    """The same where every layer is computed again instead."""
    sample: int
    """Keys, values and states of one sampled sequence."""

    @property
    def total(self) -> int:
        """For one user who trains and samples, layers recomputed where memory is short."""
        used = self.weights + self.adapter + self.training_recomputed + SAMPLES * self.sample
        return used + OVERHEAD_BYTES


def needs(
    config: ModelConfig, dtype: torch.dtype, *, length: int = LENGTH, rank: int = RANK
) -> Needs:
    """Sized for one sequence of `length` and an adapter of `rank`."""
    targets = native_targets(config).values()
    rows = sum(t.in_size + part.stop - part.start for t in targets for part in t.parts)
    # In fp32 a CPU computes, whose attention with sinks keeps its weights.
    on_cpu = dtype == torch.float32
    return Needs(
        weights=weight_bytes(config, dtype),
        adapter=rows * rank * 16,
        training=config.kept_bytes([length], dtype.itemsize, with_pairs=on_cpu),
        training_recomputed=length * 2 * config.num_layers * config.hidden_size * dtype.itemsize,
        sample=length * kv_bytes_per_token(config, dtype) + state_bytes(config, dtype),
    )


def _memory(config: ModelConfig, length: int, packed: bool) -> Remark:
    """In bf16 on a GPU and in fp32 on a CPU."""
    parts, adapter = [], 0
    for name, dtype in (("GPU", torch.bfloat16), ("CPU", torch.float32)):
        it = needs(config, dtype, length=length)
        adapter = it.adapter
        small = ""
        if packed:
            size = weight_bytes(config, dtype, packed=True)
            small = f" ({size / 1e9:.2f} with its experts kept in 4 bits)"
        parts.append(
            f"{name}: weights {it.weights / 1e9:.2f} GB{small}, training at {length} tokens "
            f"{it.training / 1e9:.2f} GB more ({it.training_recomputed / 1e9:.2f} recomputed), "
            f"{it.sample / 1e9:.3f} GB a sample"
        )
    parts.append(
        f"adapter of rank {RANK} on every linear with its optimizer {adapter / 1e9:.2f} GB"
    )
    if packed:
        parts.append(_packed_here(config))
    return Remark(what="memory", ok=True, says="; ".join(parts))


def _packed_here(config: ModelConfig) -> str:
    """How this machine would hold experts that are stored in 4 bits."""
    ops = ops_for(find_device("auto"))
    free = ops.free_bytes()
    says = {True: "stay in 4 bits", False: "are expanded", None: "do not fit even in 4 bits"}
    does = says[stays_packed(config, ops.compute_dtype(), free)]
    return f"here ({ops.device}, {free / 1e9:.1f} GB free) the experts {does}"
