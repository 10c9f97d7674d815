"""A matrix product whose rows do not depend on their company.

cuBLAS chooses its kernel, and with it the order of its sums, by the number of rows: a token's bits
then change with whoever else is in the batch. This one is slower and does not: what a program
computes and in which order depends on the weight's shape alone. In deterministic mode the sampler
uses it, so that a seeded sample is the same alone and in a crowd.

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _INPUTS, _GROUP = 64, 64, 8


@triton.jit
def _product(
    x, w, bias, y, T, num_out, num_in,
    BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share inputs and weights: blocks of rows take turns in groups.
    program, num_m, num_o = tl.program_id(0), tl.cdiv(T, BM), tl.cdiv(num_out, BO)
    first_m = program // (GROUP * num_o) * GROUP
    members = tl.minimum(num_m - first_m, GROUP)
    m = first_m + program % (GROUP * num_o) % members
    n = program % (GROUP * num_o) // members
    rows = (m * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (n * BO + tl.arange(0, BO)).to(tl.int64)
    at_x = x + rows[:, None] * num_in
    at_w = w + columns[None, :] * num_in
    acc = tl.zeros((BM, BO), tl.float32)
    for start in range(0, num_in, BK):
        i = start + tl.arange(0, BK)
        xv = tl.load(at_x + i[None, :], (rows < T)[:, None] & (i < num_in)[None, :], other=0.0)
        wv = tl.load(
            at_w + i[:, None], (columns < num_out)[None, :] & (i < num_in)[:, None], other=0.0
        )
        acc += tl.dot(xv, wv)
    if HAS_BIAS:
        acc += tl.load(bias + columns, columns < num_out, other=0.0).to(tl.float32)[None, :]
    to = y + rows[:, None] * num_out + columns[None, :]
    tl.store(to, acc, (rows < T)[:, None] & (columns < num_out)[None, :])


def row_product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + bias with fp32 sums, rounded once to `dtype` (that of x by default)."""
    (T, num_in), num_out = x_TI.shape, len(weight_OI)
    y_TO = torch.empty(T, num_out, device=x_TI.device, dtype=dtype or x_TI.dtype)
    # Few rows must still be work for most multiprocessors.
    columns = 128 if num_out >= 16384 else 64 if num_out >= 8192 else 32
    grid = (triton.cdiv(T, _ROWS) * triton.cdiv(num_out, columns),)
    _product[grid](
        x_TI.contiguous(), weight_OI, bias_O, y_TO, T, num_out, num_in,
        BM=_ROWS, BO=columns, BK=_INPUTS, GROUP=_GROUP, HAS_BIAS=bias_O is not None,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return y_TO
