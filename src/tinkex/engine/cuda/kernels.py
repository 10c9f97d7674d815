"""Triton kernels for what lies between the matrix products of a decoder, on CUDA.

Each kernel fuses the elementwise work that would otherwise travel through device memory several
times: residual add + RMS norm, q/k norm + rotary embedding (+ the write into the paged cache),
SwiGLU, and the softmax over one chunk of logits. The plain torch versions in `decoder.py` are their
oracle. Everything is computed in fp32 registers and stored in the dtype of its output tensor.

Rows are numbered in int64: tokens times width passes 2^31 elements in a large pass. Norms have no
gradient of their weight, because the base is frozen.

A program computes whole rows, and trainer and sampler launch the same kernels in the same way, so a
row's bits do not depend on the batch; see `product` for the rules.

This module knows shapes and pointers; it refuses to know models, adapters and schedules. It imports
triton, so it is imported only where CUDA is in use (or under TRITON_INTERPRET=1 in tests).

Letters: T tokens, D hidden size, H query heads, K key heads, d head size, M MLP size, V vocabulary,
P tokens per cache block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import early

# ---------------------------------------------------------------------- RMS norm


@triton.jit
def _add_rms_norm(
    x, delta, w, out_x, out_y, rstd, D, eps,
    HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norm one row. BLOCK covers it, so its sum is one `tl.sum` of one layout in every batch."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < D
    # Before the wait: no kernel writes weights.
    weight = tl.load(w + cols, keep, other=0.0).to(tl.float32)
    early.wait(EARLY)
    v = tl.load(x + row * D + cols, keep, other=0.0).to(tl.float32)
    if HAS_DELTA:
        v += tl.load(delta + row * D + cols, keep, other=0.0).to(tl.float32)
        tl.store(out_x + row * D + cols, v, keep)
        # The norm reads what the next layer will read: the sum as it was stored.
        v = v.to(out_x.dtype.element_ty).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd + row, r)
    # Rounded before the weight, as the plain version and transformers do.
    y = (v * r).to(out_y.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_y + row * D + cols, y, keep)


def add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its RMS norm times weight, the reciprocal RMS per row). x is not changed."""
    T, D = x_TD.shape
    out_x = torch.empty_like(x_TD) if delta_TD is not None else x_TD
    out_y = torch.empty_like(x_TD)
    rstd_T = torch.empty(T, device=x_TD.device, dtype=torch.float32)
    block = triton.next_power_of_2(D)
    _add_rms_norm[(T,)](
        x_TD, delta_TD if delta_TD is not None else x_TD, weight_D, out_x, out_y, rstd_T, D, eps,
        HAS_DELTA=delta_TD is not None, BLOCK=block, num_warps=_warps(block),
        **early.launch(T, x_TD.device),
    )  # fmt: skip
    return out_x, out_y, rstd_T


@triton.jit
def _rms_norm_apply(x, w, rstd, out, D, BLOCK: tl.constexpr):
    """Norm one row again. Nothing is summed: with the saved reciprocal the bits are as before."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < D
    v = tl.load(x + row * D + cols, keep, other=0.0).to(tl.float32) * tl.load(rstd + row)
    y = v.to(out.dtype.element_ty).to(tl.float32) * tl.load(w + cols, keep, other=0.0).to(
        tl.float32
    )
    tl.store(out + row * D + cols, y, keep)


def rms_norm_again(x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor) -> Tensor:
    """The norm once more from its saved reciprocal RMS, bit for bit."""
    out = torch.empty_like(x_TD)
    block = triton.next_power_of_2(x_TD.shape[1])
    _rms_norm_apply[(x_TD.shape[0],)](
        x_TD, weight_D, rstd_T, out, x_TD.shape[1], BLOCK=block, num_warps=_warps(block)
    )
    return out


@triton.jit
def _rms_norm_backward(dy, x, w, rstd, dx, D, BLOCK: tl.constexpr):
    """For one row (g - xhat * mean(g * xhat)) / rms, where g = dy * w and xhat = x / rms."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < D
    r = tl.load(rstd + row)
    xhat = tl.load(x + row * D + cols, keep, other=0.0).to(tl.float32) * r
    g = tl.load(dy + row * D + cols, keep, other=0.0).to(tl.float32)
    g *= tl.load(w + cols, keep, other=0.0).to(tl.float32)
    out = (g - xhat * (tl.sum(g * xhat, 0) / D)) * r
    out += tl.load(dx + row * D + cols, keep, other=0.0).to(tl.float32)
    tl.store(dx + row * D + cols, out, keep)


