"""Causal attention on a CPU whose rows do not depend on their company, for deterministic mode.

As on a GPU (`engine.cuda.attention`): keys in chunks of `CHUNK` positions, each chunk one product,
one sum of weights and one weighted sum of values, chunks merged in order. A last chunk is filled up
with zeros, so every product has the same shape but for its number of rows, on which its sums do not
depend (`row_filling`). So a training pass, a prompt's chunk and a decode step give a token the same
bits. The backward is torch's own, from our output and log-sum.

Shapes: B sequences, H query heads, K key heads, G = H / K, t queries, l keys, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.numerics.row_filling import fill

CHUNK = 256


def exact_attention(
    q_BHtd: Tensor, k_BKld: Tensor, v_BKld: Tensor, ends_B: Tensor, window: int | None
) -> Tensor:
    """Output [B, H, t, d]. `ends_B` counts the keys that each sequence's last query sees."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHtd, k_BKld, v_BKld)):
        out: Tensor = _Exact.apply(  # type: ignore[no-untyped-call]
            q_BHtd, k_BKld, v_BKld, ends_B, window
        )
        return out
    return _forward(q_BHtd, k_BKld, v_BKld, ends_B, window)[0]


def _forward(
    q_BHtd: Tensor, k_BKld: Tensor, v_BKld: Tensor, ends_B: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum of the scaled scores [B, H, t])."""
    (B, H, t, d), K = q_BHtd.shape, k_BKld.shape[1]
    num_keys, scale = k_BKld.shape[2], d**-0.5
    # The G query heads of a key head stand in for G queries.
    q_NGtd = q_BHtd.reshape(B * K, H // K, t, d)
    place_Bt = ends_B[:, None] - t + torch.arange(t)
    top = q_BHtd.new_full((B * K, H // K, t, 1), -math.inf)
    total = torch.zeros_like(top)
    mixed = torch.zeros_like(q_NGtd)
    lowest = int(place_Bt[:, 0].max()) if B else 0
    for start in range(0, num_keys, CHUNK):
        first = max(0, start - lowest)  # queries before it see none of these keys
        if first >= t:
            break
        k_Ncd, v_Ncd = (_chunk(x, start).reshape(B * K, CHUNK, d) for x in (k_BKld, v_BKld))
        q_NMd = q_NGtd[:, :, first:].reshape(B * K, -1, d)
        M = q_NMd.shape[1]
        s = torch.bmm(fill(q_NMd), k_Ncd.transpose(1, 2)).mul_(scale)
        seen = _seen(place_Bt[:, first:], start, window)  # [B, t, c]
        s = s[:, :M].reshape(B, K, H // K, t - first, CHUNK)
        s = s.masked_fill(~seen[:, None, None], -math.inf).view(B * K, H // K, t - first, CHUNK)
        at = (slice(None), slice(None), slice(first, None))
        # Online softmax (Milakov and Gimelshein, arXiv 1805.02867): rescale what was summed so far
        # to the new largest score.
        new = torch.maximum(top[at], s.amax(-1, keepdim=True))
        # A query that has seen no key yet: inf - inf would be no number.
        base = new.masked_fill(new == -math.inf, 0.0)
        p, old = s.sub_(base).exp_(), (top[at] - base).exp_()
        total[at] = total[at] * old + p.sum(-1, keepdim=True)
        p_NMc = fill(p.reshape(B * K, M, CHUNK))
        more = torch.bmm(p_NMc, v_Ncd)[:, :M].reshape(B * K, H // K, t - first, d)
        mixed[at] = mixed[at] * old + more
        top[at] = new
    out, lse = mixed / total, top + total.log()
    return out.view(B, H, t, d), lse.view(B, H, t)


def _chunk(x_BKld: Tensor, start: int) -> Tensor:
    part = x_BKld[:, :, start : start + CHUNK]
    return F.pad(part, (0, 0, 0, CHUNK - part.shape[2]))


def _seen(place_Bt: Tensor, start: int, window: int | None) -> Tensor:
    """[B, t, CHUNK]: whether a query may look at a key."""
    key = torch.arange(start, start + CHUNK)
    seen = key <= place_Bt[:, :, None]
    return seen if window is None else seen & (key > place_Bt[:, :, None] - window)


class _Exact(torch.autograd.Function):
    """For whole sequences: as many queries as keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends_B: Tensor, window: int | None
    ) -> Tensor:
        assert q.shape[2] == k.shape[2], "gradients are for whole sequences"
        out, lse = _forward(q, k, v, ends_B, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        share, length, mask = q.shape[1] // k.shape[1], q.shape[2], None
        if ctx.window is not None and ctx.window < length:
            seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - ctx.window)
            mask = torch.zeros(length, length, dtype=q.dtype).masked_fill_(~seen, -math.inf)
        wide = [x.repeat_interleave(share, dim=1) for x in (k, v)]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, *wide, out, lse.transpose(1, 2).contiguous().transpose(1, 2), 0.0,
            mask is None, attn_mask=mask, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
        dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))
        return dq, dk, dv, None, None
