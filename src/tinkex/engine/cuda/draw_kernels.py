"""Triton kernels that draw a token of each row; `sampling_math` says how, and is the oracle.

The plain version writes a whole number for every token of the vocabulary and reads it twice. Here
one kernel reads the logits once and keeps a sum for each line of 64 tokens, and another finds the
group, the line and the token of a row. Sums of whole numbers are exact, so their order is free.

Letters: N rows, X cells, L lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 64
"""Cells of a line, and lines of a group."""
_MOST_GROUPS = 1024
"""Of a row, which one program holds at once: four million cells."""


@triton.jit
def _weights(x, ONE: tl.constexpr):
    """exp, as whole numbers; 0 for what is no number."""
    # Cut to whole numbers before anything is added: from here on every sum is exact, and the
    # device and the order of adding cannot move a draw.
    weight = tl.exp(x) * ONE
    return tl.where(weight == weight, weight, 0.0).to(tl.int64)


@triton.jit
def _lines(scaled, lines, num_cells, num_groups, ONE: tl.constexpr, W: tl.constexpr):
    """The sums of the W lines of W cells in one group of a row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = tl.arange(0, W)
    cell = (group * W + line)[:, None] * W + tl.arange(0, W)[None, :]
    x = tl.load(scaled + row * num_cells + cell, cell < num_cells, other=float("-inf"))
    tl.store(lines + (row * num_groups + group) * W + line, tl.sum(_weights(x, ONE), 1))


@triton.jit
def _chosen(weights, number, last):
    """The index at which the running sum passes `number`'s share of the whole; that sum."""
    total = tl.sum(weights, 0)
    level = (number * total.to(tl.float64)).to(tl.int64)
    index = tl.sum((tl.cumsum(weights, 0) <= level).to(tl.int32), 0)
    return tl.minimum(index, last), total


@triton.jit
def _pick(
    scaled, lines, uniform, picked, totals, num_cells, num_groups,
    ONE: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Draw in one row: its group by the first number, a line of that by the second, then a cell."""
    row = tl.program_id(0).to(tl.int64)
    mine = lines + row * num_groups * W
    group, line = tl.arange(0, GROUPS), tl.arange(0, W)
    weights = tl.zeros((GROUPS,), tl.int64)
    for start in range(0, W, STEP):  # a few lines of every group at a time
        some = start + tl.arange(0, STEP)
        at = mine + group[:, None] * W + some[None, :]
        weights += tl.sum(tl.load(at, (group < num_groups)[:, None], other=0), 1)
    g, total = _chosen(weights, tl.load(uniform + row * 3), num_groups - 1)
    of_group = tl.load(mine + g * W + line)
    at_line, _ = _chosen(of_group, tl.load(uniform + row * 3 + 1), W - 1)
    cell = (g * W + at_line) * W + line
    x = tl.load(scaled + row * num_cells + cell, cell < num_cells, other=float("-inf"))
    at_cell, _ = _chosen(_weights(x, ONE), tl.load(uniform + row * 3 + 2), W - 1)
    # Clamped for rows that are not numbers; their logprob says so.
    tl.store(picked + row, tl.minimum((g * W + at_line) * W + at_cell, num_cells - 1).to(tl.int64))
    tl.store(totals + row, total)


def pick(scaled_NX: Tensor, uniform_N3: Tensor, one: float) -> tuple[Tensor, Tensor] | None:
    """(a cell of each row, the row's weight), where `one` is the weight of a cell that is 0.

    None: there are more cells than these kernels count.
    """
    num_rows, num_cells = scaled_NX.shape
    num_groups = triton.cdiv(num_cells, WIDTH * WIDTH)
    if num_groups > _MOST_GROUPS:
        return None
    device = scaled_NX.device
    scaled_NX = scaled_NX.contiguous()
    # A level equal to the whole sum would lie past the last cell; see `sampling_math._choose`.
    numbers_N3 = uniform_N3.double().clamp(max=1 - 2**-24).contiguous()
    lines_NL = torch.empty(num_rows, num_groups * WIDTH, dtype=torch.int64, device=device)
    picked_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    total_N = torch.empty_like(picked_N)
    if num_rows:
        _lines[(num_rows, num_groups)](
            scaled_NX, lines_NL, num_cells, num_groups, ONE=one, W=WIDTH, num_warps=4
        )
        groups = triton.next_power_of_2(num_groups)
        _pick[(num_rows,)](
            scaled_NX, lines_NL, numbers_N3, picked_N, total_N, num_cells, num_groups,
            ONE=one, W=WIDTH, GROUPS=groups, STEP=max(1, min(WIDTH, 4096 // groups)), num_warps=4,
        )  # fmt: skip
    return picked_N, total_N