def rms_norm_backward_(
    dx_TD: Tensor, dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, rstd_T: Tensor
) -> Tensor:
    """Add the norm's input gradient to dx, in place (dx holds the residual branch's gradient)."""
    block = triton.next_power_of_2(x_TD.shape[1])
    _rms_norm_backward[(x_TD.shape[0],)](
        dy_TD, x_TD, weight_D, rstd_T, dx_TD, x_TD.shape[1], BLOCK=block, num_warps=_warps(block)
    )
    return dx_TD


# ---------------------------------------------------------------------- q/k norm + rope


@triton.jit
def _rope(
    qkv, cos, sin, qw, kw, q_out, k_out, v_out, slots, eps,
    H: tl.constexpr, K: tl.constexpr, d: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program per token and group of HEADS heads of q, k and v.

    A head's halves are two tiles, because the rotation pairs element i with element i + d/2.
    """
    t = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = d // 2
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, half)[None, :]
    real = (h < H + 2 * K) & (i >= 0)  # the second is always so; it gives the mask its two axes
    early.wait(EARLY)
    src = qkv + t * ((H + 2 * K) * d) + h * d + i
    lo = tl.load(src, real, other=0.0).to(tl.float32)
    hi = tl.load(src + half, real, other=0.0).to(tl.float32)
    c = tl.load(cos + t * half + i)
    s = tl.load(sin + t * half + i)
    row = tl.load(slots + t).to(tl.int64)
    turned = h < H + K  # values are neither normed nor rotated
    if HAS_NORM:
        dt = q_out.dtype.element_ty
        w_lo = tl.where(h < H, tl.load(qw + i), tl.load(kw + i)).to(tl.float32)
        w_hi = tl.where(h < H, tl.load(qw + half + i), tl.load(kw + half + i)).to(tl.float32)
        r = 1.0 / tl.sqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / d + eps)[:, None]
        # Rounded where the plain version rounds: after the norm and after its weight.
        n_lo = ((lo * r).to(dt).to(tl.float32) * w_lo).to(dt).to(tl.float32)
        n_hi = ((hi * r).to(dt).to(tl.float32) * w_hi).to(dt).to(tl.float32)
        lo = tl.where(turned, n_lo, lo)
        hi = tl.where(turned, n_hi, hi)
    new_lo = tl.where(turned, lo * c - hi * s, lo)
    hi = tl.where(turned, hi * c + lo * s, hi)
    lo = new_lo
    q_at = q_out + (t * H + h) * d + i
    tl.store(q_at, lo, h < H)
    tl.store(q_at + half, hi, h < H)
    # A row of -1 is an empty place of a recorded step: it must not write over anybody's cache.
    is_k = (h >= H) & turned & (row >= 0)
    k_at = k_out + (row * K + h - H) * d + i
    tl.store(k_at, lo, is_k)
    tl.store(k_at + half, hi, is_k)
    is_v = (h >= H + K) & real & (row >= 0)
    v_at = v_out + (row * K + h - H - K) * d + i
    tl.store(v_at, lo, is_v)
    tl.store(v_at + half, hi, is_v)


def rope(
    qkv_TX: Tensor,
    cos_Td: Tensor,
    sin_Td: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    heads: int,
    kv_heads: int,
    cache: tuple[Tensor | None, Tensor | None, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused qkv into (q_THd, k_TKd, v_TKd), normed and rotated.

    cos and sin are fp32 of half the head size. `cache` is (keys, values, slots): k and v go to
    row `slots[t]` of the caches (block * P + offset; -1 writes nothing), which are returned in
    their place, or of new tensors where it has none. Without one the slots are 0, 1, 2, ...: the
    trainer launches the very kernel that the sampler does.
    """
    T = qkv_TX.shape[0]
    d = qkv_TX.shape[1] // (heads + 2 * kv_heads)
    q = qkv_TX.new_empty(T, heads, d)
    k, v, slots = cache or (None, None, torch.arange(T, device=q.device))
    if k is None or v is None:
        k, v = qkv_TX.new_empty(2, T, kv_heads, d)
    qw, kw = norms if norms is not None else (qkv_TX, qkv_TX)
    _rope[(T, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv_TX, cos_Td, sin_Td, qw, kw, q, k, v, slots, eps,
        H=heads, K=kv_heads, d=d, HEADS=_HEADS,
        HAS_NORM=norms is not None, num_warps=4, enable_fp_fusion=False,
        **early.launch(T, q.device),
    )  # fmt: skip
    return q, k, v


@triton.jit
def _rope_backward(
    dq, dk, dv, qkv, cos, sin, qw, kw, out, eps,
    H: tl.constexpr, K: tl.constexpr, d: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The same programs as `_rope`'s; the norm is made again from the fused product."""
    t = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = d // 2
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, half)[None, :]
    real = (h < H + 2 * K) & (i >= 0)
    turned = h < H + K
    q_at = dq + (t * H + h) * d + i
    k_at = dk + (t * K + h - H) * d + i
    v_at = dv + (t * K + h - H - K) * d + i
    at = tl.where(h < H, q_at, tl.where(turned, k_at, v_at))
    lo = tl.load(at, real, other=0.0).to(tl.float32)
    hi = tl.load(at + half, real, other=0.0).to(tl.float32)
    c = tl.load(cos + t * half + i)
    s = tl.load(sin + t * half + i)
    # The gradient of a rotation is the rotation back.
    new_lo = tl.where(turned, lo * c + hi * s, lo)
    hi = tl.where(turned, hi * c - lo * s, hi)
    lo = new_lo
    where = t * ((H + 2 * K) * d) + h * d + i
    if HAS_NORM:
        x_lo = tl.load(qkv + where, real, other=0.0).to(tl.float32)
        x_hi = tl.load(qkv + where + half, real, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt((tl.sum(x_lo * x_lo, 1) + tl.sum(x_hi * x_hi, 1)) / d + eps)[:, None]
        g_lo = lo * tl.where(h < H, tl.load(qw + i), tl.load(kw + i)).to(tl.float32)
        g_hi = hi * tl.where(h < H, tl.load(qw + half + i), tl.load(kw + half + i)).to(tl.float32)
        x_lo *= r
        x_hi *= r
        mean = ((tl.sum(g_lo * x_lo, 1) + tl.sum(g_hi * x_hi, 1)) / d)[:, None]
        lo = tl.where(turned, (g_lo - x_lo * mean) * r, lo)
        hi = tl.where(turned, (g_hi - x_hi * mean) * r, hi)
    tl.store(out + where, lo, real)
    tl.store(out + where + half, hi, real)


def rope_backward(
    dq_THd: Tensor,
    dk_TKd: Tensor,
    dv_TKd: Tensor,
    qkv_TX: Tensor,
    cos_Td: Tensor,
    sin_Td: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Gradient of the fused qkv from those of q, k and v."""
    T, H, d = dq_THd.shape
    K = dk_TKd.shape[1]
    out = torch.empty_like(qkv_TX)
    qw, kw = norms if norms is not None else (qkv_TX, qkv_TX)
    _rope_backward[(T, triton.cdiv(H + 2 * K, _HEADS))](
        dq_THd, dk_TKd, dv_TKd, qkv_TX, cos_Td, sin_Td, qw, kw, out, eps,
        H=H, K=K, d=d, HEADS=_HEADS, HAS_NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------- SwiGLU


@triton.jit
def _swiglu(gate_up, out, M, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK columns of a row."""
    early.wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < M
    g = tl.load(gate_up + row * 2 * M + cols, keep, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * M + M + cols, keep, other=0.0).to(tl.float32)
    # silu is rounded, as the plain version's is, which stores it before it multiplies.
    silu = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * M + cols, silu * u, keep)


def swiglu(gate_up_TX: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2 * M] product."""
    T, M = gate_up_TX.shape[0], gate_up_TX.shape[1] // 2
    out = gate_up_TX.new_empty(T, M)
    _swiglu[(T, triton.cdiv(M, 1024))](
        gate_up_TX, out, M, BLOCK=1024, num_warps=4, **early.launch(T, out.device)
    )
    return out


@triton.jit
def _swiglu_backward(dact, gate_up, act, M, BLOCK: tl.constexpr):
    """BLOCK columns of a row. In place is safe: a program writes the cells that it alone read."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < M
    gp = gate_up + row * 2 * M + cols
    g = tl.load(gp, keep, other=0.0).to(tl.float32)
    u = tl.load(gp + M, keep, other=0.0).to(tl.float32)
    dy = tl.load(dact + row * M + cols, keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    # The activation to the bit as the forward had it; the gradients take silu as it is.
    tl.store(act + row * M + cols, silu.to(act.dtype.element_ty).to(tl.float32) * u, keep)
    tl.store(gp, dy * u * (s + silu * (1.0 - s)), keep)
    tl.store(gp + M, dy * silu, keep)


def swiglu_backward_(dact_TI: Tensor, gate_up_TX: Tensor) -> Tensor:
    """Turn gate_up into its own gradient, in place; returns the activation it had produced.

    It is the widest tensor of a layer: its gradient takes its place, and the activation, which the
    gradient of the next product's adapter needs, is computed again instead of kept.
    """
    T, M = dact_TI.shape
    act = torch.empty_like(dact_TI)
    _swiglu_backward[(T, triton.cdiv(M, 1024))](
        dact_TI, gate_up_TX, act, M, BLOCK=1024, num_warps=4
    )
    return act


# ---------------------------------------------------------------------- logits


@triton.jit
def _log_total(logits, top, log_total, V, BLOCK: tl.constexpr):
    """Read one row twice: its maximum, then BLOCK partial sums, which are added up at the end.

    One walk with a running maximum would read half as much, but its sums would be scaled whenever
    the maximum rises, and a row less its maximum would not give the same bits.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        m = tl.maximum(m, tl.load(logits + row * V + at, at < V, other=float("-inf")))
    highest = tl.max(m, 0)
    z = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + cols
        v = tl.load(logits + row * V + at, at < V, other=float("-inf"))
        z += tl.exp(v - highest)
    tl.store(top + row, highest)
    tl.store(log_total + row, tl.log(tl.sum(z, 0)))


def log_total(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest logit, the log of the sum of exp(logit - largest)), fp32, of each row.

    A row less its largest logit, as the sampler has it, gives the same second number to the bit.
    """
    N, V = logits_NV.shape
    if logits_NV.data_ptr() % 16:  # rows of another tensor: Triton would lay out its sums otherwise
        logits_NV = logits_NV.clone()
    top_N, log_total_N = torch.empty(2, N, device=logits_NV.device, dtype=torch.float32)
    if N:
        # A row is one program's, and the largest blocks are the fastest (H200, `dev/LOG.md`).
        _log_total[(N,)](
            logits_NV, top_N, log_total_N, V, BLOCK=16384, num_warps=16, enable_fp_fusion=False
        )
    return top_N, log_total_N


@triton.jit
def _logit_gradient(logits, lse, targets, slopes, out, V, BLOCK: tl.constexpr):
    """BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < V
    v = tl.load(logits + row * V + cols, keep, other=float("-inf")).to(tl.float32)
    hit = tl.where(cols == tl.load(targets + row), 1.0, 0.0)
    slope = tl.load(slopes + row)
    tl.store(out + row * V + cols, (hit - tl.exp(v - tl.load(lse + row))) * slope, keep)


def logit_gradient(
    logits_NV: Tensor, lse_N: Tensor, targets_N: Tensor, slopes_N: Tensor, dtype: torch.dtype
) -> Tensor:
    """slope * (one-hot of the target - softmax) per row: the logits' share of a logprob's slope."""
    N, V = logits_NV.shape
    out_NV = torch.empty_like(logits_NV, dtype=dtype)
    if N:
        _logit_gradient[(N, triton.cdiv(V, 4096))](
            logits_NV, lse_N, targets_N, slopes_N, out_NV, V, BLOCK=4096, num_warps=8
        )
    return out_NV


_HEADS = 16
"""Of one token in one program of `_rope`."""


def _warps(block: int) -> int:
    """By the width alone: the order of a row's sum follows the number of warps."""
    return 4 if block <= 2048 else 8
