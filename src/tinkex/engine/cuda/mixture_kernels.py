"""Triton kernels of a mixture of experts: what lies between its grouped products, on CUDA.

The activation of sorted rows, times the weight each row has in its token's sum; its backward, which
also finds the gradient of that weight; and the sum of a token's experts, in the order of their
rank. A program computes whole rows, so a row's bits do not depend on the batch; `mixture.py` in
`engine/model` is the oracle. Knows shapes and pointers only.

Letters: N sorted rows, T tokens, k experts of a token, D hidden size, M size of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ALPHA = tl.constexpr(1.702)


@triton.jit
def _halves(gp, M, keep, limit, CLAMPED: tl.constexpr):
    """gate, up, what multiplies: (gate part, d gate part / d gate, up part, d up part / d up)."""
    g = tl.load(gp, keep, other=0.0).to(tl.float32)
    u = tl.load(gp + M, keep, other=0.0).to(tl.float32)
    if CLAMPED:
        open_g = (g <= limit).to(tl.float32)
        open_u = ((u <= limit) & (u >= -limit)).to(tl.float32)
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        s = tl.sigmoid(g * _ALPHA)
        return g * s, (s + g * _ALPHA * s * (1.0 - s)) * open_g, u + 1.0, open_u
    else:
        s = tl.sigmoid(g)
        return g * s, s + g * s * (1.0 - s), u, tl.full(u.shape, 1.0, tl.float32)


@triton.jit
def _activate(gate_up, weight, out, M, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a sorted row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < M
    a, _, b, _ = _halves(gate_up + row * 2 * M + cols, M, keep, limit, CLAMPED)
    # Not rounded before the weight: a row is rounded once, and its token's sum is a plain one.
    act = a * b * tl.load(weight + row)
    tl.store(out + row * M + cols, act, keep)


def activate(gate_up_NX: Tensor, weight_N: Tensor, clamp: float | None) -> Tensor:
    """The experts' activation [N, M], times each row's weight."""
    N, M = gate_up_NX.shape[0], gate_up_NX.shape[1] // 2
    out = gate_up_NX.new_empty(N, M)
    if N:
        _activate[(N, triton.cdiv(M, 1024))](
            gate_up_NX, weight_N, out, M, clamp or 0.0, CLAMPED=clamp is not None, BLOCK=1024,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _activate_backward(
    dact, gate_up, weight, act, dweight, M, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    """A whole sorted row, because the gradient of its weight is a sum over all of it."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < M
        gp = gate_up + row * 2 * M + cols
        a, da, b, db = _halves(gp, M, keep, limit, CLAMPED)
        dy = tl.load(dact + row * M + cols, keep, other=0.0).to(tl.float32)
        total += dy * a * b
        tl.store(act + row * M + cols, a * b * w, keep)
        tl.store(gp, dy * w * b * da, keep)
        tl.store(gp + M, dy * w * a * db, keep)
    tl.store(dweight + row, tl.sum(total, 0))


def activate_backward_(
    dact_NM: Tensor, gate_up_NX: Tensor, weight_N: Tensor, clamp: float | None
) -> tuple[Tensor, Tensor]:
    """Turn gate_up into its own gradient, in place; (the activation, the weights' gradient)."""
    N, M = dact_NM.shape
    act, dweight = torch.empty_like(dact_NM), torch.empty_like(weight_N)
    if N:
        _activate_backward[(N,)](
            dact_NM, gate_up_NX, weight_N, act, dweight, M, clamp or 0.0,
            CLAMPED=clamp is not None, BLOCK=min(1024, triton.next_power_of_2(M)), num_warps=4,
        )  # fmt: skip
    return act, dweight


