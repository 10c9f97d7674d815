"""Adapters in fixed places, where a recorded decode step finds them, and the same on any rows.

Letters: B rows, S slots, P parameters of an adapter, M blocks of rows, I inputs, O outputs,
R ranks of all modules of a linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import lora_kernels
from tinkex.engine.lora import Adapter, LoraBatch
from tinkex.engine.lora_layout import LinearLayout, layouts
from tinkex.engine.lora_operand import low_precision_flat
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
        flat_SP, layout = self.slots.flat_SP, self.layout
        blocks_M3 = self.slots.blocks_M3[: self.slots.most_blocks(len(x_BI))]
        h_BR = lora_kernels.shrink(
            x_BI, flat_SP, blocks_M3, self.slots.arrived, layout.at, layout.ranks
        )
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
    layout: LinearLayout

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> None:
        x_tI, y_tO, layout = x_TI[self.rows], y_TO[self.rows], self.layout
        h_tR = lora_kernels.shrink(
            x_tI, self.flat_1P, self.blocks_M3, self.arrived, layout.at, layout.ranks
        )
        for factor in layout.outer:
            lora_kernels.expand_(y_tO, h_tR, self.flat_1P, factor, self.blocks_M3)


@dataclass(frozen=True, slots=True)
class RowLora:
    """All adapters of one linear in a batch; see `lora_operand.LoraAddend`."""

    members: tuple[_Rows, ...]

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> None:
        for member in self.members:
            member.add_(y_TO, x_TI)


def row_addends(lora: LoraBatch | None, dtype: torch.dtype) -> dict[str, RowLora]:
    """By linear: what a batch's adapters add, each row as if it were alone."""
    members: dict[str, list[_Rows]] = {}
    for span in lora.spans if lora is not None else ():
        adapter, size = span.adapter, span.stop - span.start
        device, flat_1P = adapter.flat.device, low_precision_flat(adapter, dtype)[None]
        starts = range(0, size, lora_kernels.ROWS)
        blocks_M3 = send([(0, at, size) for at in starts], device, torch.int32)
        by_key = layouts(adapter)
        widest = max(layout.ranks for layout in by_key.values())
        arrived = torch.zeros(len(blocks_M3) * widest, dtype=torch.int32, device=device)
        for key, layout in by_key.items():
            one = _Rows(slice(span.start, span.stop), flat_1P, blocks_M3, arrived, layout)
            members.setdefault(key, []).append(one)
    return {key: RowLora(tuple(some)) for key, some in members.items()}
