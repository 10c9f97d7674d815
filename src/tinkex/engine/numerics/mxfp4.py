"""Matrices in MXFP4, 32 numbers of 4 bits with one exponent: expanded once, or whenever used.

`PackedExperts` stands where the stacked matrices of all experts stand, `PackedMatrix` where one of
them does; `expanded` makes an ordinary tensor of either, and leaves an ordinary tensor alone. So a
product asks for `expanded(weight)` and knows nothing of bits, adapters included. What is expanded
here and now is the same numbers as a checkpoint expanded when it was loaded.

Shapes: E experts, R rows, G groups of 32 columns, b the 16 bytes of a group, I = 32 G columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tinkex.errors import InvalidInputError

GROUP = 32
BYTES_PER_GROUP = 17
"""Sixteen bytes of numbers, one of their exponent."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [R, I], computed with in `dtype`."""

    blocks_RGb: Tensor
    scales_RG: Tensor
    dtype: torch.dtype

    def expanded(self) -> Tensor:
        return _expand(self.blocks_RGb, self.scales_RG).to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices [E, R, I] of all experts of one linear."""

    blocks_ERGb: Tensor
    scales_ERG: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        blocks, scales = self.blocks_ERGb, self.scales_ERG
        if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != GROUP // 2:
            raise InvalidInputError(
                f"MXFP4 blocks of shape {tuple(blocks.shape)} do not fit scales of shape "
                f"{tuple(scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, groups = self.scales_ERG.shape
        return (*rows, groups * GROUP)

    def __getitem__(self, expert: int) -> PackedMatrix:
        return PackedMatrix(self.blocks_ERGb[expert], self.scales_ERG[expert], self.dtype)

    def expanded(self) -> Tensor:
        """All of them; one after the other, so that only one is ever held in fp32."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.blocks_ERGb.device)
        for expert, place_RI in enumerate(out):
            place_RI.copy_(_expand(self.blocks_ERGb[expert], self.scales_ERG[expert]))
        return out

    def rows_sorted(self) -> PackedExperts:
        """See `gate_then_up`."""
        blocks, scales = gate_then_up(self.blocks_ERGb), gate_then_up(self.scales_ERG)
        return PackedExperts(blocks, scales, self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> PackedExperts:
        return PackedExperts(self.blocks_ERGb.to(device), self.scales_ERG.to(device), dtype)


Matrix = Tensor | PackedMatrix
Stack = Tensor | PackedExperts


def gate_then_up(rows_EX: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ... become all of gate, then all of up."""
    return torch.cat([rows_EX[:, ::2], rows_EX[:, 1::2]], dim=1)


def expanded(weight: Tensor | PackedMatrix | PackedExperts) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.expanded()


@lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """By byte, the two numbers in it; the lower half of a byte comes first."""
    with torch.inference_mode(False):
        each = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)])
        byte = torch.arange(256)
        return torch.stack([each[byte & 15], each[byte >> 4]], dim=1).to(device)


def _expand(blocks_RGb: Tensor, scales_RG: Tensor) -> Tensor:
    """[R, I] in fp32, which holds each of these numbers exactly."""
    flat = blocks_RGb.reshape(-1).int()
    values_RGn = _pairs(blocks_RGb.device).index_select(0, flat).view(*scales_RG.shape, GROUP)
    # OCP Microscaling Formats 1.0: E8M0 scales are powers of two with a bias of 127.
    return torch.ldexp(values_RGn, scales_RG.int()[..., None] - 127).flatten(-2)
