"""Take a native model's weights from a reader to the device, one tensor at a time, all checked.

Names and shapes come from `weights.expected_shapes`; a tensor that is missing or of another shape
is refused before it is used, and a model that cannot fit is refused before anything is read. The
host never holds more than one tensor beside what the device keeps.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tinkex.engine.model.delta import DeltaWeights, by_kind
from tinkex.engine.model.mixture import MixtureWeights
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.sharding import ModelShards
from tinkex.engine.model.weights import WeightReader, expected_shapes
from tinkex.engine.numerics.mxfp4 import BYTES_PER_GROUP, GROUP, Stack
from tinkex.engine.numerics.ops import Ops
from tinkex.errors import InvalidInputError, NotSupportedError

log = logging.getLogger(__name__)


class Loader:
    """Reads weights and puts them where and in which type the decoder wants them."""

    def __init__(
        self,
        shards: ModelShards,
        rank: int,
        weights: WeightReader,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_packed: bool = False,
    ) -> None:
        """`keep_packed` leaves experts in 4 bits that are stored so."""
        self._keep_packed = keep_packed
        self._shards, self._rank, self.config = shards, rank, shards.local
        self._weights, self._device, self._dtype = weights, device, dtype
        # Files hold the whole model: tensors are checked before their shard is taken.
        self._shapes = dict(expected_shapes(shards.whole))

    def one(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._weights.read(name)
        self._check(name, tensor.shape)
        shard = self._shards.weight(name, tensor, self._rank)
        return shard.to(self._device, dtype or self._dtype).contiguous()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if tuple(shape) != self._shapes[name]:
            raise InvalidInputError(
                f"tensor {name!r} has shape {tuple(shape)}; config.json asks for "
                f"{self._shapes[name]}"
            )

    def experts(self, name: str) -> Stack:
        """The matrices of all experts of one linear, packed if they are to be kept so."""
        packed = self._weights.packed(name, self._dtype) if self._keep_packed else None
        if packed is None:
            return self.one(name)
        self._check(name, packed.shape)
        return packed.to(self._device, self._dtype)

    def maybe(self, name: str) -> Tensor | None:
        """None for what this model does not have."""
        return self.one(name) if name in self._shapes else None

    def norm(self, name: str) -> Tensor:
        if not self.config.norm_offset:
            return self.one(name)
        # Near one, bf16 has two digits: such weights stay in fp32.
        wide = self.one(name, torch.promote_types(self._dtype, torch.float32))
        return wide.add_(1.0)

    def maybe_norm(self, name: str) -> Tensor | None:
        return self.norm(name) if name in self._shapes else None

    def fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor:
        return torch.cat([self.one(f"{prefix}{name}.{suffix}") for name in names])

    def maybe_fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor | None:
        there = f"{prefix}{names[0]}.{suffix}" in self._shapes
        return self.fused(prefix, names, suffix) if there else None

    # --------------------------------------------------------------------------- larger pieces

    def delta(self, prefix: str) -> DeltaWeights:
        config, name = self.config.delta, f"{prefix}linear_attn."
        assert config is not None
        wide = torch.promote_types(self._dtype, torch.float32)
        return DeltaWeights(
            config,
            self.one(name + "conv1d.weight").squeeze(1),
            self.one(name + "A_log", wide).exp().neg(),
            self.one(name + "dt_bias", wide),
            self.one(name + "norm.weight"),
            by_kind(config).to(self._device) if config.by_head else None,
        )

    def mixture(self, prefix: str) -> MixtureWeights:
        name = f"{prefix}mlp."
        shared = f"{name}shared_expert."
        experts = self.config.experts
        assert experts is not None
        return MixtureWeights(
            self.one(name + "gate.weight"),
            self.maybe(name + "gate.bias"),
            self.experts(name + "experts.gate_up_proj"),
            self.maybe(name + "experts.gate_up_proj_bias"),
            self.experts(name + "experts.down_proj"),
            self.maybe(name + "experts.down_proj_bias"),
            self.maybe_fused(shared, ("gate_proj", "up_proj"), "weight"),
            self.maybe(shared + "down_proj.weight"),
            self.maybe(name + "shared_expert_gate.weight"),
            first=self._rank * (experts.count // self._shards.size),
        )


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, packed: bool = False) -> int:
    """Bytes of a native model's weights on the device; `packed`: with experts in 4 bits."""
    total = 0
    for name, shape in expected_shapes(config):
        size = torch.Size(shape).numel()
        in_four_bits = packed and name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        total += size // GROUP * BYTES_PER_GROUP if in_four_bits else size * dtype.itemsize
    return total


_ROOM_TO_WORK = 0.75
"""Experts are expanded while all weights take no more than this share of the free memory."""


def stays_packed(config: ModelConfig, dtype: torch.dtype, free: int) -> bool | None:
    """Whether experts that are stored in 4 bits stay so; None: even so they do not fit."""
    # The rest is for activations, keys and values, and adapters.
    if weight_bytes(config, dtype) <= _ROOM_TO_WORK * free:
        return False
    return True if weight_bytes(config, dtype, packed=True) <= free else None


def keeps_packed(
    config: ModelConfig,
    reader: WeightReader,
    name: str,
    ops: Ops,
    dtype: torch.dtype,
) -> bool:
    """Whether experts that are stored in 4 bits stay so: where expanded they would not fit.

    Raises:
        NotSupportedError: The weights are larger than what the device has free.
    """
    device, free = ops.device, ops.free_bytes()
    whole = weight_bytes(config, dtype)
    kind = str(dtype).removeprefix("torch.")
    if not reader.in_mxfp4:
        if whole > free:
            raise _too_large(name, f"{whole / 1e9:.1f} GB for its weights in {kind}", device, free)
        return False
    packed, stays = weight_bytes(config, dtype, packed=True), stays_packed(config, dtype, free)
    if stays is None:
        what = f"{packed / 1e9:.1f} GB for its weights, even with its experts kept in 4 bits"
        raise _too_large(name, what, device, free)
    if not stays:
        return False
    log.warning(
        "%s: its experts stay in 4 bits (MXFP4) and are expanded whenever they are used, which is "
        "slower: the weights take %.1f GB so and %.1f GB expanded; %s has %.1f GB free",
        *(name, packed / 1e9, whole / 1e9, device, free / 1e9),
    )
    return True


def _too_large(name: str, what: str, device: torch.device, free: int) -> NotSupportedError:
    return NotSupportedError(
        f"{name} needs {what}; {device} has {free / 1e9:.1f} GB free. Use a larger device or a "
        "smaller model, or let several devices share it (--group)."
    )


def check_room(config: ModelConfig, name: str, ops: Ops, dtype: torch.dtype, parts: int) -> None:
    """Refuse a model if one of so many `parts` of it is larger than what the device has free."""
    free = ops.free_bytes()
    needed = weight_bytes(config, dtype) // parts
    if needed > free:
        raise _too_large(name, f"{needed / 1e9:.1f} GB for a part of its weights", ops.device, free)
