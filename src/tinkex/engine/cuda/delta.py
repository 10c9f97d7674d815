"""A gated delta layer on CUDA: one step of many sequences, and the gated norm behind the rule.

Decoding is a step of every sequence: the convolution moves on by one token, then each head decays
its state, corrects it and reads it, all in place in the slots of `sample.states`. Three kernels do
it, no host sync, so the step can be part of a CUDA graph. `engine/model/delta.py` defines the rule
and is the oracle; whole sequences go through `delta_rule`.

Letters: T tokens, B sequences, S slots, C channels, X all outputs of the fused linear, w the
convolution's width less one, K key heads, H value heads, k and v their sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.model.delta import DeltaWeights

_UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def _convolve(x, state, slots, conv, out, x_stride, C, W: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < C
    at = state + tl.load(slots + b).to(tl.int64) * (W - 1) * C + c
    now = tl.load(x + b * x_stride + c, keep, other=0.0)
    total = now.to(tl.float32) * tl.load(conv + c * W + W - 1, keep, other=0.0).to(tl.float32)
    for j in tl.static_range(W - 1):
        before = tl.load(at + j * C, keep, other=0.0)
        total += before.to(tl.float32) * tl.load(conv + c * W + j, keep, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(at + (j - 1) * C, before, keep)
    tl.store(at + (W - 2) * C, now, keep)
    tl.store(out + b * C + c, total * tl.sigmoid(total), keep)


@triton.jit
def _step(
    mixed, gates, decay, dt_bias, state, slots, out, scale, gates_stride,
    K: tl.constexpr, H: tl.constexpr, k: tl.constexpr, v: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A sequence, a value head and some of its columns."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BK)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    key = h // (H // K)
    row = mixed + b * (2 * K * k + H * v)
    qv = tl.load(row + key * k + i, i < k, other=0.0)
    kv = tl.load(row + (K + key) * k + i, i < k, other=0.0)
    vv = tl.load(row + 2 * K * k + h * v + j, j < v, other=0.0)
    qv *= scale / tl.sqrt(tl.sum(qv * qv, 0) + _UNIT_EPS)
    kv *= 1.0 / tl.sqrt(tl.sum(kv * kv, 0) + _UNIT_EPS)
    beta = tl.sigmoid(tl.load(gates + b * gates_stride + h).to(tl.float32))
    a = tl.load(gates + b * gates_stride + H + h).to(tl.float32) + tl.load(dt_bias + h)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    at = state + ((tl.load(slots + b).to(tl.int64) * H + h) * k + i[:, None]) * v + j[None, :]
    keep = (i < k)[:, None] & (j < v)[None, :]
    S = tl.load(at, keep, other=0.0) * tl.exp(tl.load(decay + h) * soft)
    known = tl.sum(S * kv[:, None], 0)
    S += kv[:, None] * ((vv - known) * beta)[None, :]
    tl.store(at, S, keep)
    tl.store(out + (b * H + h) * v + j, tl.sum(S * qv[:, None], 0), j < v)


def step(
    weights: DeltaWeights,
    fused_BX: Tensor,
    conv_SwC: Tensor,
    heads_SHkv: Tensor,
    slots_B: Tensor,
    eps: float,
) -> Tensor:
    """What the output linear gets; the states in the slots move on by one token, in place."""
    config = weights.config
    B, C = len(fused_BX), config.channels
    mixed_BC = torch.empty(B, C, device=fused_BX.device, dtype=torch.float32)
    out_BHv = fused_BX.new_empty(B, config.value_heads, config.value_size)
    stride = fused_BX.stride(0)
    _convolve[(B, triton.cdiv(C, 1024))](
        fused_BX, conv_SwC, slots_B, weights.conv_CW, mixed_BC, stride, C,
        W=config.conv_width, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    columns = min(64, triton.next_power_of_2(config.value_size))
    _step[(B, config.value_heads, triton.cdiv(config.value_size, columns))](
        mixed_BC, fused_BX[:, C + config.values :], weights.decay_H, weights.dt_bias_H,
        heads_SHkv, slots_B, out_BHv, config.key_size**-0.5, stride,
        K=config.key_heads, H=config.value_heads, k=config.key_size, v=config.value_size,
        BK=triton.next_power_of_2(config.key_size), BV=columns, num_warps=4,
    )  # fmt: skip
    return _norm(out_BHv, fused_BX[:, C : C + config.values], weights.norm_v, eps)


# -------------------------------------------------------------------------------- gated norm


@triton.jit
def _gated_norm(x, z, w, out, z_stride, eps, H: tl.constexpr, v: tl.constexpr, BV: tl.constexpr):
    t, h, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BV)
    keep = i < v
    xv = tl.load(x + (t * H + h) * v + i, keep, other=0.0).to(tl.float32)
    zv = tl.load(z + t * z_stride + h * v + i, keep, other=0.0).to(tl.float32)
    y = xv / tl.sqrt(tl.sum(xv * xv, 0) / v + eps)
    y = y.to(out.dtype.element_ty).to(tl.float32) * tl.load(w + i, keep, other=0.0).to(tl.float32)
    tl.store(out + (t * H + h) * v + i, y * zv * tl.sigmoid(zv), keep)


@triton.jit
def _gated_norm_backward(
    dout, x, z, w, dx, dz, z_stride, eps, H: tl.constexpr, v: tl.constexpr, BV: tl.constexpr
):
    t, h, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BV)
    keep = i < v
    at = (t * H + h) * v + i
    xv = tl.load(x + at, keep, other=0.0).to(tl.float32)
    zv = tl.load(z + t * z_stride + h * v + i, keep, other=0.0).to(tl.float32)
    wv = tl.load(w + i, keep, other=0.0).to(tl.float32)
    d = tl.load(dout + at, keep, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(xv * xv, 0) / v + eps)
    y = xv * r
    s = tl.sigmoid(zv)
    tl.store(dz + at, d * y * wv * (s + zv * s * (1.0 - s)), keep)
    g = d * zv * s * wv
    tl.store(dx + at, (g - y * (tl.sum(g * y, 0) / v)) * r, keep)


def _norm(x_THv: Tensor, z_T: Tensor, weight_v: Tensor, eps: float) -> Tensor:
    T, H, v = x_THv.shape
    out_TX = z_T.new_empty(T, H * v)
    _gated_norm[(T, H)](
        x_THv.contiguous(), z_T, weight_v, out_TX, z_T.stride(0), eps,
        H=H, v=v, BV=triton.next_power_of_2(v), num_warps=1,
    )  # fmt: skip
    return out_TX


class GatedNorm(torch.autograd.Function):
    """norm(x) * silu(z), [T, H * v], of what the rule gives and the gate beside it."""

    @staticmethod
    def forward(ctx: Any, x_THv: Tensor, z_T: Tensor, weight_v: Tensor, eps: float) -> Tensor:
        x_THv = x_THv.contiguous()
        ctx.save_for_backward(x_THv, z_T, weight_v)
        ctx.eps = eps
        return _norm(x_THv, z_T, weight_v, eps)

    @staticmethod
    def backward(ctx: Any, dout_TX: Tensor) -> Any:
        x_THv, z_T, weight_v = ctx.saved_tensors
        T, H, v = x_THv.shape
        dx_THv, dz_T = torch.empty_like(x_THv), z_T.new_empty(T, H * v)
        _gated_norm_backward[(T, H)](
            dout_TX.contiguous(), x_THv, z_T, weight_v, dx_THv, dz_T, z_T.stride(0), ctx.eps,
            H=H, v=v, BV=triton.next_power_of_2(v), num_warps=1,
        )  # fmt: skip
        return dx_THv, dz_T, None, None
