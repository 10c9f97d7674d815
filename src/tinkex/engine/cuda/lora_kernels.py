"""Triton kernels for the adapters of a batch, one or many.

Buffers of adapters of one layout lie in slots, [S, P]. Rows are sorted by slot and cut into blocks,
[M, 3]: a block's slot, its first row, and where its slot's rows end. Rows outside every block have
no adapter. `shrink` and `shrink_many` multiply each row with its adapter's A, for the few rows of a
decode step and for any number; `expand_` adds the product with B to an output (or, on the way back,
with A to the gradient of an input) in one pass over it; `gather_` adds up the gradients of several
adapters, each over its own rows.

A's product is defined as `_SPLITS` sums over equal stretches of the inputs, added in order: a
decode step has too few rows to fill the card otherwise. Both shrinks compute just that, so a row's
bits are those of the trainer; see `product` for the rules.

This module knows shapes and pointers; `adapter_operand` and `adapter_slots` know adapters.

Letters: B rows, S slots, M blocks of rows, I inputs, O outputs, R ranks of all modules of a linear,
C splits of the summed dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import early

ROWS, MANY_ROWS = 16, 64
"""Rows of a block of a decode step of few sequences; of one of many, and of a training pass."""
COLUMNS = 64
"""Most columns of a tile."""
SIDE = 64
"""Rows and columns of a tile of a gradient."""
_RANKS = 32
_SPLITS = 16
_INPUTS = 128
"""Stretches are multiples of it."""
_PROGRAMS = 128
"""With fewer that walk all inputs, much of a card would stand still: the splits are shared out."""


@triton.jit
def _block(blocks, m):
    """A block's slot, its first row, and where its slot's rows end."""
    # int64: a slot's number times the size of an adapter can pass 2^31.
    slot = tl.load(blocks + m * 3).to(tl.int64)
    return slot, tl.load(blocks + m * 3 + 1), tl.load(blocks + m * 3 + 2)


@triton.jit
def _shrink(
    x, flat, blocks, part, arrived, out, slot_stride, at, num_rows, num_in, R,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A block of rows, BR ranks and one stretch of the inputs."""
    m = tl.program_id(0)
    split = tl.program_id(2)
    slot, first, last = _block(blocks, m)
    early.wait(EARLY)
    if first < last:  # a recorded step has room for more blocks than it uses
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        real = rows < last
        r = tl.program_id(1) * BR + tl.arange(0, BR)
        A = flat + slot * slot_stride + at + r[:, None] * num_in
        acc = tl.zeros((BM, BR), tl.float32)
        span = tl.cdiv(num_in, SPLITS * BK) * BK
        start = split * span
        for k in range(start, tl.minimum(start + span, num_in), BK):
            i = k + tl.arange(0, BK)
            inside = (i < num_in)[None, :]
            xv = tl.load(x + rows[:, None] * num_in + i[None, :], real[:, None] & inside, other=0.0)
            av = tl.load(A + i[None, :], (r < R)[:, None] & inside, other=0.0)
            acc = tl.dot(xv, tl.trans(av), acc)
        mask = real[:, None] & (r < R)[None, :]
        to = rows[:, None] * R + r[None, :]
        tl.store(part + split * num_rows * R + to, acc, mask)
        # Whoever comes last adds the splits up, in their order, whatever order they came in. All
        # threads must have stored before the count says so; `.cg` reads past the cache of this
        # multiprocessor, which may hold what stood there before.
        tl.debug_barrier()
        count = arrived + m * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(count, 1) == SPLITS - 1:
            total = tl.zeros((BM, BR), tl.float32)
            for c in tl.static_range(SPLITS):
                at_c = part + c * num_rows * R + to
                total += tl.load(at_c, mask, other=0.0, cache_modifier=".cg")
            tl.store(out + to, total, mask)
            tl.store(count, 0)  # ready for the next launch, which may be a replay of this graph


def shrink(
    x_BI: Tensor,
    flat_SP: Tensor,
    blocks_M3: Tensor,
    arrived: Tensor,
    at: int,
    ranks: int,
    *,
    rows: int,
) -> Tensor:
    """Each row times its slot's A, [B, R]; rows of no block are left undefined.

    A lies at `at` of each slot's buffer, [R, I]. `arrived` is int32 zeros, at least one for each
    block and 32 ranks, and zeros again afterwards. `rows` is the size of a block.
    """
    B, num_in = x_BI.shape
    tiles = triton.cdiv(ranks, _RANKS)
    assert arrived.numel() >= len(blocks_M3) * tiles
    part_CBR = torch.empty(_SPLITS, B, ranks, device=x_BI.device, dtype=torch.float32)
    out_BR = torch.empty(B, ranks, device=x_BI.device, dtype=flat_SP.dtype)
    _shrink[(len(blocks_M3), tiles, _SPLITS)](
        x_BI, flat_SP, blocks_M3, part_CBR, arrived, out_BR, flat_SP.stride(0), at, B, num_in,
        ranks,
        BM=rows, BR=_RANKS, BK=_INPUTS, SPLITS=_SPLITS, num_warps=4, num_stages=3,
        enable_fp_fusion=False, **early.launch(B, x_BI.device),
    )  # fmt: skip
    return out_BR


