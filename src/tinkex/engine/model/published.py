"""Published checkpoints under one set of names: towers left out, experts stacked, packed numbers.

The decoder asks for the names of `weights.expected_shapes`. Publishers store the same numbers in
several ways: with a prefix for the text tower, expert by expert or fused, transposed, with gate and
up interleaved, in fp8 with a scale per block, in MXFP4. `PublishedWeights` finds which it is by the
names in the index, and turns one tensor at a time into ours. What it cannot recognise is refused
with its name. Weights of other towers are never read.

Shapes: E experts, X = 2M gate and up rows, D hidden size, M size of an expert, G groups of 32.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.model.shape import ExpertsConfig, ModelConfig
from tinkex.engine.numerics.mxfp4 import PackedExperts, gate_then_up
from tinkex.errors import InvalidInputError, NotSupportedError

log = logging.getLogger(__name__)
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
_LEFT_OUT = (
    "model.visual.",
    "visual.",
    "vision_tower.",
    "model.vision_tower.",
    "mtp.",
    "model.mtp.",
)
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUTERS = ("block_sparse_moe.gate.", "mlp.router.")
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED = re.compile(r"(model\.layers\.\d+\.)mlp\.(experts\.(?:gate_up|down)_proj(?:_bias)?)")


class PublishedWeights:
    """A `WeightReader` over the files' own names; see the module."""

    def __init__(
        self,
        stored: dict[str, str],
        load: Callable[[str], Tensor],
        config: ModelConfig,
        name: str,
    ) -> None:
        """`stored` maps our spelling of a name to the file's, as `text_names` makes it."""
        self._stored, self._load, self._config, self._name = stored, load, config, name
        self._told: set[str] = set()

    def names(self) -> Iterator[str]:
        return iter(self._stored)

    @property
    def in_mxfp4(self) -> bool:
        return holds_mxfp4(self._stored)

    def packed(self, name: str, dtype: torch.dtype) -> PackedExperts | None:
        if f"{name}_blocks" not in self._stored:
            return None
        found = PackedExperts(self._fetch(f"{name}_blocks"), self._fetch(f"{name}_scales"), dtype)
        return found.rows_sorted() if "gate_up" in name else found

    def read(self, name: str) -> Tensor:
        if self._config.experts is not None and (match := _STACKED.fullmatch(name)):
            return self._experts(match[1], match[2], self._config.experts)
        return self._plain(_spelling(name, self._stored))

    def _fetch(self, name: str) -> Tensor:
        if name not in self._stored:
            raise InvalidInputError(
                f"{self._name} holds no tensor {name!r}; are the shards complete?"
            )
        return self._load(self._stored[name])

    def _plain(self, name: str) -> Tensor:
        """Read a tensor in a type that we compute with."""
        tensor = self._fetch(name)
        if tensor.dtype in _PLAIN:
            return tensor
        scale = f"{name}_scale_inv"
        if tensor.dtype == torch.float8_e4m3fn and scale in self._stored:
            self._tell("fp8")
            return _from_fp8(tensor, self._fetch(scale))
        raise NotSupportedError(
            f"{self._name}: {name!r} is stored as {tensor.dtype} without a scale that is known "
            "here; use the unquantized checkpoint"
        )

    def _tell(self, kind: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s: %s weights are expanded as they are loaded", self._name, kind)

    # ------------------------------------------------------------------------------- experts

    def _experts(self, layer: str, leaf: str, experts: ExpertsConfig) -> Tensor:
        fused = f"{layer}mlp.{leaf}"
        if (packed := self.packed(fused, torch.bfloat16)) is not None:
            self._tell("MXFP4")
            return packed.expanded()
        if fused in self._stored:
            stacked = self._plain(fused)
            if not experts.biased:
                return stacked
            # gpt_oss: [E, in, out], gate and up taking turns.
            rows = stacked if leaf.endswith("_bias") else stacked.transpose(1, 2)
            return gate_then_up(rows) if "gate_up" in leaf else rows
        return self._one_by_one(layer, leaf, experts)

    def _one_by_one(self, layer: str, leaf: str, experts: ExpertsConfig) -> Tensor:
        styles = _styles(layer, leaf)
        style = next((s for s in styles if s[0].format(0) in self._stored), None)
        if style is None:
            near = next((n for n in self._stored if n.startswith(layer) and "expert" in n), None)
            raise NotSupportedError(
                f"{self._name}: the experts of {layer.rstrip('.')!r} are stored in no way that is "
                f"known here ({f'it holds {near!r}' if near else 'there are none'}); known: fused "
                f"{f'{layer}mlp.{leaf}'!r}, one by one {styles[1][0].format(0)!r} or "
                f"{styles[0][0].format(0)!r}"
            )
        whole: Tensor | None = None
        for expert in range(experts.count):
            rows = torch.cat([self._plain(name.format(expert)) for name in style])
            if whole is None:
                whole = rows.new_empty(experts.count, *rows.shape)
            if rows.shape != whole.shape[1:]:
                raise InvalidInputError(
                    f"{self._name}: {style[0].format(expert)!r} has shape {tuple(rows.shape)}, "
                    f"expert 0 has {tuple(whole.shape[1:])}"
                )
            whole[expert] = rows
        assert whole is not None
        return whole


def _spelling(name: str, stored: Container[str]) -> str:
    """The name under which a tensor is stored: routers have several."""
    others = [name.replace("mlp.gate.", router) for router in _ROUTERS]
    return next((n for n in (name, *others) if n in stored), name)


def _styles(layer: str, leaf: str) -> tuple[list[str], list[str]]:
    """How experts are named one by one, {} being the number of one."""
    parts = ("gate_proj", "up_proj") if "gate_up" in leaf else ("down_proj",)
    return (
        [f"{layer}block_sparse_moe.experts.{{}}.{_MIXTRAL[part]}.weight" for part in parts],
        [f"{layer}mlp.experts.{{}}.{part}.weight" for part in parts],
    )


def holds_mxfp4(stored: Iterable[str]) -> bool:
    """Whether experts among these names are in 4 bits."""
    return any(name.endswith("experts.gate_up_proj_blocks") for name in stored)


def text_names(names: Iterator[str]) -> dict[str, str]:
    """Our spelling of every name of the text model, and the file's."""
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(_LEFT_OUT):
            continue
        prefix = next((p for p in _TEXT_PREFIXES if name.startswith(p)), None)
        ours = f"model.{name.removeprefix(prefix)}" if prefix else name
        found[ours.replace("language_model.lm_head.", "lm_head.")] = name
    return found


def misfits(
    expected: Iterable[tuple[str, tuple[int, ...]]],
    stored: Mapping[str, str],
    shape_of: Callable[[str], tuple[int, ...]],
    config: ModelConfig,
) -> Iterator[str]:
    """Tensors that `PublishedWeights` would refuse, from headers alone."""
    for name, shape in expected:
        for spelling, wanted in _spellings(name, shape, stored, config):
            if spelling not in stored:
                yield f"{spelling!r} is missing"
            elif (found := shape_of(stored[spelling])) != wanted:
                yield f"{spelling!r} has shape {found} instead of {wanted}"


def _spellings(
    name: str, shape: tuple[int, ...], stored: Mapping[str, str], config: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The stored tensors that one of ours is made of, and their shapes."""
    match = _STACKED.fullmatch(name)
    if match is None or config.experts is None:
        yield _spelling(name, stored), shape
        return
    if f"{name}_blocks" in stored:
        yield f"{name}_blocks", (*shape[:2], shape[2] // 32, 16)
        yield f"{name}_scales", (*shape[:2], shape[2] // 32)
    elif name in stored or config.experts.biased:
        turned = config.experts.biased and len(shape) == 3
        yield name, (shape[0], shape[2], shape[1]) if turned else shape
    else:
        styles = _styles(match[1], match[2])
        style = next((s for s in styles if s[0].format(0) in stored), styles[-1])
        rows = shape[1] // len(style)
        for expert in range(shape[0]):
            yield from ((part.format(expert), (rows, shape[2])) for part in style)


def _from_fp8(weight_OI: Tensor, scale: Tensor) -> Tensor:
    """fp8 with one scale per block; how large a block is follows from the shapes."""
    if scale.ndim != weight_OI.ndim or scale.numel() == 0:
        return weight_OI.float().mul_(scale.float())
    wide = scale.float()
    for dim, size in enumerate(weight_OI.shape):
        block = 128 if -(-size // 128) == wide.shape[dim] else -(-size // wide.shape[dim])
        wide = wide.repeat_interleave(block, dim).narrow(dim, 0, size)
    return (weight_OI.float() * wide).to(torch.bfloat16)


def quantization_of(raw: Any) -> str | None:
    """How a config says its weights are packed; None: plainly."""
    packing = (raw or {}).get("quantization_config") or {}
    method = packing.get("quant_method")
    return None if method is None else str(method)
