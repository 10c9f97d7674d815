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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import kernels
from tinkex.engine.fused import CudaDecoder
from tinkex.engine.jobs import Array
from tinkex.engine.lora import Adapter, LoraBatch
from tinkex.engine.lora_operand import LoraOperand, pairs_of
from tinkex.engine.paged import PagedCache
from tinkex.engine.scheduler import Chunk

_NO_WINDOW = 1 << 30
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


class CudaPagedAttend:
    """See `attention.Attend`. `begin` must be called before each forward pass."""

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
        self._slots_T = _on(device, _slots(chunks, self.cache.block_size))
        starts = np.cumsum([0, *(chunk.length for chunk in chunks)])
        rows = [(int(row), chunk) for row, chunk in zip(starts, chunks, strict=False)]
        singles = [(row, chunk) for row, chunk in rows if chunk.length == 1]
        longs = [(row, chunk) for row, chunk in rows if chunk.length > 1]
        self._singles = _Singles.of(singles, self.cache.block_size, device) if singles else None
        self._longs = _Longs.of(longs, self.cache.block_size, device) if longs else None

    def __call__(self, layer_index: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        self._flat_k[layer_index].index_copy_(0, self._slots_T, k_TKd)
        self._flat_v[layer_index].index_copy_(0, self._slots_T, v_TKd)
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
            _on(device, np.array([row for row, _ in members])),
            _on(device, _tables(chunks, size, max(chunk.start // size + 1 for chunk in chunks))),
            _on(device, np.array([chunk.start + 1 for chunk in chunks], np.int32)),
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
            _on(device, np.concatenate(rows)),
            _on(device, np.concatenate(slots)),
            _on(device, np.cumsum([0, *queries], dtype=np.int32)),
            _on(device, np.cumsum([0, *keys], dtype=np.int32)),
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


def _on(device: torch.device, values: Array) -> Tensor:
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def _splits(batch: int, cache: PagedCache) -> int:
    """Enough programs to fill a GPU of about 132 multiprocessors twice."""
    wanted = 264 // (batch * cache.config.num_kv_heads)
    return int(min(16, max(1, 1 << max(0, wanted.bit_length() - 1))))


# ---------------------------------------------------------------------- graphs


@dataclass(slots=True)
class _Slots:
    """Adapters in place: S of them side by side in each fused linear, padded to one rank."""

    operands: dict[str, LoraOperand]
    stops_S: Tensor
    shape: tuple[tuple[str, int], ...]
    held: list[tuple[Adapter, int] | None] = field(default_factory=list)


class _Static:
    """The inputs and the output of the graph of one batch size and one set of adapter slots."""

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        self.tokens_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.positions_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.slots_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.tables_BX = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self.lengths_B = torch.zeros(batch, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits_BV: Tensor | None = None


class DecodeGraphs:
    """Decode steps of one model as CUDA graphs, recorded when a batch size is first met."""

    def __init__(self, decoder: CudaDecoder, cache: PagedCache, *, max_context: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._width = -(-max_context // cache.block_size)
        self._statics: dict[tuple[int, int, int], _Static] = {}
        self._slots: dict[int, _Slots] = {}
        self._pool: Any = None

    def run(self, chunks: Sequence[Chunk], lora: LoraBatch | None) -> Tensor | None:
        """Logits [B, V] of one-token chunks, in their order; None where no graph fits.

        The tensor is overwritten by the next call.
        """
        batch = next((size for size in _BATCH_SIZES if size >= len(chunks)), None)
        if batch is None or any(chunk.length != 1 for chunk in chunks):
            return None
        spans = lora.spans if lora is not None else ()
        slots, order = None, list(range(len(chunks)))
        if spans:
            slots, order = self._place(lora, len(chunks))
            if slots is None:
                return None
        static = self._static(batch, slots)
        self._fill(static, [chunks[row] for row in order])
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
        return logits.index_select(0, _on(self._decoder.device, back))

    def _static(self, batch: int, slots: _Slots | None) -> _Static:
        key = (batch, len(slots.held) if slots else 0, id(slots) if slots else 0)
        if key not in self._statics:
            self._statics[key] = _Static(batch, self._width, self._decoder.device)
        return self._statics[key]

    def _fill(self, static: _Static, chunks: Sequence[Chunk]) -> None:
        """Rows beyond the batch repeat the first: they write what it writes and are not read."""
        size, batch = self._cache.block_size, len(static.tokens_B)
        rows = [*chunks, *[chunks[0]] * (batch - len(chunks))]
        device = self._decoder.device
        starts = np.array([chunk.start for chunk in rows])
        static.tokens_B.copy_(_on(device, np.array([c.seq.tokens[c.start] for c in rows])))
        static.positions_B.copy_(_on(device, starts))
        static.slots_B.copy_(_on(device, _slots(rows, size)))
        static.lengths_B.copy_(_on(device, (starts + 1).astype(np.int32)))
        width = int(starts.max()) // size + 1
        static.tables_BX[:, :width].copy_(_on(device, _tables(rows, size, width)))

    def _record(self, static: _Static, slots: _Slots | None) -> None:
        attend = CudaPagedAttend(self._cache)
        attend._slots_T = static.slots_B
        attend._singles = _Singles(static.slots_B, static.tables_BX, static.lengths_B)
        lora = slots.operands if slots else {}

        def step() -> Tensor:
            hidden_BD = self._decoder.infer(static.tokens_B, static.positions_B, attend, lora)
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

    def _place(self, lora: LoraBatch | None, num_rows: int) -> tuple[_Slots | None, list[int]]:
        """Slots that hold this batch's adapters, and the rows sorted by slot.

        Slot 0 of more than one is the base model's: rows that no span covers.
        """
        assert lora is not None
        adapters = [span.adapter for span in lora.spans]
        covered = sum(span.stop - span.start for span in lora.spans)
        alone = len(adapters) == 1 and covered == num_rows
        count = 1 if alone else next((n for n in (4, 8, 16, 32) if n > len(set(adapters))), None)
        if count is None:
            return None, []
        slots = self._slots_for(count, adapters)
        if alone:
            self._load(slots, 0, adapters[0])
            return slots, list(range(num_rows))
        slot_of = self._assign(slots, adapters)
        slot_by_row = [0] * num_rows
        for span in lora.spans:
            for row in range(span.start, span.stop):
                slot_by_row[row] = slot_of[span.adapter]
        order = sorted(range(num_rows), key=lambda row: slot_by_row[row])
        stops = np.cumsum(np.bincount(slot_by_row, minlength=count)).astype(np.int32)
        # Rows that only fill the batch belong to the last slot, whatever it holds.
        batch = next(size for size in _BATCH_SIZES if size >= num_rows)
        stops[-1] = batch
        slots.stops_S.copy_(_on(self._decoder.device, stops))
        return slots, order

    def _assign(self, slots: _Slots, adapters: Sequence[Adapter]) -> dict[Adapter, int]:
        held = {entry[0]: at for at, entry in enumerate(slots.held) if entry is not None}
        wanted = list(dict.fromkeys(adapters))
        free = [at for at in range(1, len(slots.held)) if at not in {held.get(a) for a in wanted}]
        for adapter in wanted:
            if adapter not in held:
                held[adapter] = free.pop()
            self._load(slots, held[adapter], adapter)
        return {adapter: held[adapter] for adapter in wanted}

    def _slots_for(self, count: int, adapters: Sequence[Adapter]) -> _Slots:
        """Slots wide enough for every adapter; a wider rank than any before makes new ones."""
        ranks: dict[str, int] = {}
        for adapter in adapters:
            for key, (A_RI, _) in pairs_of(adapter, self._decoder).items():
                ranks[key] = max(ranks.get(key, 0), len(A_RI))
        known = self._slots.get(count)
        if known is not None:
            have = dict(known.shape)
            if all(have.get(key, 0) >= rank for key, rank in ranks.items()):
                return known
            ranks = {key: max(ranks.get(key, 0), have.get(key, 0)) for key in {*ranks, *have}}
            self._statics = {k: v for k, v in self._statics.items() if k[2] != id(known)}
        self._slots[count] = slots = self._new_slots(count, ranks)
        return slots

    def _new_slots(self, count: int, ranks: dict[str, int]) -> _Slots:
        decoder = self._decoder
        stops_S = torch.zeros(count, dtype=torch.int32, device=decoder.device)
        operands = {}
        for key, rank in ranks.items():
            target = decoder.targets[key]
            shape_A, shape_B = (count, rank, target.in_size), (count, target.parts[-1].stop, rank)
            A = torch.zeros(shape_A, dtype=decoder.dtype, device=decoder.device)
            B = torch.zeros(shape_B, dtype=decoder.dtype, device=decoder.device)
            operands[key] = LoraOperand(A, B, stops_S, ())
        return _Slots(operands, stops_S, tuple(sorted(ranks.items())), [None] * count)

    def _load(self, slots: _Slots, at: int, adapter: Adapter) -> None:
        version = sum(tensor._version for tensor in adapter.parameters())
        if slots.held[at] == (adapter, version):
            return
        pairs = pairs_of(adapter, self._decoder)
        for key, operand in slots.operands.items():
            operand.A_GRI[at].zero_()
            operand.B_GOR[at].zero_()
            if key in pairs:
                A_RI, B_OR = pairs[key]
                operand.A_GRI[at, : len(A_RI)].copy_(A_RI)
                operand.B_GOR[at, :, : len(A_RI)].copy_(B_OR)
        slots.held[at] = (adapter, version)