@triton.jit
def _gather_sum(
    x, back, bias, chosen, weights, out, D,
    k: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token. Best expert first, wherever the rows were sorted to: atomic adds by
    the rows would come in any order."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < D
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(k):
        source = tl.load(back + row * k + at).to(tl.int64)
        total += tl.load(x + source * D + cols, keep, other=0.0).to(tl.float32)
        if BIASED:
            expert = tl.load(chosen + row * k + at)
            more = tl.load(bias + expert * D + cols, keep, other=0.0).to(tl.float32)
            total += more * tl.load(weights + row * k + at)
    tl.store(out + row * D + cols, total, keep)


def gather_sum(
    x_ND: Tensor, back_Tk: Tensor, bias: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """The sum of each token's k rows, in their order, rounded once.

    `bias` is (biases [E, D], experts [T, k], their weights): each row comes with its own.
    """
    (T, k), D = back_Tk.shape, x_ND.shape[1]
    out = x_ND.new_empty(T, D)
    block = min(2048, triton.next_power_of_2(D))
    if T:
        _gather_sum[(T, triton.cdiv(D, block))](
            x_ND, back_Tk, *(bias or (None, None, None)), out, D,
            k=k, BIASED=bias is not None, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _row_dot(x, w, out, D, BLOCK: tl.constexpr):
    """The dot product of one row, in a sum whose order does not depend on the batch."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    keep = cols < D
    xv = tl.load(x + row * D + cols, keep, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(xv * tl.load(w + cols, keep, other=0.0).to(tl.float32), 0))


def row_dot(x_TD: Tensor, weight_1D: Tensor) -> Tensor:
    """A linear with one output, in fp32 [T, 1]; a row's bits do not depend on the others."""
    T, D = x_TD.shape
    out_T1 = torch.empty(T, 1, device=x_TD.device, dtype=torch.float32)
    if T:
        _row_dot[(T,)](
            x_TD, weight_1D, out_T1, D, BLOCK=triton.next_power_of_2(D), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out_T1


# ---------------------------------------------------------------------- routing


@triton.jit
def _pick(left, given, at, e, GIVEN: tl.constexpr):
    """The best expert that is left, of equal ones the first; or the one that was given."""
    best = tl.argmax(left, 0).to(tl.int64)
    if GIVEN:
        # A given row is given as a whole: its first number says whether it is.
        told = tl.load(given + at)
        best = tl.where(tl.load(given) >= 0, told, best)
    return best, tl.where(e == best, float("-inf"), left)


@triton.jit
def _route(
    logits, given, chosen, weights, entropy, log_total, E: tl.constexpr, BE: tl.constexpr,
    k: tl.constexpr, NORMALISED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """The best k experts of one token, best first, or those that were given."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    x = tl.load(logits + row * E + e, e < E, other=float("-inf"))
    top = tl.max(x, 0)
    total = tl.log(tl.sum(tl.exp(x - top), 0)) + top
    tl.store(log_total + row, total)
    logp = tl.where(e < E, x - total, 0.0)
    tl.store(entropy + row, -tl.sum(tl.where(e < E, tl.exp(logp) * logp, 0.0), 0))
    left = x
    picked = 0.0
    for at in tl.static_range(k):
        best, left = _pick(left, given + row * k, at, e, GIVEN)
        p_best = tl.exp(tl.max(tl.where(e == best, x, float("-inf")), 0) - total)
        tl.store(chosen + row * k + at, best)
        tl.store(weights + row * k + at, p_best)
        picked += p_best
    if NORMALISED:  # a loop's picks cannot be kept in an array, so they are made once more
        left = x
        for at in tl.static_range(k):
            best, left = _pick(left, given + row * k, at, e, GIVEN)
            p_best = tl.exp(tl.max(tl.where(e == best, x, float("-inf")), 0) - total)
            tl.store(weights + row * k + at, p_best / picked)


def route(
    logits_TE: Tensor, k: int, normalised: bool, given_Tk: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(experts [T, k], their weights, entropy [T], log of the sum of exp [T]).

    Rows of `given_Tk` that do not start with -1 say which experts to take.
    """
    T, E = logits_TE.shape
    chosen_Tk = torch.empty(T, k, dtype=torch.int64, device=logits_TE.device)
    weights_Tk = logits_TE.new_empty(T, k)
    entropy_T, total_T = logits_TE.new_empty(2, T)
    if T:
        _route[(T,)](
            logits_TE, chosen_Tk if given_Tk is None else given_Tk.long().contiguous(),
            chosen_Tk, weights_Tk, entropy_T, total_T, E=E, BE=triton.next_power_of_2(E), k=k,
            NORMALISED=normalised, GIVEN=given_Tk is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return chosen_Tk, weights_Tk, entropy_T, total_T


@triton.jit
def _sort(chosen, weights, rows, experts, stops, back, weight, N, k, BLOCK: tl.constexpr):
    """The rows of one expert: how many go before them, then each one's place, in order.

    Every program reads all choices, twice; there are few, and it is one launch instead of torch's
    many. An expert's rows keep their order, as in a stable sort.
    """
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    less = tl.zeros((BLOCK,), tl.int32)
    same = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        c = tl.load(chosen + start + i, start + i < N, other=1 << 30)
        less += (c < e).to(tl.int32)
        same += (c == e).to(tl.int32)
    first = tl.sum(less, 0)
    tl.store(stops + e, first + tl.sum(same, 0))
    for start in range(0, N, BLOCK):
        n = start + i
        mine = tl.load(chosen + n, n < N, other=1 << 30) == e
        place = first + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(rows + place, (n // k).to(tl.int64), mine)
        tl.store(experts + place, tl.zeros((BLOCK,), tl.int64) + e, mine)
        tl.store(back + n, place.to(tl.int64), mine)
        tl.store(weight + place, tl.load(weights + n, mine, other=0.0), mine)
        first += tl.sum(mine.to(tl.int32), 0)


def sort(
    chosen_Tk: Tensor, weights_Tk: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert: (tokens, experts, stops [E], places [T, k], weights)."""
    num, device = chosen_Tk.numel(), chosen_Tk.device
    rows_N, experts_N = torch.empty(2, num, dtype=torch.int64, device=device)
    stops_E = torch.empty(count, dtype=torch.int32, device=device)
    back_Tk, weight_N = torch.empty_like(chosen_Tk), weights_Tk.new_empty(num)
    _sort[(count,)](
        chosen_Tk, weights_Tk, rows_N, experts_N, stops_E, back_Tk, weight_N, num,
        chosen_Tk.shape[1], BLOCK=min(2048, triton.next_power_of_2(max(num, 16))), num_warps=4,
    )  # fmt: skip
    return rows_N, experts_N, stops_E, back_Tk, weight_N
