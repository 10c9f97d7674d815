"""Adapters in fixed places, where a recorded decode step finds them.

Letters: B rows, S slots, P parameters of an adapter, M blocks of rows, I inputs, O outputs,
R ranks of all modules of a linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import lora_kernels
from tinkex.engine.cuda.adapter_layout import LinearLayout, layouts
from tinkex.engine.cuda.adapter_operand import AdapterTokens, low_precision_flat
from tinkex.engine.cuda.transfer import send
from tinkex.engine.lora.adapter import Adapter, LoraBatch


class AdapterSlots:
    """Adapters of one layout side by side in low precision. Slot 0 is the base model alone.

    `blocks_M3` says which rows of the batch are whose; see `lora_kernels`. Adapters' inner products
    run beside the products with the base's weights, on a stream of their own: a decode step is
    hundreds of small kernels, each of which leaves most of the card idle at its start and end.
    """

    def __init__(self, like: Adapter, count: int, dtype: torch.dtype, *, max_rows: int) -> None:
        device, self.count = like.flat.device, count
        self.flat_SP = like.flat.new_zeros((count, like.flat.numel()), dtype=dtype)
        # Every slot but the base's may end with a block that is not full; the first such is counted
        # by the rounding up.
        num_blocks = -(-max_rows // lora_kernels.ROWS) + count - 2
        self.blocks_M3 = torch.zeros(num_blocks, 3, dtype=torch.int32, device=device)
        widest = max(len(group.a_RI) for group in like.groups.values())
        self.arrived = torch.zeros(num_blocks * widest, dtype=torch.int32, device=device)
        self._held: list[tuple[Adapter, int] | None] = [None] * count
        self._like = like
        self.slot_B = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """Whose each row is, in the order that `place` gives."""
        self.beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.operands = {key: SlotOperand(self, layout) for key, layout in layouts(like).items()}

    def most_blocks(self, num_rows: int) -> int:
        """Blocks that so many rows can need, however they are shared out."""
        return -(-num_rows // self.block_rows(num_rows)) + self.count - 2

    def block_rows(self, num_rows: int) -> int:
        """Rows of a block of a step with so many: of one adapter there may be many."""
        many = num_rows // (self.count - 1) >= lora_kernels.MANY_ROWS
        return lora_kernels.MANY_ROWS if many else lora_kernels.ROWS

    def place(self, lora: LoraBatch, num_rows: int, places: int) -> list[int]:
        """Put a batch's adapters into slots, for a step that was recorded with so many places.

        Returns the rows of the batch in the order the slots want.
        """
        slot_of = self._assign(list(dict.fromkeys(span.adapter for span in lora.spans)))
        slot_by_row = np.zeros(num_rows, np.int64)
        for span in lora.spans:
            slot_by_row[span.start : span.stop] = slot_of[span.adapter]
        stops = np.cumsum(np.bincount(slot_by_row, minlength=len(self._held)))
        blocks = np.zeros(self.blocks_M3.shape, np.int32)
        wanted = [
            (slot, first, stops[slot])
            for slot in range(1, len(stops))
            for first in range(stops[slot - 1], stops[slot], self.block_rows(places))
        ]
        blocks[: len(wanted)] = np.array(wanted, np.int32).reshape(-1, 3)
        self.blocks_M3.copy_(send(blocks, self.blocks_M3.device))
        self.slot_B[:num_rows].copy_(
            send(np.sort(slot_by_row).astype(np.int32), self.slot_B.device)
        )
        return [int(row) for row in np.argsort(slot_by_row, kind="stable")]

    def expert_member(self, num_rows: int) -> AdapterTokens:
        """The one adapter of a recorded step on experts, which are no operands of single linears.

        Called while a step is recorded, so that replays make the mask anew.
        """
        return AdapterTokens(0, num_rows, self._like, self.flat_SP[1], self.slot_B[:num_rows] == 1)

    def _assign(self, adapters: Sequence[Adapter]) -> dict[Adapter, int]:
        """A slot for each adapter: the one it is in, or one that nobody of this batch needs."""
        held = {entry[0]: at for at, entry in enumerate(self._held) if entry is not None}
        kept = {held[adapter] for adapter in adapters if adapter in held}
        free = [at for at in range(1, len(self._held)) if at not in kept]
        chosen = {}
        for adapter in adapters:
            at = chosen[adapter] = held[adapter] if adapter in held else free.pop()
            # The version is torch's count of changes in place: a step makes the copy stale.
            if self._held[at] != (adapter, adapter.flat._version):
                self.flat_SP[at].copy_(low_precision_flat(adapter, self.flat_SP.dtype))
                self._held[at] = (adapter, adapter.flat._version)
        return chosen


@dataclass(frozen=True, slots=True)
class SlotOperand:
    """The adapters of all slots on one linear, forward only; see `adapter_operand.LoraAddend`."""

    slots: AdapterSlots
    layout: LinearLayout

    def start(self, x_BI: Tensor) -> Tensor:
        if (beside := self.slots.beside) is None:
            return self._inner(x_BI)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            return self._inner(x_BI)

    def _inner(self, x_BI: Tensor) -> Tensor:
        slots, layout, num_rows = self.slots, self.layout, len(x_BI)
        return lora_kernels.shrink(
            x_BI, slots.flat_SP, slots.blocks_M3[: slots.most_blocks(num_rows)], slots.arrived,
            layout.at, layout.ranks, rows=slots.block_rows(num_rows),
        )  # fmt: skip

    def add_(self, y_BO: Tensor, h_BR: Tensor) -> None:
        # What `start` reads and makes is not given to anyone else before the streams meet again.
        slots, num_rows = self.slots, len(y_BO)
        if slots.beside is not None:
            torch.cuda.current_stream().wait_stream(slots.beside)
        blocks_M3 = slots.blocks_M3[: slots.most_blocks(num_rows)]
        for factor in self.layout.outer:
            lora_kernels.expand_(
                y_BO, h_BR, slots.flat_SP, factor, blocks_M3, rows=slots.block_rows(num_rows)
            )
