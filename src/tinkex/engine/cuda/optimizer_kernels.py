"""Triton kernels for what an optimizer does with an adapter's buffers, in one pass over them.

torch's own kernels read and write a buffer a dozen times for a step of AdamW, and turn a gradient
into float64 in memory before they measure it. With many small models on one card that is a third of
all work. The plain versions are `Ops.adamw_` and `Ops.norm`.

Letters: P parameters.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.contract.optimizers import AdamParams

_BLOCK = 1024
_PROGRAMS = 1056
"""That measure a gradient together: eight for each multiprocessor of an H200. A constant, because
the order of the sum follows it."""


@triton.jit
def _adamw(
    weights, first, second, grad, P, rest1, beta2, rest2, root2, eps, rate, BLOCK: tl.constexpr
):
    """BLOCK parameters, each by itself."""
    # int64: an adapter of many experts may have more than 2^31 numbers.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < P
    g = tl.load(grad + at, real, other=0.0)
    m = tl.load(first + at, real, other=0.0)
    v = tl.load(second + at, real, other=0.0)
    w = tl.load(weights + at, real, other=0.0)
    # As torch's `lerp_`, `addcmul_` and `addcdiv_` write the same step.
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    w -= rate * (m / (tl.sqrt(v) / root2 + eps))
    tl.store(first + at, m, real)
    tl.store(second + at, v, real)
    tl.store(weights + at, w, real)


def adamw_(
    weights_P: Tensor, first_P: Tensor, second_P: Tensor, grad_P: Tensor, step: int, p: AdamParams
) -> None:
    """Apply step number `step`, counted from 1, in place."""
    root2 = math.sqrt(1 - p.beta2**step)
    _adamw[(triton.cdiv(weights_P.numel(), _BLOCK),)](
        weights_P, first_P, second_P, grad_P, weights_P.numel(), 1 - p.beta1, p.beta2,
        1 - p.beta2, root2, float(p.eps), p.learning_rate / (1 - p.beta1**step),
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    # torch's own kernels would say so too. Copies in low precision are made anew by this number.
    for changed in (weights_P, first_P, second_P):
        torch.autograd.graph.increment_version(changed)


@triton.jit
def _squares(x, out, P, BLOCK: tl.constexpr):
    """Every so many-th block, from this program's own on, into BLOCK sums that meet at the end."""
    total = tl.zeros((BLOCK,), tl.float64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, P, step):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < P, other=0.0).to(tl.float64)
        total += v * v
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def norm(x_P: Tensor) -> float:
    """The 2-norm with float64 sums, as one number on the host."""
    squares = torch.empty(_PROGRAMS, device=x_P.device, dtype=torch.float64)
    _squares[(_PROGRAMS,)](x_P, squares, x_P.numel(), BLOCK=_BLOCK, num_warps=4)
    # Sums of programs go through memory: atomic adds would come in any order.
    return float(squares.sum().sqrt())
