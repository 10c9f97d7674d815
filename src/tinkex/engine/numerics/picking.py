"""Draw a cell of each row by its weight, exactly on every device.

Weights are whole numbers (that of a scaled logit of 0 is 2^40), so their sums are exact in whatever
order a device adds. Three uniform numbers of a row pick a group of 4,096 cells by its share of the
weight, then 64 of these, then the cell: a single number for all cells would make a draw depend on
the sum of all weights before it, and rounding that moves this sum by a millionth would change draws
that are rarer than that. The kernels of `cuda.draw_kernels` are held against this module.

Shapes: N rows, X cells.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONE = float(1 << 40)
"""The weight of a cell whose scaled logit is 0: a row's likeliest token."""
_WIDTH = 64
_GROUP = _WIDTH * _WIDTH


def whole_weights(scaled: Tensor) -> Tensor:
    """exp, as whole numbers."""
    return torch.exp(scaled).mul_(ONE).to(torch.int64)


def log_weight(total: Tensor) -> Tensor:
    """The logarithm of a sum of such weights, as a float."""
    return (total.double() / ONE).log().float()


def pick(scaled_NX: Tensor, uniform_N3: Tensor) -> tuple[Tensor, Tensor]:
    """(a cell of each row [N], the log of the row's weight [N])."""
    num_rows, num_cells = scaled_NX.shape
    num_groups = -(-num_cells // _GROUP)
    shape = (num_rows, num_groups, _WIDTH, _WIDTH)
    cells = torch.zeros(shape, dtype=torch.int64, device=scaled_NX.device)
    cells.view(num_rows, -1)[:, :num_cells] = torch.exp(scaled_NX).mul_(ONE)
    lines = cells.sum(3)
    groups = lines.sum(2)
    group_N, total_N = _choose(groups, uniform_N3[:, 0])
    every_N = torch.arange(num_rows, device=scaled_NX.device)
    line_N, _ = _choose(lines[every_N, group_N], uniform_N3[:, 1])
    cell_N, _ = _choose(cells[every_N, group_N, line_N], uniform_N3[:, 2])
    # Clamped for rows that are not numbers; their logprob says so.
    picked_N = ((group_N * _WIDTH + line_N) * _WIDTH + cell_N).clamp_(max=num_cells - 1)
    return picked_N, log_weight(total_N)


def _choose(weights_NX: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """(an index of each row by its weight, the row's sum); never one of weight 0."""
    ends_NX = weights_NX.cumsum(1)
    total_N = ends_NX[:, -1]
    # A level equal to the whole sum would lie past the last cell.
    level_N = (uniform_N.double().clamp(max=1 - 2**-24) * total_N.double()).to(torch.int64)
    index_N = torch.searchsorted(ends_NX, level_N[:, None], right=True)[:, 0]
    return index_N.clamp_(max=weights_NX.shape[1] - 1), total_N
