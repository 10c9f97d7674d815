"""The gated delta rule over whole packed sequences on CUDA, differentiable.

`mix_packed` computes what `engine/model/delta.py` computes, and that is its oracle, forward and
backward. Every sequence is cut into chunks of 64 tokens, its last one filled up with tokens that
change nothing; products inside chunks are batched over all chunks of all sequences. Four things are
kernels: the convolution with silu and unit lengths, all that decays inside a chunk, the inverse of
the chunks' triangular systems, and the walk of the states from chunk to chunk, there and back. The
rest is torch under autograd, in fp32 with the tensor cores' own rounding of its factors. Only
gradients come from here: the forward that sampler and trainer share goes token by token (`delta`).

Letters: T tokens, P = N c places of N chunks of c tokens, Q sequences, K key heads, H value heads,
d their size, C channels, W width of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.transfer import send
from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.shape import DeltaConfig

CHUNK = 64
_UNIT_EPS = tl.constexpr(1e-6)


def can_chunk(config: DeltaConfig) -> bool:
    """Whether the kernels know the heads' sizes."""
    return config.key_size == config.value_size and config.key_size in (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the sequences of a packed batch are cut."""

    place_T: Tensor
    """Where each token is among the places."""
    token_P: Tensor
    """Which token is at each place; -1: none."""
    before_T: Tensor
    """How many tokens of its sequence stand before each."""
    after_T: Tensor
    bounds_Q: Tensor
    """The chunk at which each sequence begins, and where the last one ends."""
    num_chunks: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        sizes = np.asarray(lengths, np.int64)
        counts = -(-sizes // CHUNK)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        starts = np.cumsum(sizes) - sizes
        before = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        place = np.repeat(bounds[:-1] * CHUNK, sizes) + before
        token = np.full(int(bounds[-1]) * CHUNK, -1, np.int64)
        token[place] = np.arange(sizes.sum())
        after = np.repeat(sizes, sizes) - before - 1
        arrays = (array.astype(np.int32) for array in (place, token, before, after, bounds))
        places = [send(array, device) for array in arrays]
        return cls(places[0], places[1], places[2], places[3], places[4], int(bounds[-1]))


# ------------------------------------------------------------------------------- convolution


@triton.jit
def _tokens(
    x, conv, place, before, T, P, x_stride, d: tl.constexpr, W: tl.constexpr, BT: tl.constexpr
):
    """For one head of some tokens: rows, whether they exist, their convolution and its address."""
    head = tl.program_id(1)
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    i = tl.arange(0, d)
    c, ok = head * d + i, t < T
    first = tl.load(before + t, ok, other=0)
    total = tl.zeros((BT, d), tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        # An input before the sequence's first token is 0, and is another sequence's in memory.
        seen = (ok & (first >= back))[:, None]
        tap = tl.load(conv + c * W + j).to(tl.float32)
        new = tl.load(x + (t - back)[:, None] * x_stride + c[None, :], seen, other=0.0)
        total += new.to(tl.float32) * tap[None, :]
    at = (head.to(tl.int64) * P + tl.load(place + t, ok, other=0))[:, None] * d + i[None, :]
    return t, ok[:, None], total, at


@triton.jit
def _convolve(
    x, conv, place, before, out, T, P, x_stride, scale,
    K: tl.constexpr, d: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """For one head of some tokens: convolution, silu, and unit length of queries and keys."""
    head = tl.program_id(1)
    _, ok, pre, at = _tokens(x, conv, place, before, T, P, x_stride, d, W, BT)
    y = pre * tl.sigmoid(pre)
    if head < 2 * K:
        y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) + _UNIT_EPS))[:, None]
    if head < K:
        y *= scale
    tl.store(out + at, y, ok)


@triton.jit
def _convolve_slope(
    dout, x, conv, place, before, slope, T, P, x_stride, scale,
    K: tl.constexpr, d: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradient of what the convolution gave, before silu and unit lengths.

    Stored, because a token's input gathers from W of them: see `_convolve_backward`.
    """
    head = tl.program_id(1)
    t, ok, pre, at = _tokens(x, conv, place, before, T, P, x_stride, d, W, BT)
    s = tl.sigmoid(pre)
    y = pre * s
    dy = tl.load(dout + at, ok, other=0.0)
    if head < K:
        dy *= scale
    if head < 2 * K:
        unit = 1.0 / tl.sqrt(tl.sum(y * y, 1) + _UNIT_EPS)
        # Only what is across the vector moves its direction.
        along = tl.sum(dy * y, 1) * unit * unit
        dy = (dy - y * along[:, None]) * unit[:, None]
    to = slope + t[:, None] * (tl.num_programs(1) * d) + (head * d + tl.arange(0, d))[None, :]
    tl.store(to, dy * (s + y * (1.0 - s)), ok)


@triton.jit
def _convolve_backward(
    slope, conv, after, dx, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """Gradients of some tokens' inputs, which reached themselves and the W - 1 tokens after."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    keep = (t < T)[:, None] & (c < C)[None, :]
    left = tl.load(after + t, t < T, other=0)  # tokens of its sequence that come after it
    total = tl.zeros((BT, BC), tl.float32)
    for step in tl.static_range(W):
        at = slope + (t + step)[:, None] * C + c[None, :]
        there = tl.load(at, keep & (left >= step)[:, None], other=0.0)
        tap = tl.load(conv + c * W + W - 1 - step, c < C, other=0.0).to(tl.float32)
        total += there * tap[None, :]
    tl.store(dx + t[:, None] * C + c[None, :], total, keep)


class _Convolution(torch.autograd.Function):
    """[2K + H, P, d] in fp32 from the channels [T, C] of the fused linear."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weights: DeltaWeights, chunks: Chunks) -> Tensor:
        config, T = weights.config, len(x_TC)
        heads, d = 2 * config.key_heads + config.value_heads, config.key_size
        P = chunks.num_chunks * CHUNK
        out = torch.zeros(heads, P, d, device=x_TC.device, dtype=torch.float32)
        ctx.save_for_backward(x_TC)
        ctx.weights, ctx.chunks = weights, chunks
        _convolve[(triton.cdiv(T, 32), heads)](
            x_TC, weights.conv_CW, chunks.place_T, chunks.before_T, out, T, P, x_TC.stride(0),
            d**-0.5, K=config.key_heads, d=d, W=config.conv_width, BT=32, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (x_TC,) = ctx.saved_tensors
        weights, chunks, config = ctx.weights, ctx.chunks, ctx.weights.config
        heads, d, T = 2 * config.key_heads + config.value_heads, config.key_size, len(x_TC)
        dx_TC = torch.empty(x_TC.shape, device=x_TC.device, dtype=x_TC.dtype)
        slope_TC = torch.empty(x_TC.shape, device=x_TC.device, dtype=torch.float32)
        _convolve_slope[(triton.cdiv(T, 32), heads)](
            dout.contiguous(), x_TC, weights.conv_CW, chunks.place_T, chunks.before_T, slope_TC,
            T, chunks.num_chunks * CHUNK, x_TC.stride(0), d**-0.5,
            K=config.key_heads, d=d, W=config.conv_width, BT=32, num_warps=4,
        )  # fmt: skip
        _convolve_backward[(triton.cdiv(T, 32), triton.cdiv(config.channels, 128))](
            slope_TC, weights.conv_CW, chunks.after_T, dx_TC, T, config.channels,
            W=config.conv_width, BT=32, BC=128, num_warps=4,
        )  # fmt: skip
        return dx_TC, None, None


# ------------------------------------------------------------------------------------ decay


@triton.jit
def _decays(g, at, c: tl.constexpr):
    """(log decays since the start, decay from token j to a later token i), of one chunk."""
    i = tl.arange(0, c)
    # In float64: after one strong decay the differences of small ones would lose their digits.
    total = tl.cumsum(tl.load(g + at + i).to(tl.float64), 0)
    apart = (total[:, None] - total[None, :]).to(tl.float32)
    return total, tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(apart, 0.0)), 0.0)


@triton.jit
def _decay(
    kk, qk, g, beta, system, inside, from_start, to_end, N, SHARE: tl.constexpr, c: tl.constexpr
):
    """For one chunk of one value head: a token corrects by those before it, and sees itself too."""
    n, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, c)
    cells = i[:, None] * c + i[None, :]
    key, one = ((h // SHARE) * N + n) * c * c + cells, (h * N + n) * c
    total, decay = _decays(g, one, c)
    strength = tl.load(beta + one + i)[:, None]
    below = i[:, None] > i[None, :]
    tl.store(system + one * c + cells, tl.where(below, tl.load(kk + key) * decay * strength, 0.0))
    tl.store(inside + one * c + cells, tl.load(qk + key) * decay)
    last = tl.sum(tl.where(i == c - 1, total, 0.0), 0)
    tl.store(from_start + one + i, tl.exp(total.to(tl.float32)))
    tl.store(to_end + one + i, tl.exp((last - total).to(tl.float32)))


@triton.jit
def _decay_backward(
    kk, qk, g, beta, dsystem, dinside, dfrom, dto, dkk, dqk, dg, dbeta, N,
    SHARE: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """For one chunk of one key head: its value heads in turn, so that one program adds up
    what they give to the products of their keys, and nothing is added atomically."""
    n, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, c)
    cells = i[:, None] * c + i[None, :]
    key = (head * N + n) * c * c + cells
    kv, qv = tl.load(kk + key), tl.load(qk + key)
    sum_k, sum_q = tl.zeros((c, c), tl.float32), tl.zeros((c, c), tl.float32)
    for share in range(SHARE):
        one = ((head * SHARE + share) * N + n) * c
        total, decay = _decays(g, one, c)
        strength = tl.load(beta + one + i)[:, None]
        below = i[:, None] > i[None, :]
        ds = tl.where(below, tl.load(dsystem + one * c + cells), 0.0) * decay
        di = tl.load(dinside + one * c + cells) * decay
        sum_k += ds * strength
        sum_q += di
        tl.store(dbeta + one + i, tl.sum(ds * kv, 1))
        # Of the log decay from token j to token i: it grows with i's total and falls with j's.
        dlog = ds * kv * strength + di * qv
        last = tl.sum(tl.where(i == c - 1, total, 0.0), 0)
        ending = tl.load(dto + one + i) * tl.exp((last - total).to(tl.float32))
        dtotal = tl.sum(dlog, 1) - tl.sum(dlog, 0) - ending
        dtotal += tl.load(dfrom + one + i) * tl.exp(total.to(tl.float32))
        dtotal += tl.where(i == c - 1, tl.sum(ending, 0), 0.0)
        # A total is the sum of all decays up to its token: each decay takes from all behind it.
        tl.store(dg + one + i, tl.cumsum(dtotal, 0, reverse=True))
    tl.store(dkk + key, sum_k)
    tl.store(dqk + key, sum_q)


class _Decay(torch.autograd.Function):
    """From products of keys, and of queries, with keys [K, N, c, c] and g and beta [H, N, c]:

    (the triangular system, what a token sees inside its chunk, [H, N, c, c]; the decays since the
    start and to the end of a chunk, [H, N, c]).
    """

    @staticmethod
    def forward(ctx: Any, kk: Tensor, qk: Tensor, g: Tensor, beta: Tensor) -> Any:
        H, N, c = g.shape
        system, inside = g.new_empty(2, H, N, c, c)
        from_start, to_end = g.new_empty(2, H, N, c)
        _decay[(N, H)](
            kk, qk, g, beta, system, inside, from_start, to_end, N, SHARE=H // len(kk), c=c,
            num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(kk, qk, g, beta)
        return system, inside, from_start, to_end

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kk, qk, g, beta = ctx.saved_tensors
        H, N, c = g.shape
        dkk, dqk, dg, dbeta = map(torch.empty_like, (kk, qk, g, beta))
        _decay_backward[(N, len(kk))](
            kk, qk, g, beta, *(grad.contiguous() for grad in grads), dkk, dqk, dg, dbeta, N,
            SHARE=H // len(kk), c=c, num_warps=4,
        )  # fmt: skip
        return dkk, dqk, dg, dbeta


# ---------------------------------------------------------------------------------- inverse


_EDGE = 16
"""Of the triangles that are inverted row by row: the smallest that a tensor core multiplies."""


@triton.jit
def _invert(a, out, c: tl.constexpr, s: tl.constexpr):
    """(I + A)^-1 of a small triangle on the diagonal, row by row.

    Row r is -A[r] times the rows above, which are done. That is sequential, so triangles are small:
    those of 64 took 1.6 ms a call (H200, `dev/LOG.md`).
    """
    block = tl.program_id(1) * s
    at = tl.program_id(0).to(tl.int64) * c * c + block * c + block
    i = tl.arange(0, s)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, s):
        line = tl.load(a + at + row * c + i, i < row, other=0.0)
        new = -tl.sum(line[:, None] * inverse, 0)
        inverse += tl.where(i[:, None] == row, new[None, :], 0.0)
    tl.store(out + at + i[:, None] * c + i[None, :], inverse)


@triton.jit
def _join(a, out, c: tl.constexpr, s: tl.constexpr):
    """Two neighbours on the diagonal, X and Y: below X stands -Y A X, A the square there."""
    block = tl.program_id(1) * 2 * s
    at = tl.program_id(0).to(tl.int64) * c * c + block * c + block
    i = tl.arange(0, s)
    cells = i[:, None] * c + i[None, :]
    x = tl.load(out + at + cells)
    y = tl.load(out + at + s * c + s + cells)
    # Three products of rounded factors are nearly as exact as fp32; one would lose digits that
    # later tokens of the chunk are computed from.
    between = tl.dot(tl.load(a + at + s * c + cells), x, input_precision="tf32x3")
    tl.store(out + at + s * c + cells, -tl.dot(y, between, input_precision="tf32x3"))


class _Inverse(torch.autograd.Function):
    """Inverses of I + A, for strictly lower triangles A [..., c, c]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a, size = a.contiguous(), a.shape[-1]
        out, num = torch.zeros_like(a), a.numel() // size**2
        _invert[(num, size // _EDGE)](a, out, c=size, s=_EDGE, num_warps=1)
        edge = _EDGE
        while edge < size:
            _join[(num, size // (2 * edge))](
                a, out, c=size, s=edge, num_warps=1 if edge < 32 else 4
            )
            edge *= 2
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        flipped = inverse.transpose(-1, -2)
        return -(flipped @ dout @ flipped).tril(-1)


# ------------------------------------------------------------------------------------- walk


@triton.jit
def _walk(
    new, old, keys, decay, bounds, change, states, N,
    d: tl.constexpr, c: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """A sequence, a head and some columns of its state, from its first chunk to its last.

    The state stays in registers. It is stored in front of every chunk: outputs and gradients of
    all chunks are then batched products.
    """
    seq, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, r = tl.arange(0, d), tl.arange(0, c)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    S = tl.zeros((d, BV), tl.float32)
    for n in range(tl.load(bounds + seq), tl.load(bounds + seq + 1)):
        at = h * N + n
        tl.store(states + (at * d + i)[:, None] * d + j[None, :], S)
        rows = (at * c + r)[:, None] * d
        u = tl.load(new + rows + j[None, :])
        w = tl.load(old + rows + i[None, :])
        u -= tl.dot(w, S)
        tl.store(change + rows + j[None, :], u)
        k = tl.load(keys + rows + i[None, :])
        S = S * tl.load(decay + at) + tl.dot(tl.trans(k), u)


@triton.jit
def _walk_back(
    dchange, dstates, old, keys, decay, bounds, du, dafter, N,
    d: tl.constexpr, c: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The same backwards: gradients of `new`, and of the state behind every chunk.

    Those of `old`, of the keys and of the decays are sums over all columns, which are several
    programs': they are batched products afterwards.
    """
    seq, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, r = tl.arange(0, d), tl.arange(0, c)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    first, stop = tl.load(bounds + seq), tl.load(bounds + seq + 1)
    dS = tl.zeros((d, BV), tl.float32)
    for back in range(stop - first):
        at = h * N + stop - 1 - back
        cells = (at * d + i)[:, None] * d + j[None, :]
        tl.store(dafter + cells, dS)
        rows = (at * c + r)[:, None] * d
        k = tl.load(keys + rows + i[None, :])
        u = tl.load(dchange + rows + j[None, :]) + tl.dot(k, dS)
        tl.store(du + rows + j[None, :], u)
        w = tl.load(old + rows + i[None, :])
        dS = dS * tl.load(decay + at) - tl.dot(tl.trans(w), u) + tl.load(dstates + cells)


class _Walk(torch.autograd.Function):
    """(corrections [H, N, c, d], states in front of every chunk [H, N, d, d])."""

    @staticmethod
    def forward(
        ctx: Any, new: Tensor, old: Tensor, keys: Tensor, decay_HN: Tensor, bounds_Q: Tensor
    ) -> tuple[Tensor, Tensor]:
        new, old, keys, decay_HN = (t.contiguous() for t in (new, old, keys, decay_HN))
        H, N, c, d = new.shape
        change, states = torch.empty_like(new), new.new_empty(H, N, d, d)
        columns = min(64, d)
        _walk[(len(bounds_Q) - 1, H, d // columns)](
            new, old, keys, decay_HN, bounds_Q, change, states, N, d=d, c=c, BV=columns,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(old, keys, decay_HN, bounds_Q, change, states)
        return change, states

    @staticmethod
    def backward(ctx: Any, dchange: Tensor, dstates: Tensor) -> Any:
        old, keys, decay_HN, bounds_Q, change, states = ctx.saved_tensors
        H, N, c, d = change.shape
        du, dafter = torch.empty_like(change), torch.empty_like(states)
        columns = min(64, d)
        _walk_back[(len(bounds_Q) - 1, H, d // columns)](
            dchange.contiguous(), dstates.contiguous(), old, keys, decay_HN, bounds_Q, du, dafter,
            N, d=d, c=c, BV=columns, num_warps=4, num_stages=2,
        )  # fmt: skip
        dold = -(du @ states.transpose(-1, -2))
        dkeys = change @ dafter.transpose(-1, -2)
        ddecay_HN = (dafter * states).sum((-1, -2))
        return du, dold, dkeys, ddecay_HN, None


# -------------------------------------------------------------------------------- all of it


def mix_packed(
    weights: DeltaWeights, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Outputs [T, H, d] of whole sequences of these lengths; see `model.delta.mix`."""
    config = weights.config
    chunks = Chunks.of(lengths, x_TC.device)
    heads: Tensor = _Convolution.apply(x_TC, weights, chunks)  # type: ignore[no-untyped-call]
    shape = (chunks.num_chunks, CHUNK)
    cut = heads.view(len(heads), *shape, config.key_size)
    q, k, v = cut.split([config.key_heads, config.key_heads, config.value_heads])
    g, beta = (_placed(t, chunks).view(-1, *shape) for t in (g_TH, beta_TH))
    out_HPd = _rule(q, k, v, g, beta, chunks.bounds_Q).flatten(1, 2)
    out_THd: Tensor = out_HPd.index_select(1, chunks.place_T).transpose(0, 1)
    return out_THd


def _placed(values_TH: Tensor, chunks: Chunks) -> Tensor:
    """[H, P]: a value where its token is, 0 where there is none."""
    there_P = chunks.token_P >= 0
    values_PH = values_TH.index_select(0, chunks.token_P.clamp(min=0)) * there_P[:, None]
    return values_PH.t().contiguous()


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds_Q: Tensor) -> Tensor:
    """q, k [K, N, c, d], v [H, N, c, d], g and beta [H, N, c]; see `model.delta.chunks`."""
    share = len(v) // len(k)
    flipped = k.transpose(-1, -2)
    system, inside, from_start, to_end = _Decay.apply(k @ flipped, q @ flipped, g, beta)  # type: ignore[no-untyped-call]
    inverse: Tensor = _Inverse.apply(system)  # type: ignore[no-untyped-call]
    k_H = k.repeat_interleave(share, dim=0)
    scaled = inverse * beta[..., None, :]
    new, old = scaled @ v, (scaled * from_start[..., None, :]) @ k_H
    change, states = _Walk.apply(  # type: ignore[no-untyped-call]
        new, old, k_H * to_end[..., None], from_start[..., -1], bounds_Q
    )
    q_H = q.repeat_interleave(share, dim=0) * from_start[..., None]
    out: Tensor = q_H @ states + inside @ change
    return out


@contextmanager
def tensor_cores() -> Iterator[None]:
    """fp32 products with rounded factors (tf32): the inputs were bf16 a moment ago."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