@triton.jit
def _shrink_many(
    x, flat, blocks, out, slot_stride, at, num_in, R,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A block of rows and BR ranks, over all inputs."""
    m = tl.program_id(1)
    slot, first, last = _block(blocks, m)
    if first < last:
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        r = tl.program_id(0) * BR + tl.arange(0, BR)
        # Past the end a real row is read again and thrown away: no mask over the inputs' loop.
        X = x + tl.minimum(rows, last - 1)[:, None] * num_in
        A = flat + slot * slot_stride + at + tl.minimum(r, R - 1)[:, None] * num_in
        total = tl.zeros((BM, BR), tl.float32)
        # The stretches of `_shrink`, each summed from zero and then added: one sum over all inputs
        # would round otherwise.
        span = tl.cdiv(num_in, SPLITS * UNIT) * UNIT
        for start in range(0, num_in, span):
            acc = tl.zeros((BM, BR), tl.float32)
            for k in range(start, tl.minimum(start + span, num_in), BK):
                i = (k + tl.arange(0, BK))[None, :]
                if EVEN:
                    xv = tl.load(X + i)
                    av = tl.load(A + i)
                else:
                    xv = tl.load(X + i, i < num_in, other=0.0)
                    av = tl.load(A + i, i < num_in, other=0.0)
                acc = tl.dot(xv, tl.trans(av), acc)
            total += acc
        to = out + rows[:, None] * R + r[None, :]
        tl.store(to, total, (rows < last)[:, None] & (r < R)[None, :])


def shrink_many(x_TI: Tensor, flat_SP: Tensor, blocks_M3: Tensor, at: int, ranks: int) -> Tensor:
    """As `shrink`, for blocks of `MANY_ROWS` rows."""
    T, num_in = x_TI.shape
    block_r = min(128, max(16, triton.next_power_of_2(ranks)))
    programs = triton.cdiv(ranks, block_r), len(blocks_M3)
    if programs[0] * programs[1] < _PROGRAMS:
        arrived = torch.zeros(
            len(blocks_M3) * triton.cdiv(ranks, _RANKS), device=x_TI.device, dtype=torch.int32
        )
        return shrink(x_TI, flat_SP, blocks_M3, arrived, at, ranks, rows=MANY_ROWS)
    out_TR = torch.empty(T, ranks, device=x_TI.device, dtype=flat_SP.dtype)
    _shrink_many[programs](
        x_TI, flat_SP, blocks_M3, out_TR, flat_SP.stride(0), at, num_in, ranks,
        BM=MANY_ROWS, BR=block_r, BK=64, SPLITS=_SPLITS, UNIT=_INPUTS, EVEN=num_in % 64 == 0,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TR


@dataclass(frozen=True, slots=True)
class Factor:
    """Matrices [O, r] of one rank and scale in a slot's buffer, as `expand_` takes them.

    `tiles` holds what one program covers, [., 4] int64: where its rows lie in a slot's buffer, its
    first column of y, how many columns (at most `COLUMNS`), its first column of h. `steps` are the
    distances of two rows and of two columns of a matrix in the buffer.
    """

    rank: int
    scale: float
    steps: tuple[int, int]
    tiles: Tensor
    aligned: bool
    """Whether all numbers of `tiles` are multiples of 8: memory is then read 16 bytes at a time."""
    whole: bool
    """Whether all tiles are `COLUMNS` wide."""


@triton.jit
def _expand(
    y, h, flat, tiles, blocks, slot_stride, y_stride, h_stride, rank, step_o, step_r, scale,
    BM: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr, ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A block of rows and one tile of columns of y, over all ranks of their module."""
    m = tl.program_id(1)
    slot, first, last = _block(blocks, m)
    if first < last:
        tile = tiles + tl.program_id(0) * 4
        at = tl.load(tile)
        column = tl.load(tile + 1)
        width = tl.load(tile + 2)
        inner = tl.load(tile + 3)
        if ALIGNED:
            at = tl.multiple_of(at, 8)
            column = tl.multiple_of(column, 8)
            width = tl.multiple_of(width, 8)
            inner = tl.multiple_of(inner, 8)
        rows = (first + tl.arange(0, BM)).to(tl.int64)[:, None]
        o = tl.arange(0, BO)
        B = flat + slot * slot_stride + at + o[None, :] * step_o
        to = y + rows * y_stride + column + o[None, :]
        real = (o < width)[None, :] | WHOLE
        mask = (rows < last) & real
        early.wait(EARLY)  # all that was read above is older than the kernel ahead
        before = tl.load(to, mask, other=0.0)
        added = tl.zeros((BM, BO), tl.float32)
        for start in range(0, rank, BR):
            r = start + tl.arange(0, BR)
            inside = r < rank
            hv = tl.load(
                h + rows * h_stride + inner + r[None, :], (rows < last) & inside[None, :], other=0.0
            )
            bv = tl.load(B + r[:, None] * step_r, real & inside[:, None], other=0.0)
            added = tl.dot(hv, bv, added)
        # The base's product was rounded before, the sum is once more: with and without this kernel
        # a row of no adapter is the same.
        tl.store(to, before.to(tl.float32) + added * scale, mask)


def expand_(
    y_BO: Tensor,
    h_BR: Tensor,
    flat_SP: Tensor,
    factor: Factor,
    blocks_M3: Tensor,
    *,
    rows: int,
) -> None:
    """y += scale * h times the factor of each row's slot. `rows` is the size of a block."""
    block_r = min(64, max(16, triton.next_power_of_2(factor.rank)))
    _expand[(len(factor.tiles), len(blocks_M3))](
        y_BO, h_BR, flat_SP, factor.tiles, blocks_M3, flat_SP.stride(0), y_BO.stride(0),
        h_BR.stride(0), factor.rank, *factor.steps, factor.scale,
        BM=rows, BO=COLUMNS, BR=block_r, ALIGNED=factor.aligned, WHOLE=factor.whole,
        num_warps=4, num_stages=2,
        enable_fp_fusion=False, **early.launch(len(y_BO), y_BO.device),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradientTiles:
    """Where the gradients of a linear's A and Bs go, as `gather_` takes them.

    `tiles` holds what one program covers, [., 8] int64: 0 for A and 1 for a B, where the matrix
    lies in a buffer, its rows and columns, the tile's first row and column, and the columns of its
    two operands at which the matrix begins. `scales` holds a factor for each tile.
    """

    tiles: Tensor
    scales: Tensor


@triton.jit
def _gather(
    dh, x, dy, h, tiles, scales, grads, stops, dh_stride, x_stride, dy_stride, h_stride,
    SIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one matrix's gradient for one adapter: the product of two operands over its rows.

    No two programs write one cell, so nothing is added atomically and the order of sums is fixed.
    """
    g = tl.program_id(1)
    first = tl.load(stops + g - 1, g > 0, other=0)
    last = tl.load(stops + g)
    tile = tiles + tl.program_id(0) * 8
    is_b = tl.load(tile) == 1
    num_a = tl.load(tile + 2)
    num_b = tl.load(tile + 3)
    i = tl.load(tile + 4) + tl.arange(0, SIDE)
    j = tl.load(tile + 5) + tl.arange(0, SIDE)
    if is_b:
        a, a_stride, b, b_stride = dy, dy_stride, h, h_stride
    else:
        a, a_stride, b, b_stride = dh, dh_stride, x, x_stride
    a += tl.load(tile + 6) + i[None, :]
    b += tl.load(tile + 7) + j[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(first, last, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        av = tl.load(a + rows * a_stride, (rows < last) & (i < num_a)[None, :], other=0.0)
        bv = tl.load(b + rows * b_stride, (rows < last) & (j < num_b)[None, :], other=0.0)
        total = tl.dot(tl.trans(av), bv, total)
    # Adapters' buffers are tensors of their own, anywhere in memory: only addresses reach them all.
    to = tl.load(grads + g).to(tl.pointer_type(tl.float32)) + tl.load(tile + 1)
    to += i[:, None] * num_b + j[None, :]
    mask = (i < num_a)[:, None] & (j < num_b)[None, :]
    total *= tl.load(scales + tl.program_id(0))
    tl.store(to, tl.load(to, mask, other=0.0) + total, mask)


def gather_(
    dh_TR: Tensor,
    x_TI: Tensor,
    dy_TO: Tensor,
    h_TR: Tensor,
    gradients: GradientTiles,
    grads_G: Tensor,
    stops_G: Tensor,
) -> None:
    """Add each adapter's gradients of A (dh^T x) and of the Bs (dy^T h) over its own rows.

    `grads_G` are the addresses of the adapters' buffers, fp32; `stops_G` says where their rows end.
    """
    _gather[(len(gradients.tiles), len(stops_G))](
        dh_TR, x_TI, dy_TO, h_TR, gradients.tiles, gradients.scales, grads_G, stops_G,
        dh_TR.stride(0), x_TI.stride(0), dy_TO.stride(0), h_TR.stride(0),
        SIDE=SIDE, ROWS=64, num_warps=4, num_stages=2,
    )  # fmt: skip
