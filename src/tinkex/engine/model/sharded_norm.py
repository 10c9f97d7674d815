"""Norms of queries and keys over the heads of all ranks of a group.

Some families norm all heads of a token together. A rank has some of the heads, so the means of
their squares are summed over the group, forward and backward.

Shapes: T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinkex.engine.collectives.group import Group
from tinkex.engine.model.layers import wide


def norm_heads(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, group: Group
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norms of this rank's queries and keys, by the means of all ranks."""
    normed: tuple[Tensor, Tensor] = _NormHeads.apply(  # type: ignore[no-untyped-call]
        q, k, q_weight, k_weight, eps, group
    )
    return normed


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        means = _means(group, wide(q).square(), wide(k).square())
        inverses = [(mean + eps).rsqrt() for mean in means]
        ctx.group = group
        ctx.save_for_backward(q, k, q_weight, k_weight, *inverses)
        q_out, k_out = (
            (wide(x) * inverse).to(x.dtype).mul_(weight)
            for x, inverse, weight in zip((q, k), inverses, (q_weight, k_weight), strict=True)
        )
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        q, k, q_weight, k_weight, q_inverse, k_inverse = ctx.saved_tensors
        q_unit, k_unit = wide(q) * q_inverse, wide(k) * k_inverse
        gq, gk = wide(dq) * q_weight, wide(dk) * k_weight
        q_inner, k_inner = _means(ctx.group, gq * q_unit, gk * k_unit)
        dq = ((gq - q_unit * q_inner) * q_inverse).to(q.dtype)
        dk = ((gk - k_unit * k_inner) * k_inverse).to(k.dtype)
        return dq, dk, None, None, None, None


def _means(group: Group, *parts: Tensor) -> list[Tensor]:
    """The means [T, 1] over the columns of all ranks, with one all-reduce for all tensors."""
    sums_Tn = group.all_reduce(torch.stack([part.sum(-1) for part in parts], dim=-1))
    widths = [part.shape[-1] * group.size for part in parts]
    return [sums_Tn[:, i : i + 1] / width for i, width in enumerate(widths)]
