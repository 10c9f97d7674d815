"""Causal attention, forward, defined once for training, prefill and paged decoding.

A query's keys are cut at multiples of `CHUNK` positions. Inside a chunk blocks of `BLOCK` keys are
taken in order, with a running maximum, a sum of weights and a weighted sum of values (`_step`);
then chunks are merged, in order, by one formula (`_merge`). So what a query gets depends on its own
sequence and place alone, however the work is laid out: `tiles` takes 128 queries of one head at a
time, `paged_decode` one query with all heads of a key head, and spreads its chunks over the card
when the batch is small. The rules of `product` hold here: see there before you write a kernel.

Weights are powers of two, exp2(s - max), rounded to the values' type before they are summed, and
the sum is a product with ones. A key that a query may not see has weight 0 and changes nothing, so
it does not matter which masked keys a kernel happens to visit. A sink is a key of a head's own
that has no value: the chunks are merged onto it.

Letters: T queries, L keys, H query heads, K key heads, d head size, B sequences, X blocks of a
sequence in the cache, P tokens of such a block, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import early
from tinkex.engine.cuda.product import shared_memory
from tinkex.engine.cuda.transfer import send

# Chunks are part of the definition: another size gives other bits. Those of 512 are a tenth faster
# in long sequences, but a short one that decodes alone has fewer to spread over the card, and takes
# half as long again (H200, `dev/LOG.md`).
CHUNK = 256
BLOCK = 64
NO_WINDOW = 1 << 30
_ROWS = 128
"""Most queries of a tile."""
_ONES = tl.constexpr(16)
"""Columns of the ones that sum weights: the fewest that a tensor core takes."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _step(q, k, v, m, z, acc, seen, scale, MASKED: tl.constexpr):
    """Add one block of keys to a running softmax. z has `_ONES` equal columns."""
    # `scale` holds log2(e) as well: powers of two are what the card computes in one instruction.
    s = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    # For a query that has seen no key yet: -inf less -inf is no number, and would stay in its sums.
    top = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - top[:, None]).to(v.dtype)
    old = tl.exp2(m - top)
    # Not `tl.sum`, whose order follows the number of rows of the tile, which callers differ in.
    ones = tl.full((v.shape[0], _ONES), 1.0, v.dtype)
    return new, tl.dot(p, ones, z * old[:, None]), tl.dot(p, v, acc * old[:, None])


@triton.jit
def _merge(M, Z, ACC, m, z, acc):
    """Append a chunk to what the chunks before it gave."""
    new = tl.maximum(M, m)
    top = tl.where(new == float("-inf"), 0.0, new)
    old, more = tl.exp2(M - top), tl.exp2(m - top)
    Z = Z * old[:, None] + z * more[:, None]
    ACC = ACC * old[:, None] + acc * more[:, None]
    return new, Z, ACC


# ---------------------------------------------------------------------- many queries


