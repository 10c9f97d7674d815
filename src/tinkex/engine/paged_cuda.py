"""Attention over the paged KV cache on CUDA, and decode steps replayed as CUDA graphs.

`CudaPagedAttend` does on a GPU what `paged.PagedAttend` does on a CPU: tokens that are alone in
their chunk go through one paged-decode kernel whatever their lengths, prompt chunks through one
call of variable-length flash attention. `DecodeGraphs` records a whole step of one token per
sequence, head included, once per batch size, and replays it: a step of 36 layers is then one launch
instead of a thousand. A graph reads its inputs from tensors that stay in place, adapters included;
`run` fills them and replays.

Knows chunks, blocks and adapters; refuses to know requests and sampling.

Letters: T tokens, B sequences, H query heads, K key heads, d head size, P tokens per block,
X blocks of a sequence, V vocabulary, S adapter slots, R ranks of a fused linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import kernels
from tinkex.engine.fused import CudaDecoder
from tinkex.engine.jobs import Array
from tinkex.engine.lora import Adapter, LoraBatch
from tinkex.engine.lora_operand import (
    Grouped,
    LoraOperand,
    Spans,
    SpanWeights,
    Weights,
    can_group,
    low_precision_flat,
    stack_by_key,
)
from tinkex.engine.paged import PagedCache
from tinkex.engine.scheduler import Chunk
from tinkex.engine.transfer import send

Drawn = tuple[Tensor, Sequence[int]]
"""Tokens on the device, and which of them each chunk feeds in."""
_NO_WINDOW = 1 << 30
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


class CudaPagedAttend:
    """See `attention.CachedAttend`. `begin` must be called before each forward pass."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self._scale = cache.config.head_size**-0.5
        self._flat_k = [k.flatten(0, 1) for k in cache.k]
        self._flat_v = [v.flatten(0, 1) for v in cache.v]
        self._slots_T = torch.empty(0, dtype=torch.long)
        self._singles: _Singles | None = None
        self._longs: _Longs | None = None

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Prepare one pass whose rows are the tokens of `chunks`, in order."""
        device = self.cache.k.device
        size = self.cache.block_size
        slots_T = send(_slots(chunks, size), device)
        starts = np.cumsum([0, *(chunk.length for chunk in chunks)])
        rows = [(int(row), chunk) for row, chunk in zip(starts, chunks, strict=False)]
        singles = [(row, chunk) for row, chunk in rows if chunk.length == 1]
        longs = [(row, chunk) for row, chunk in rows if chunk.length > 1]
        self.prepare(
            slots_T,
            _Singles.of(singles, size, device) if singles else None,
            _Longs.of(longs, size, device) if longs else None,
        )

    def prepare(self, slots_T: Tensor, singles: _Singles | None, longs: _Longs | None) -> None:
        """The same from tensors: where keys and values go, and who looks where."""
        self._slots_T, self._singles, self._longs = slots_T, singles, longs

    def target(self, layer_index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._flat_k[layer_index], self._flat_v[layer_index], self._slots_T

    def __call__(self, layer_index: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        singles, longs = self._singles, self._longs
        if longs is None and singles is not None:
            return self._decode(layer_index, q_THd, singles)
        if singles is None and longs is not None:
            return self._prefill(layer_index, q_THd, longs)
        assert singles is not None
        assert longs is not None
        out_THd = torch.empty_like(q_THd)
        out_THd[singles.rows_B] = self._decode(layer_index, q_THd[singles.rows_B], singles)
        out_THd[longs.rows_T] = self._prefill(layer_index, q_THd[longs.rows_T], longs)
        return out_THd

    def _decode(self, layer_index: int, q_BHd: Tensor, singles: _Singles) -> Tensor:
        window = self.cache.config.window(layer_index)
        return kernels.paged_decode(
            q_BHd.contiguous(),
            self.cache.k[layer_index],
            self.cache.v[layer_index],
            singles.tables_BX,
            singles.lengths_B,
            scale=self._scale,
            splits=_splits(len(q_BHd), self.cache),
            window=window or _NO_WINDOW,
        )

    def _prefill(self, layer_index: int, q_THd: Tensor, longs: _Longs) -> Tensor:
        window = self.cache.config.window(layer_index)
        options = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        out_THd: Tensor = torch.ops.aten._flash_attention_forward(
            q_THd,
            self._flat_k[layer_index].index_select(0, longs.keys_L),
            self._flat_v[layer_index].index_select(0, longs.keys_L),
            longs.cu_queries,
            longs.cu_keys,
            longs.max_queries,
            longs.max_keys,
            0.0,
            True,
            False,
            scale=self._scale,
            **options,
        )[0]
        return out_THd


@dataclass(frozen=True, slots=True)
class _Singles:
    """Decoding sequences: their rows, blocks and lengths, the new token included."""

    rows_B: Tensor
    tables_BX: Tensor
    lengths_B: Tensor

    @classmethod
    def of(cls, members: Sequence[tuple[int, Chunk]], size: int, device: torch.device) -> _Singles:
        chunks = [chunk for _, chunk in members]
        return cls(
            send(np.array([row for row, _ in members]), device),
            send(_tables(chunks, size, max(chunk.start // size + 1 for chunk in chunks)), device),
            send(np.array([chunk.start + 1 for chunk in chunks], np.int32), device),
        )


@dataclass(frozen=True, slots=True)
class _Longs:
    """Prompt chunks: their rows, and the cache rows of all keys they may look at."""

    rows_T: Tensor
    keys_L: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, members: Sequence[tuple[int, Chunk]], size: int, device: torch.device) -> _Longs:
        queries = [chunk.length for _, chunk in members]
        keys = [chunk.start + chunk.length for _, chunk in members]
        rows = [np.arange(row, row + chunk.length) for row, chunk in members]
        slots = [_rows(chunk, 0, end, size) for (_, chunk), end in zip(members, keys, strict=True)]
        return cls(
            send(np.concatenate(rows), device),
            send(np.concatenate(slots), device),
            send(np.cumsum([0, *queries], dtype=np.int32), device),
            send(np.cumsum([0, *keys], dtype=np.int32), device),
            max(queries),
            max(keys),
        )


def _rows(chunk: Chunk, start: int, stop: int, size: int) -> Array:
    at = np.arange(start, stop)
    return np.asarray(chunk.seq.blocks, np.int64)[at // size] * size + at % size


def _slots(chunks: Sequence[Chunk], size: int) -> Array:
    return np.concatenate([_rows(c, c.start, c.start + c.length, size) for c in chunks])


def _tables(chunks: Sequence[Chunk], size: int, width: int) -> Array:
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in enumerate(chunks):
        used = chunk.start // size + 1
        tables[row, :used] = chunk.seq.blocks[:used]
    return tables


def _splits(batch: int, cache: PagedCache) -> int:
    """Enough programs to fill a GPU of about 132 multiprocessors twice."""
    wanted = 264 // (batch * cache.config.num_kv_heads)
    return int(min(16, max(1, 1 << max(0, wanted.bit_length() - 1))))


# ---------------------------------------------------------------------- graphs


class _Slots:
    """Adapters of one layout in place, side by side: a graph finds them where it was recorded.

    With one slot it serves a batch of one adapter. With more, slot 0 holds zeros for rows of the
    base model itself, and `stops_S` says where each slot's rows end.
    """

    def __init__(self, like: Adapter, count: int, dtype: torch.dtype) -> None:
        self.flat_SP = like.flat.new_zeros((count, like.flat.numel()), dtype=dtype)
        self.stops_S = torch.zeros(count, dtype=torch.int32, device=like.flat.device)
        self.held: list[tuple[Adapter, int] | None] = [None] * count
        self.operands: dict[str, LoraOperand] = {}
        for key, weights in stack_by_key(like, self.flat_SP).items():
            if count == 1:
                one = Weights(weights.A[0], tuple(B[0] for B in weights.Bs), weights.parts)
                self.operands[key] = Spans((SpanWeights(slice(None), one),))
            else:
                self.operands[key] = Grouped(weights, self.stops_S)

    def put(self, at: int, adapter: Adapter) -> None:
        if self.held[at] != (adapter, adapter.flat._version):
            self.flat_SP[at].copy_(low_precision_flat(adapter, self.flat_SP.dtype))
            self.held[at] = (adapter, adapter.flat._version)


class _Static:
    """The inputs and the output of the graph of one batch size and one set of adapter slots.

    A step sends two numbers per sequence; block tables travel only when one has changed.
    """

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        self.batch = batch
        self.inputs_2B = torch.zeros(2, batch, dtype=torch.long, device=device)
        self.tables_BX = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self._host_tables = np.zeros((batch, width), np.int32)
        self._known: list[list[int]] = [[] for _ in range(batch)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits_BV: Tensor | None = None

    def fill(self, chunks: Sequence[Chunk], drawn: Drawn | None) -> None:
        """Rows beyond the batch repeat the first: they write what it writes and are not read."""
        order = [*range(len(chunks)), *[0] * (self.batch - len(chunks))]
        rows = [chunks[index] for index in order]
        positions, device = [chunk.start for chunk in rows], self.inputs_2B.device
        if drawn is None:
            tokens = [chunk.seq.tokens[chunk.start] for chunk in rows]
            self.inputs_2B.copy_(send((tokens, positions), device))
        else:
            tokens_N, row_of_chunk = drawn
            sent_2B = send(([row_of_chunk[index] for index in order], positions), device)
            torch.index_select(tokens_N, 0, sent_2B[0], out=self.inputs_2B[0])
            self.inputs_2B[1].copy_(sent_2B[1])
        changed = [at for at, c in enumerate(rows) if self._known[at] != c.seq.blocks]
        if changed:
            for at in changed:
                blocks = self._known[at] = list(rows[at].seq.blocks)
                self._host_tables[at, : len(blocks)] = blocks
            width = max(len(blocks) for blocks in self._known)
            tables = np.ascontiguousarray(self._host_tables[:, :width])
            self.tables_BX[:, :width].copy_(send(tables, device))


class DecodeGraphs:
    """Decode steps of one model as CUDA graphs, recorded when a batch size is first met."""

    def __init__(self, decoder: CudaDecoder, cache: PagedCache, *, max_context: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._width = -(-max_context // cache.block_size)
        self._statics: dict[tuple[int, _Slots | None], _Static] = {}
        self._slots: dict[tuple[Any, int], _Slots] = {}
        self._pool: Any = None

    def run(
        self, chunks: Sequence[Chunk], lora: LoraBatch | None, drawn: Drawn | None = None
    ) -> Tensor | None:
        """Logits [B, V] of one-token chunks, in their order; None where no graph fits.

        `drawn` holds their tokens where the host does not know them yet. The result is overwritten
        by the next call.
        """
        batch = next((size for size in _BATCH_SIZES if size >= len(chunks)), None)
        if batch is None:
            return None
        order = list(range(len(chunks)))
        slots = None
        if lora is not None and lora.spans:
            placed = self._place(lora, len(chunks), batch)
            if placed is None:
                return None
            slots, order = placed
        static = self._statics.get((batch, slots))
        if static is None:
            static = _Static(batch, self._width, self._decoder.device)
            self._statics[batch, slots] = static
        if drawn is not None:
            drawn = drawn[0], [drawn[1][row] for row in order]
        static.fill([chunks[row] for row in order], drawn)
        if static.graph is None:
            self._record(static, slots)
        assert static.graph is not None
        assert static.logits_BV is not None
        static.graph.replay()
        logits = static.logits_BV[: len(chunks)]
        if order == list(range(len(chunks))):
            return logits
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return logits.index_select(0, send(back, self._decoder.device))

    def _record(self, static: _Static, slots: _Slots | None) -> None:
        attend, size = CudaPagedAttend(self._cache), self._cache.block_size
        lora: dict[str, LoraOperand] = slots.operands if slots else {}

        def step() -> Tensor:
            tokens_B, positions_B = static.inputs_2B
            blocks_B1 = static.tables_BX.gather(1, (positions_B // size)[:, None])
            rows_B = blocks_B1[:, 0].long() * size + positions_B % size
            lengths_B = (positions_B + 1).to(torch.int32)
            attend.prepare(rows_B, _Singles(rows_B, static.tables_BX, lengths_B), None)
            hidden_BD = self._decoder.infer(tokens_B, positions_B, attend, lora)
            return self._decoder.logits(hidden_BD, lora.get("head"))

        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # first runs compile kernels and choose algorithms
                for _ in range(2):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                static.logits_BV = step()
        self._pool = self._pool or graph.pool()
        static.graph = graph

    # ------------------------------------------------------------------ adapters in place

    def _place(self, lora: LoraBatch, num_rows: int, batch: int) -> tuple[_Slots, list[int]] | None:
        """Slots that hold this batch's adapters, and the rows sorted by slot.

        None when adapters of several layouts, or too many, meet in one step.
        """
        adapters = list(dict.fromkeys(span.adapter for span in lora.spans))
        if len(adapters) == 1 and sum(s.stop - s.start for s in lora.spans) == num_rows:
            slots = self._slots_of(adapters[0], 1)
            slots.put(0, adapters[0])
            return slots, list(range(num_rows))
        count = next((n for n in (4, 8, 16, 32) if n > len(adapters)), None)
        if count is None or not can_group(adapters):
            return None
        slots = self._slots_of(adapters[0], count)
        slot_of = _assign(slots, adapters)
        slot_by_row = np.zeros(num_rows, np.int64)
        for span in lora.spans:
            slot_by_row[span.start : span.stop] = slot_of[span.adapter]
        stops = np.cumsum(np.bincount(slot_by_row, minlength=count)).astype(np.int32)
        stops[-1] = batch  # rows that only fill the batch: any slot will do
        slots.stops_S.copy_(send(stops, self._decoder.device))
        return slots, np.argsort(slot_by_row, kind="stable").tolist()

    def _slots_of(self, like: Adapter, count: int) -> _Slots:
        key = (like.signature, count)
        if key not in self._slots:
            self._slots[key] = _Slots(like, count, self._decoder.dtype)
        return self._slots[key]


def _assign(slots: _Slots, adapters: Sequence[Adapter]) -> dict[Adapter, int]:
    """A slot for each adapter: the one it is in, or one that nobody of this batch needs."""
    held = {entry[0]: at for at, entry in enumerate(slots.held) if entry is not None}
    kept = {held[adapter] for adapter in adapters if adapter in held}
    free = [at for at in range(1, len(slots.held)) if at not in kept]
    chosen = {}
    for adapter in adapters:
        chosen[adapter] = held[adapter] if adapter in held else free.pop()
        slots.put(chosen[adapter], adapter)
    return chosen
