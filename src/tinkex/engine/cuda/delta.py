"""A gated delta layer on CUDA as both sides compute it: token by token, each from the state before.

A convolution over the last few inputs, then each head decays its state, corrects it and reads it.
`advance` does this for any number of sequences, each with any number of tokens, in place in the
slots of `sample.states`: a decode step is a token of every sequence, a prefill some tokens of a
few, and a training pass whole sequences from states of zeros. All launch the same kernels with the
same tiles, and a token's bits follow from its state and itself alone, so sampler and trainer agree
to the bit (the rules of `product`). No host sync: a step can be part of a CUDA graph. A state stays
in registers while its sequence lasts; only gradients need the chunks of `delta_rule`.
`engine/model/delta.py` defines the rule and is the oracle.

Letters: T tokens, B sequences, S slots, C channels, X all outputs of the fused linear, w the
convolution's width less one, K key heads, H value heads, k and v their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.transfer import send
from tinkex.engine.model.delta import DeltaWeights, no_state

_UNIT_EPS = tl.constexpr(1e-6)
_TOKENS = 16
"""Of one head, in one program of the convolution."""
_COLUMNS = 32
"""Of a state, in one program. One warp holds them, so that no sum waits for another warp: 3.6 ms
where 64 in four warps take 10.2, and 16 in one 6.2 (H200, `dev/LOG.md`)."""


@triton.jit(do_not_specialize=["T"])
def _convolve(
    x, state, slots, bounds, of_token, conv, out, T, x_stride, C, scale,
    K: tl.constexpr, k: tl.constexpr, v: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """For one head of some tokens: convolution, silu, and unit length of queries and keys.

    The inputs before a token come from the pass, or from its sequence's state.
    """
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    head, i = tl.program_id(1), tl.arange(0, BD)
    # Heads are counted through: those of the queries, of the keys, of the values. BD covers a head
    # of either size, so a unit length is one sum of one layout.
    first = tl.where(head < 2 * K, head * k, 2 * K * k + (head - 2 * K) * v)
    c = first + i
    keep = (t < T)[:, None] & (i < tl.where(head < 2 * K, k, v))[None, :]
    b = tl.load(of_token + t, t < T, other=0)
    before = t - tl.load(bounds + b, t < T, other=0)  # tokens of its sequence in this pass
    at = tl.load(slots + b, t < T, other=0).to(tl.int64) * (W - 1) * C
    total = tl.zeros((BT, BD), tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        here = (before >= back)[:, None]
        new = tl.load(x + (t - back)[:, None] * x_stride + c[None, :], keep & here, other=0.0)
        # The state has the last W - 1 inputs before the pass, the oldest first.
        old = tl.load(
            state + (at + (before + j) * C)[:, None] + c[None, :], keep & ~here, other=0.0
        )
        tap = tl.load(conv + c * W + j, c < C, other=0.0).to(tl.float32)
        total += tl.where(here, new.to(tl.float32), old.to(tl.float32)) * tap[None, :]
    y = total * tl.sigmoid(total)
    if head < 2 * K:
        y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) + _UNIT_EPS))[:, None]
    if head < K:
        y *= scale
    tl.store(out + t[:, None] * C + c[None, :], y, keep)


@triton.jit
def _move_on(x, state, slots, bounds, x_stride, C, W: tl.constexpr, BLOCK: tl.constexpr):
    """The last inputs of a sequence, for its next pass. Upwards, so none is read when replaced.

    A kernel of its own, because other programs of `_convolve` may still read what is replaced here.
    """
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = c < C
    stop = tl.load(bounds + b + 1)
    length = stop - tl.load(bounds + b)
    at = state + tl.load(slots + b).to(tl.int64) * (W - 1) * C + c
    for j in tl.static_range(W - 1):
        back = W - 1 - j  # this place holds the input so many before the next token
        here = length >= back
        new = tl.load(x + (stop - back) * x_stride + c, keep & here, other=0.0)
        old = tl.load(at + (length + j) * C, keep & (length < back), other=0.0)
        tl.store(at + j * C, tl.where(here, new, old), keep)


@triton.jit
def _inputs(mixed, gates, t, is_there, h, i, j, gates_stride,
            K: tl.constexpr, H: tl.constexpr, k: tl.constexpr, v: tl.constexpr):  # fmt: skip
    """Query, key, value, strength and decay of one token, as they come."""
    row = mixed + t * (2 * K * k + H * v)
    key = h // (H // K)
    qv = tl.load(row + key * k + i, is_there & (i < k), other=0.0)
    kv = tl.load(row + (K + key) * k + i, is_there & (i < k), other=0.0)
    vv = tl.load(row + 2 * K * k + h * v + j, is_there & (j < v), other=0.0)
    at = gates + t * gates_stride + h
    return qv, kv, vv, tl.load(at, is_there, other=0.0), tl.load(at + H, is_there, other=0.0)


@triton.jit
def _recur(
    mixed, gates, decay, dt_bias, state, slots, bounds, out, gates_stride,
    K: tl.constexpr, H: tl.constexpr, k: tl.constexpr, v: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A sequence, a value head and some columns of its state, token by token.

    The next token is fetched while this one is computed: nothing else is there to hide the wait.
    Columns never meet, since keys and queries multiply a state from the left.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BK)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    at = state + ((tl.load(slots + b).to(tl.int64) * H + h) * k + i[:, None]) * v + j[None, :]
    keep = (i < k)[:, None] & (j < v)[None, :]
    S = tl.load(at, keep, other=0.0)
    rate, bias = tl.load(decay + h), tl.load(dt_bias + h)
    first, stop = tl.load(bounds + b), tl.load(bounds + b + 1)
    qv, kv, vv, strong, slow = _inputs(
        mixed, gates, first, first < stop, h, i, j, gates_stride, K, H, k, v
    )
    for t in range(first, stop):
        next_q, next_k, next_v, next_strong, next_slow = _inputs(
            mixed, gates, t + 1, t + 1 < stop, h, i, j, gates_stride, K, H, k, v
        )
        a = slow.to(tl.float32) + bias
        # softplus; from 20 on it is its argument in fp32, and exp would overflow later on.
        soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        S *= tl.exp(rate * soft)
        known = tl.sum(S * kv[:, None], 0)
        S += kv[:, None] * ((vv - known) * tl.sigmoid(strong.to(tl.float32)))[None, :]
        tl.store(out + (t * H + h) * v + j, tl.sum(S * qv[:, None], 0), j < v)
        qv, kv, vv, strong, slow = next_q, next_k, next_v, next_strong, next_slow
    tl.store(at, S, keep)


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Whose tokens a pass holds: those of sequence b lie from `bounds[b]` to `bounds[b + 1]`."""

    slots_B: Tensor
    bounds_b: Tensor
    """One more than sequences."""
    sequence_T: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> TokenBounds:
        bounds = np.cumsum([0, *lengths], dtype=np.int64)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        return cls(
            send(np.asarray(slots, np.int64), device), send(bounds, device), send(sequence, device)
        )

    @classmethod
    def singles(cls, slots_B: Tensor) -> TokenBounds:
        """Bounds of a batch with one token of each sequence."""
        bounds_b = torch.arange(len(slots_B) + 1, device=slots_B.device)
        return cls(slots_B, bounds_b, bounds_b[:-1])