@triton.jit(do_not_specialize=["num_rows"])
def _tile(
    q, k, v, out, lse, bounds_q, bounds_k, tiles, sinks, scale, window, num_rows,
    H: tl.constexpr, K: tl.constexpr, d: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    WITH_LSE: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A program per head and tile of queries: (sequence, first query)."""
    # Heads come first in the grid: those that share a key head read its keys at about one time.
    h = tl.program_id(0)
    seq = tl.load(tiles + tl.program_id(1) * 2)
    first = tl.load(tiles + tl.program_id(1) * 2 + 1)
    start_q, start_k = tl.load(bounds_q + seq).to(tl.int64), tl.load(bounds_k + seq).to(tl.int64)
    num_q = (tl.load(bounds_q + seq + 1) - start_q).to(tl.int32)
    num_k = (tl.load(bounds_k + seq + 1) - start_k).to(tl.int32)
    i = tl.arange(0, d)
    n = tl.arange(0, BN)
    row = first + tl.arange(0, BM)
    place = num_k - num_q + row  # among its sequence's keys
    at = ((start_q + row) * H + h)[:, None] * d + i[None, :]
    qv = tl.load(q + at, (row < num_q)[:, None], other=0.0)
    at_k = k + (start_k * K + h // (H // K)) * d
    at_v = v + (start_k * K + h // (H // K)) * d
    M = tl.full((BM,), float("-inf"), tl.float32)
    Z = tl.zeros((BM, _ONES), tl.float32)
    ACC = tl.zeros((BM, d), tl.float32)
    if SINKS:  # the sink's weight relative to itself is 1, and its value is nothing
        M = tl.zeros((BM,), tl.float32) + tl.load(sinks + h).to(tl.float32) * _LOG2_E
        Z += 1.0
    lowest = num_k - num_q + first
    stop = tl.minimum(lowest + BM, num_k)
    begin = 0
    plain = lowest // CHUNK * CHUNK  # keys that all of the tile's queries see, in whole chunks
    if WINDOWED:
        # From the border of a chunk, though the window may begin inside it: chunks are cut at the
        # same places for everybody, and keys before the window have weight 0.
        begin = tl.maximum(lowest - window + 1, 0) // CHUNK * CHUNK
        plain = begin
    # Two loops of one body: most keys of a long sequence need neither masks nor bounds.
    for chunk in range(begin, plain, CHUNK):
        m = tl.full((BM,), float("-inf"), tl.float32)
        z = tl.zeros((BM, _ONES), tl.float32)
        acc = tl.zeros((BM, d), tl.float32)
        for block in range(chunk, chunk + CHUNK, BN):
            rows = (block + n).to(tl.int64)[:, None] * (K * d) + i[None, :]
            m, z, acc = _step(
                qv, tl.load(at_k + rows), tl.load(at_v + rows), m, z, acc, True, scale, False
            )
        M, Z, ACC = _merge(M, Z, ACC, m, z, acc)
    for chunk in range(plain, stop, CHUNK):
        m = tl.full((BM,), float("-inf"), tl.float32)
        z = tl.zeros((BM, _ONES), tl.float32)
        acc = tl.zeros((BM, d), tl.float32)
        for block in range(chunk, tl.minimum(chunk + CHUNK, stop), BN):
            key = block + n
            rows = key.to(tl.int64)[:, None] * (K * d) + i[None, :]
            real = (key < num_k)[:, None]
            seen = (key[None, :] <= place[:, None]) & (key[None, :] > place[:, None] - window)
            kv = tl.load(at_k + rows, real, other=0.0)
            vv = tl.load(at_v + rows, real, other=0.0)
            m, z, acc = _step(qv, kv, vv, m, z, acc, seen, scale, True)
        M, Z, ACC = _merge(M, Z, ACC, m, z, acc)
    total = tl.max(Z, 1)  # its columns are equal
    total = tl.where(row < num_q, total, 1.0)  # rows past the last query may have seen no key
    tl.store(out + at, ACC / total[:, None], (row < num_q)[:, None])
    if WITH_LSE:
        to = lse + h * num_rows.to(tl.int64) + start_q + row
        tl.store(to, (M + tl.log2(total)) * _LN_2, row < num_q)


@dataclass(frozen=True, slots=True)
class Queries:
    """Stretches of queries, each the last of its sequence's keys."""

    bounds_q: Tensor
    bounds_k: Tensor
    tiles_X2: Tensor
    """Sequence and first query of each tile, those with most keys first."""
    rows: int
    """Queries of a tile."""

    @classmethod
    def of(
        cls, num_queries: Sequence[int], num_keys: Sequence[int], device: torch.device
    ) -> Queries:
        rows = _ROWS if shared_memory(device) > 160 << 10 else _ROWS // 2
        queries = np.asarray(num_queries, np.int64)
        counts = -(-queries // rows)
        seqs = np.repeat(np.arange(len(queries)), counts)
        firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
        before = np.asarray(num_keys, np.int64) - queries
        # The longest tiles start first, or the card would stand still while the last one runs.
        order = np.argsort(-(before[seqs] + firsts), kind="stable")
        return cls(
            send(np.cumsum([0, *num_queries]).astype(np.int32), device),
            send(np.cumsum([0, *num_keys]).astype(np.int32), device),
            send(np.stack((seqs, firsts), 1)[order].astype(np.int32), device),
            rows,
        )


def tiles(
    q_THd: Tensor,
    k_LKd: Tensor,
    v_LKd: Tensor,
    queries: Queries,
    *,
    scale: float,
    window: int | None = None,
    with_lse: bool = False,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output [T, H, d], log-sum-exp of the scaled scores [H, T] if asked for, else empty)."""
    T, H, d = q_THd.shape
    K = k_LKd.shape[1]
    out_THd = torch.empty_like(q_THd)
    lse_HT = torch.empty(H, T if with_lse else 0, device=q_THd.device, dtype=torch.float32)
    _tile[(H, len(queries.tiles_X2))](
        q_THd, k_LKd, v_LKd, out_THd, lse_HT, queries.bounds_q, queries.bounds_k,
        queries.tiles_X2, sinks_H, scale * _LOG2_E.value,
        NO_WINDOW if window is None else window, T,
        H=H, K=K, d=d, BM=queries.rows, BN=BLOCK, CHUNK=CHUNK, WITH_LSE=with_lse,
        WINDOWED=window is not None, SINKS=sinks_H is not None, num_warps=queries.rows // 16,
        num_stages=_stages(queries.rows, d, q_THd), enable_fp_fusion=False,
    )  # fmt: skip
    return out_THd, lse_HT


def _stages(rows: int, head_size: int, q: Tensor) -> int:
    """Blocks of keys and values on their way at once: as many as fit beside the queries."""
    room = shared_memory(q.device) - (4 << 10) - rows * head_size * q.element_size()
    return max(1, min(3, room // (2 * BLOCK * head_size * q.element_size())))


# ---------------------------------------------------------------------- one query


@triton.jit
def _paged_chunks(
    q, k_cache, v_cache, tables, lengths, out, part_m, part_z, part_acc, scale, table_stride,
    sinks, window, most_chunks,
    H: tl.constexpr, K: tl.constexpr, d: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    BN: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A sequence and key head: all chunks, merged, or every so many-th for `_paged_join`."""
    # The query heads of a key head are the rows of the tile, filled up to the 16 that a tensor core
    # takes: each key is then read once for all of them.
    b = tl.program_id(0).to(tl.int64)
    kh = tl.program_id(1)
    group: tl.constexpr = H // K
    length = tl.load(lengths + b)  # older than the kernel ahead, which makes queries and keys
    g = tl.arange(0, G)
    i = tl.arange(0, d)
    n = tl.arange(0, BN)
    head = kh * group + g
    at = (b * H + head)[:, None] * d + i[None, :]
    early.wait(EARLY)
    qv = tl.load(q + at, (g < group)[:, None], other=0.0)
    M = tl.full((G,), float("-inf"), tl.float32)
    Z = tl.zeros((G, _ONES), tl.float32)
    ACC = tl.zeros((G, d), tl.float32)
    if SINKS and WHOLE:
        M = tl.load(sinks + head, g < group, other=0.0).to(tl.float32) * _LOG2_E
        Z += 1.0
    first = tl.maximum(length - window, 0)
    start = first // CHUNK + tl.program_id(2)
    for chunk in range(start, tl.cdiv(length, CHUNK), tl.num_programs(2)):
        m = tl.full((G,), float("-inf"), tl.float32)
        z = tl.zeros((G, _ONES), tl.float32)
        acc = tl.zeros((G, d), tl.float32)
        for block in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), BN):
            key = block + n
            real = key < length
            # int64 from here on: a cache can have more than 2^31 numbers.
            page = tl.load(tables + b * table_stride + key // P, real, other=0).to(tl.int64)
            rows = ((page * P + key % P) * K + kh)[:, None] * d + i[None, :]
            kv = tl.load(k_cache + rows, real[:, None], other=0.0)
            vv = tl.load(v_cache + rows, real[:, None], other=0.0)
            seen = (real & (key >= first))[None, :]
            m, z, acc = _step(qv, kv, vv, m, z, acc, seen, scale, True)
        if WHOLE:
            M, Z, ACC = _merge(M, Z, ACC, m, z, acc)
        else:  # in fp32, as they would be in registers: rounding here would show in the result
            part = (b * most_chunks + chunk) * H + head
            tl.store(part_m + part, m, g < group)
            tl.store(part_z + part, tl.max(z, 1), g < group)
            tl.store(part_acc + part[:, None] * d + i[None, :], acc, (g < group)[:, None])
    if WHOLE:
        total = tl.max(Z, 1)
        total = tl.where(length > 0, total, 1.0)  # an empty place of a recorded step
        tl.store(out + at, ACC / total[:, None], (g < group)[:, None])


@triton.jit
def _paged_join(
    part_m, part_z, part_acc, lengths, out, sinks, window, most_chunks,
    H: tl.constexpr, d: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A sequence and query head: what its chunks gave, merged as one program would have done it."""
    b = tl.program_id(0).to(tl.int64)
    # A range of one, because `_merge` takes rows.
    h = tl.program_id(1) + tl.arange(0, 1)
    i = tl.arange(0, d)[None, :]
    early.wait(EARLY)
    length = tl.load(lengths + b)
    M = tl.full((1,), float("-inf"), tl.float32)
    Z = tl.zeros((1, 1), tl.float32)
    ACC = tl.zeros((1, d), tl.float32)
    if SINKS:
        M = tl.load(sinks + h).to(tl.float32) * _LOG2_E
        Z += 1.0
    first = tl.maximum(length - window, 0) // CHUNK
    for chunk in range(first, tl.cdiv(length, CHUNK)):
        part = (b * most_chunks + chunk) * H + h
        m, z = tl.load(part_m + part), tl.load(part_z + part)[:, None]
        M, Z, ACC = _merge(M, Z, ACC, m, z, tl.load(part_acc + part[:, None] * d + i))
    total = tl.where(length > 0, Z, 1.0)
    tl.store(out + (b * H + h)[:, None] * d + i, ACC / total)


def paged_decode(
    q_BHd: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_BX: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    splits: int = 1,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend each one-token query to its sequence's cached keys and values.

    Caches are [blocks, P, K, d]; `tables_BX` names each sequence's blocks, `lengths_B` counts its
    cached tokens, the query's own included. A row of length 0 gives zeros. No host sync: the call
    can be part of a CUDA graph. `splits` programs share the chunks of a sequence; no bit depends
    on their number.
    """
    B, H, d = q_BHd.shape
    P, K = k_cache.shape[1], k_cache.shape[2]
    out_BHd = torch.empty_like(q_BHd)
    most_chunks = -(-tables_BX.shape[1] * P // CHUNK)
    splits = min(splits, most_chunks)
    num_parts = B * most_chunks * H if splits > 1 else 0
    part_m, part_z = torch.empty(2, num_parts, device=q_BHd.device, dtype=torch.float32)
    part_acc = torch.empty(num_parts, d, device=q_BHd.device, dtype=torch.float32)
    window = NO_WINDOW if window is None else window
    _paged_chunks[(B, K, splits)](
        q_BHd, k_cache, v_cache, tables_BX, lengths_B, out_BHd, part_m, part_z, part_acc,
        scale * _LOG2_E.value, tables_BX.stride(0), sinks_H, window, most_chunks,
        # Two warps are faster for heads of 128 alone (H200, `dev/LOG.md`).
        H=H, K=K, d=d, P=P, G=max(16, triton.next_power_of_2(H // K)), BN=BLOCK, CHUNK=CHUNK,
        WHOLE=splits == 1, SINKS=sinks_H is not None, num_warps=2 if d == 128 else 4,
        num_stages=3, enable_fp_fusion=False, **early.launch(B, q_BHd.device),
    )  # fmt: skip
    if splits > 1:
        _paged_join[(B, H)](
            part_m, part_z, part_acc, lengths_B, out_BHd, sinks_H, window, most_chunks,
            H=H, d=d, CHUNK=CHUNK, SINKS=sinks_H is not None, num_warps=1, enable_fp_fusion=False,
            **early.launch(B, q_BHd.device),
        )  # fmt: skip
    return out_BHd
