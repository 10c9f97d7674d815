"""Memory cut into numbered places along its second dimension: KV blocks, and slots of states.

Who has which place is known elsewhere (`kv_cache`, `state_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.sample.state_pool import Copy

_NUMPY = {torch.float32: np.float32, torch.int16: np.int16}


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On a CPU they come from numpy, where pages that no sequence reaches cost nothing."""
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.zeros(shape, _NUMPY[dtype]))
    return torch.zeros(shape, device=device, dtype=dtype)


def clear(slabs: Sequence[Tensor], places: Sequence[int]) -> None:
    """Zero some places in all layers."""
    if places:
        at = torch.tensor(places, device=slabs[0].device)
        for slab in slabs:
            slab.index_fill_(1, at, 0)


def copy(slabs: Sequence[Tensor], pairs: Sequence[Copy]) -> None:
    """Copy whole places, (from, to) each, in all layers."""
    if pairs:
        source, target = torch.tensor(pairs, device=slabs[0].device).t().contiguous()
        for slab in slabs:
            # All are read before any is written: a place may be both.
            slab.index_copy_(1, target, slab.index_select(1, source))
