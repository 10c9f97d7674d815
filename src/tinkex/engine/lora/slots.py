"""Adapters in fixed places, where a recorded decode step finds them, and the same on any rows.

Letters: B rows, S slots, P parameters of an adapter, M blocks of rows, I inputs, O outputs,
R ranks of all modules of a linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import lora_kernels
from tinkex.engine.lora.adapter import Adapter, LoraBatch, Span
from tinkex.engine.lora.layout import LinearLayout, layouts
from tinkex.engine.lora.operand import low_precision_flat
from tinkex.engine.transfer import send


class Slots:
    """Adapters of one layout side by side in low precision. Slot 0 is the base model alone.

    `blocks_M3` says which rows of the batch are whose; see `lora_kernels`.
    """

    def __init__(self, like: Adapter, count: int, dtype: torch.dtype, *, max_rows: int) -> None:
        device, self.count = like.flat.device, count
        self.flat_SP = like.flat.new_zeros((count, like.flat.numel()), dtype=dtype)
        num_blocks = self.most_blocks(max_rows)
        self.blocks_M3 = torch.zeros(num_blocks, 3, dtype=torch.int32, device=device)
        widest = max(len(group.a_RI) for group in like.groups.values())
        self.arrived = torch.zeros(num_blocks * widest, dtype=torch.int32, device=device)
        self._held: list[tuple[Adapter, int] | None] = [None] * count
        self.operands = {key: SlotLora(self, layout) for key, layout in layouts(like).items()}

    def most_blocks(self, num_rows: int) -> int:
        """Blocks that so many rows can need, however they are shared out."""
        return -(-num_rows // lora_kernels.ROWS) + self.count - 2

    def place(self, lora: LoraBatch, num_rows: int) -> list[int]:
        """Put a batch's adapters into slots; returns its rows in the order the slots want."""
        slot_of = self._assign(list(dict.fromkeys(span.adapter for span in lora.spans)))
        slot_by_row = np.zeros(num_rows, np.int64)
        for span in lora.spans:
            slot_by_row[span.start : span.stop] = slot_of[span.adapter]
        stops = np.cumsum(np.bincount(slot_by_row, minlength=len(self._held)))
        blocks = np.zeros(self.blocks_M3.shape, np.int32)
        wanted = [
            (slot, first, stops[slot])
            for slot in range(1, len(stops))
            for first in range(stops[slot - 1], stops[slot], lora_kernels.ROWS)
        ]
        blocks[: len(wanted)] = np.array(wanted, np.int32).reshape(-1, 3)
        self.blocks_M3.copy_(send(blocks, self.blocks_M3.device))
        return [int(row) for row in np.argsort(slot_by_row, kind="stable")]

    def _assign(self, adapters: Sequence[Adapter]) -> dict[Adapter, int]:
        """A slot for each adapter: the one it is in, or one that nobody of this batch needs."""
        held = {entry[0]: at for at, entry in enumerate(self._held) if entry is not None}
        kept = {held[adapter] for adapter in adapters if adapter in held}
        free = [at for at in range(1, len(self._held)) if at not in kept]
        chosen = {}
        for adapter in adapters:
            at = chosen[adapter] = held[adapter] if adapter in held else free.pop()
            if self._held[at] != (adapter, adapter.flat._version):
                self.flat_SP[at].copy_(low_precision_flat(adapter, self.flat_SP.dtype))
                self._held[at] = (adapter, adapter.flat._version)
        return chosen


@dataclass(frozen=True, slots=True)
class SlotLora:
    """One linear's adapters of all slots. See `fused`: `add_` is all that decoding asks for."""

    slots: Slots
    layout: LinearLayout

    def add_(self, y_BO: Tensor, x_BI: Tensor) -> None:
        slots = self.slots
        blocks_M3 = slots.blocks_M3[: slots.most_blocks(len(x_BI))]
        _add_(y_BO, x_BI, slots.flat_SP, blocks_M3, slots.arrived, self.layout)


def _add_(
    y_BO: Tensor,
    x_BI: Tensor,
    flat_SP: Tensor,
    blocks_M3: Tensor,
    arrived: Tensor,
    layout: LinearLayout,
) -> None:
    h_BR = lora_kernels.shrink(x_BI, flat_SP, blocks_M3, arrived, layout.at, layout.ranks)
    for factor in layout.outer:
        lora_kernels.expand_(y_BO, h_BR, flat_SP, factor, blocks_M3)


# ---------------------------------------------------------------------- any rows


@dataclass(frozen=True, slots=True)
class _Rows:
    """One adapter's rows, with the kernels of a decode step: no row depends on its company."""

    rows: slice
    flat_1P: Tensor
    blocks_M3: Tensor
    arrived: Tensor
    layouts: Mapping[str, LinearLayout]

    @classmethod
    def of(cls, span: Span, dtype: torch.dtype) -> _Rows:
        adapter, size = span.adapter, span.stop - span.start
        device, by_key = adapter.flat.device, layouts(adapter)
        blocks = [(0, at, size) for at in range(0, size, lora_kernels.ROWS)]
        widest = max(layout.ranks for layout in by_key.values())
        return cls(
            slice(span.start, span.stop),
            low_precision_flat(adapter, dtype)[None],
            send(blocks, device, torch.int32),
            torch.zeros(len(blocks) * widest, dtype=torch.int32, device=device),
            by_key,
        )


@dataclass(frozen=True, slots=True)
class RowLora:
    """All adapters of one linear in a batch; see `lora_operand.LoraAddend`."""

    members: tuple[_Rows, ...]
    key: str

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> None:
        for one in self.members:
            y_tO, x_tI = y_TO[one.rows], x_TI[one.rows]
            _add_(y_tO, x_tI, one.flat_1P, one.blocks_M3, one.arrived, one.layouts[self.key])


def row_addends(lora: LoraBatch | None, dtype: torch.dtype) -> dict[str, RowLora]:
    """By linear: what a batch's adapters add, each row as if it were alone."""
    members = [_Rows.of(span, dtype) for span in (lora.spans if lora is not None else ())]
    keys = dict.fromkeys(key for one in members for key in one.layouts)
    return {key: RowLora(tuple(m for m in members if key in m.layouts), key) for key in keys}