class WholeSequences:
    """Sequences that begin and end in one pass; `paged.CudaPagedAttend` has those that go on."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._tokens = TokenBounds.of(range(len(lengths)), lengths, device)

    def delta(self, layer_index: int, w: DeltaWeights, fused_TX: Tensor, eps: float) -> Tensor:
        """The output of a delta layer, normed and gated."""
        state = no_state(w.config, len(self._tokens.slots_B), fused_TX)
        return advance(w, fused_TX, state.conv_BwC, state.heads_BHkv, self._tokens, eps)


def advance(
    weights: DeltaWeights,
    fused_TX: Tensor,
    conv_SwC: Tensor,
    heads_SHkv: Tensor,
    tokens: TokenBounds,
    eps: float,
) -> Tensor:
    """The input of the output linear. States in the slots advance by their sequences' tokens."""
    config = weights.config
    slots_B, bounds_b = tokens.slots_B, tokens.bounds_b
    T, B, C = len(fused_TX), len(slots_B), config.channels
    mixed_TC = torch.empty(T, C, device=fused_TX.device, dtype=torch.float32)
    out_THv = fused_TX.new_empty(T, config.value_heads, config.value_size)
    stride = fused_TX.stride(0)
    heads = 2 * config.key_heads + config.value_heads
    _convolve[(triton.cdiv(T, _TOKENS), heads)](
        fused_TX, conv_SwC, slots_B, bounds_b, tokens.sequence_T, weights.conv_CW, mixed_TC, T,
        stride, C, config.key_size**-0.5, K=config.key_heads, k=config.key_size,
        v=config.value_size, W=config.conv_width, BT=_TOKENS,
        BD=triton.next_power_of_2(max(config.key_size, config.value_size)), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    _move_on[(B, triton.cdiv(C, 1024))](
        fused_TX, conv_SwC, slots_B, bounds_b, stride, C, W=config.conv_width, BLOCK=1024,
        num_warps=4,
    )  # fmt: skip
    columns = min(_COLUMNS, triton.next_power_of_2(config.value_size))
    # One kernel for both sides, so the compiler may contract as it likes: it does so for everyone.
    _recur[(B, config.value_heads, triton.cdiv(config.value_size, columns))](
        mixed_TC, fused_TX[:, C + config.values :], weights.decay_H, weights.dt_bias_H,
        heads_SHkv, slots_B, bounds_b, out_THv, stride,
        K=config.key_heads, H=config.value_heads, k=config.key_size, v=config.value_size,
        BK=triton.next_power_of_2(config.key_size), BV=columns, num_warps=1,
    )  # fmt: skip
    return _norm(out_THv, fused_TX[:, C : C + config.values], weights.norm_v, eps)


# -------------------------------------------------------------------------------- gated norm


@triton.jit
def _gated_norm(x, z, w, out, z_stride, eps, H: tl.constexpr, v: tl.constexpr, BV: tl.constexpr):
    """The norm of one head of one token, times the silu of its gate."""
    t, h, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BV)
    keep = i < v
    xv = tl.load(x + (t * H + h) * v + i, keep, other=0.0).to(tl.float32)
    zv = tl.load(z + t * z_stride + h * v + i, keep, other=0.0).to(tl.float32)
    y = xv / tl.sqrt(tl.sum(xv * xv, 0) / v + eps)
    # Rounded where the plain version rounds: between the norm and its weight.
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
