"""Which experts each cached token passed, in pages beside its keys and values.

A page is shared, copied, evicted and computed anew together with the keys and values of its tokens,
so a sample knows the routing of its whole context: of prompts that another sample prefilled, and
after a preemption too. It takes a hundredth of the memory of keys and values, so it is always kept.

Shapes: T tokens of a pass, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkex.contract.routing import NOT_RECORDED
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.sample import slabs
from tinkex.engine.sample.paged import cells


class ExpertPages:
    """Numbers of experts for every token that the KV cache has room for."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        experts = config.routing
        assert experts is not None
        self._layers, self._size = config.expert_layers, block_size
        # One row more: rows of a recorded pass that belong to no sequence are written there.
        shape = (num_blocks * block_size + 1, experts.layers, experts.per_token)
        self._pages = slabs.zeros(shape, device, torch.int16)

    def write(self, slots_T: Tensor, routing: Routing) -> None:
        """Note a pass whose first rows belong to `slots_T`; a slot of -1 belongs to nobody.

        Device work only, so that it can be a part of a recorded step.
        """
        num_rows = len(slots_T)
        chosen_TLk = torch.stack([routing.chosen[i][:num_rows] for i in self._layers], dim=1)
        slots_T = torch.where(slots_T < 0, len(self._pages) - 1, slots_T)
        self._pages.index_copy_(0, slots_T, chosen_TLk.to(torch.int16))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each."""
        for source, target in pairs:
            rows = self._pages[source * self._size : (source + 1) * self._size]
            self._pages[target * self._size : (target + 1) * self._size] = rows

    def read(self, blocks: Sequence[int], start: int, stop: int) -> NDArray[np.int16]:
        """[T, L, k] of the tokens `start` to `stop` of a sequence."""
        slots_T = torch.from_numpy(cells(blocks, start, stop, self._size))
        found: NDArray[np.int16] = self._pages[slots_T.to(self._pages.device)].cpu().numpy()
        return found


def unrecorded(like_TLk: NDArray[np.int16]) -> NDArray[np.int16]:
    """The row of a token that nobody computed."""
    return np.full((1, *like_TLk.shape[1:]), NOT_RECORDED, np.int16)
