"""Attention over the paged KV cache on CUDA, and decode steps replayed as CUDA graphs.

`CudaPagedAttend` does on a GPU what `paged.PagedAttend` does on a CPU: tokens that are alone in
their chunk go through one paged-decode kernel whatever their lengths, prompt chunks through the
trainer's. Both compute the same function of a token and its keys (see `attention`), so its bits are
the same in any chunk and in any company. `DecodeGraphs` records a whole step of
one token per sequence, head included, once per batch size, and replays it: a step of 36 layers is
then one launch instead of a thousand. A graph reads its inputs from tensors that stay in place,
adapters included; `run` fills them and replays.

Knows chunks, blocks and adapters; refuses to know requests and sampling.

Letters: T tokens, B sequences, H query heads, K key heads, d head size, P tokens per block,
X blocks of a sequence, V vocabulary, S adapter slots, R ranks of a fused linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import attention, delta
from tinkex.engine.cuda.adapter_layout import EXPERTS
from tinkex.engine.cuda.adapter_slots import AdapterSlots
from tinkex.engine.cuda.fused import CudaDecoder
from tinkex.engine.cuda.transfer import send
from tinkex.engine.jobs import Array
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.mixture import Routing
from tinkex.engine.sample.expert_pages import ExpertPages
from tinkex.engine.sample.paged import PagedCache, Placed, cells, slots_of, split
from tinkex.engine.sample.scheduler import Chunk
from tinkex.engine.sample.states import StateCache

Drawn = tuple[Tensor, Sequence[int]]
"""Tokens on the device, and which of them each chunk feeds in."""
_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SLOT_COUNTS = (2, 4, 8, 16, 32, 64)
_WORTH, _WORTH_SMALLER, _WORTH_LITTLE = 3, 16, 64
"""Steps of a batch size after which it is recorded: the first; where a larger recording has room
for it, which takes some milliseconds more a step; where one of at most twice its size has. To
record takes most of a second, which sizes that a batch only passes through never earn back."""


class CudaPagedAttend:
    """See `attention.CachedAttend`. `begin` must be called before each forward pass."""

    def __init__(self, cache: PagedCache, states: StateCache | None = None) -> None:
        self.cache, self.states = cache, states
        self._scale = cache.config.head_size**-0.5
        self._flat_k = [k.flatten(0, 1) for k in cache.k]
        self._flat_v = [v.flatten(0, 1) for v in cache.v]
        self._slots_T = torch.empty(0, dtype=torch.long)
        self._singles: _Singles | None = None
        self._longs: _Longs | None = None
        self._tokens: delta.TokenBounds | None = None

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Prepare one pass whose rows are the tokens of `chunks`, in order."""
        device = self.cache.k.device
        size = self.cache.block_size
        slots_T = send(slots_of(chunks, size), device)
        # The kernel of many queries would fill a tile of 128 with a single one.
        singles, longs = split(chunks)
        self.prepare(
            slots_T,
            _Singles.of(singles, size, device) if singles else None,
            _Longs.of(longs, size, device) if longs else None,
        )
        if self.states is not None:
            # A slot still holds what its last sequence left there.
            self.states.clear([chunk.seq.state for chunk in chunks if chunk.start == 0])
            slots, lengths = zip(*((c.seq.state, c.length) for c in chunks), strict=True)
            self._tokens = delta.TokenBounds.of(slots, lengths, device)

    def prepare(
        self,
        slots_T: Tensor,
        singles: _Singles | None,
        longs: _Longs | None,
        states_B: Tensor | None = None,
    ) -> None:
        """The same from tensors: where keys and values go, and who looks where.

        `states_B` are the slots of delta layers' states, of a pass of single tokens.
        """
        self._slots_T, self._singles, self._longs = slots_T, singles, longs
        if states_B is not None:
            self._tokens = delta.TokenBounds.singles(states_B)

    def target(self, layer_index: int) -> tuple[Tensor, Tensor, Tensor]:
        at = self.cache.index_of_layer[layer_index]
        return self._flat_k[at], self._flat_v[at], self._slots_T

    def delta(self, layer_index: int, w: DeltaWeights, fused_TX: Tensor, eps: float) -> Tensor:
        """The output of a delta layer; every sequence starts from its state and updates it."""
        assert self.states is not None
        assert self._tokens is not None
        return delta.advance(w, fused_TX, *self.states.layer(layer_index), self._tokens, eps)

    def __call__(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        singles, longs = self._singles, self._longs
        if longs is None and singles is not None:
            return self._decode(layer_index, q_THd, singles, sinks_H)
        if singles is None and longs is not None:
            return self._prefill(layer_index, q_THd, longs, sinks_H)
        assert singles is not None
        assert longs is not None
        out_THd = torch.empty_like(q_THd)
        rows_B, rows_T = singles.rows_B, longs.rows_T
        out_THd[rows_B] = self._decode(layer_index, q_THd[rows_B], singles, sinks_H)
        out_THd[rows_T] = self._prefill(layer_index, q_THd[rows_T], longs, sinks_H)
        return out_THd

    def _decode(
        self, layer_index: int, q_BHd: Tensor, singles: _Singles, sinks_H: Tensor | None
    ) -> Tensor:
        at = self.cache.index_of_layer[layer_index]
        return attention.paged_decode(
            q_BHd.contiguous(),
            self.cache.k[at],
            self.cache.v[at],
            singles.tables_BX,
            singles.lengths_B,
            scale=self._scale,
            splits=_splits(len(q_BHd), self.cache),
            window=self.cache.config.window(layer_index),
            sinks_H=sinks_H,
        )

    def _prefill(
        self, layer_index: int, q_THd: Tensor, longs: _Longs, sinks_H: Tensor | None
    ) -> Tensor:
        at = self.cache.index_of_layer[layer_index]
        return attention.tiles(
            q_THd.contiguous(),
            self._flat_k[at].index_select(0, longs.keys_L),
            self._flat_v[at].index_select(0, longs.keys_L),
            longs.queries,
            scale=self._scale,
            window=self.cache.config.window(layer_index),
            sinks_H=sinks_H,
        )[0]


@dataclass(frozen=True, slots=True)
class _Singles:
    """Tokens that attend one by one: their rows, blocks and lengths, themselves included."""

    rows_B: Tensor
    tables_BX: Tensor
    lengths_B: Tensor

    @classmethod
    def of(cls, members: Sequence[Placed], size: int, device: torch.device) -> _Singles:
        chunks = [chunk for _, chunk in members]
        return cls(
            send([row for row, _ in members], device),
            send(_tables(chunks, size), device),
            send([chunk.start + 1 for chunk in chunks], device, torch.int32),
        )


@dataclass(frozen=True, slots=True)
class _Longs:
    """Prompt chunks: their rows, and the cache rows of all keys they may look at."""

    rows_T: Tensor
    keys_L: Tensor
    queries: attention.Queries

    @classmethod
    def of(cls, members: Sequence[Placed], size: int, device: torch.device) -> _Longs:
        queries = [chunk.length for _, chunk in members]
        keys = [chunk.start + chunk.length for _, chunk in members]
        rows = [np.arange(row, row + chunk.length) for row, chunk in members]
        slots = [
            cells(chunk.seq.blocks, 0, end, size)
            for (_, chunk), end in zip(members, keys, strict=True)
        ]
        return cls(
            send(np.concatenate(rows), device),
            send(np.concatenate(slots), device),
            attention.Queries.of(queries, keys, device),
        )


def _tables(chunks: Sequence[Chunk], size: int) -> Array:
    used = [(chunk.start + chunk.length - 1) // size + 1 for chunk in chunks]
    tables = np.zeros((len(chunks), max(used)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, used, strict=True)):
        tables[row, :count] = chunk.seq.blocks[:count]
    return tables


def _splits(batch: int, cache: PagedCache) -> int:
    """Enough programs to fill a GPU of about 132 multiprocessors twice."""
    return max(1, min(64, 264 // (batch * cache.config.num_kv_heads)))


# ---------------------------------------------------------------------- graphs


class _Static:
    """The inputs and the output of the graph of one batch size and one set of adapter slots.

    A step sends two numbers per sequence; block tables travel only when one has changed.
    """

    def __init__(self, batch: int, width: int, device: torch.device, no_state: int) -> None:
        self.batch, self._no_state = batch, no_state
        self.states_B = torch.full((batch,), no_state, dtype=torch.long, device=device)
        self._host_states: list[int] = []
        self.inputs_2B = torch.zeros(2, batch, dtype=torch.long, device=device)
        self.tables_BX = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self._host_tables = np.zeros((batch, width), np.int32)
        self._known: list[list[int]] = [[] for _ in range(batch)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits_BV: Tensor | None = None

    def fill(self, chunks: Sequence[Chunk], drawn: Drawn | None) -> None:
        """Rows beyond the batch stand at position -1: they write nothing and see nothing."""
        device, spare = self.inputs_2B.device, self.batch - len(chunks)
        states = [*(max(chunk.seq.state, 0) for chunk in chunks), *[self._no_state] * spare]
        if states != self._host_states:
            self.states_B.copy_(send(states, device))
            self._host_states = states
        positions = [*(chunk.start for chunk in chunks), *[-1] * spare]
        if drawn is None:
            tokens = [chunk.seq.tokens[chunk.start] for chunk in chunks]
            self.inputs_2B.copy_(send(([*tokens, *[0] * spare], positions), device))
        else:
            tokens_N, row_of_chunk = drawn
            sent_2B = send(([*row_of_chunk, *[0] * spare], positions), device)
            # On the device: the host has not seen these tokens, and does not wait for them.
            torch.index_select(tokens_N, 0, sent_2B[0], out=self.inputs_2B[0])
            self.inputs_2B[1].copy_(sent_2B[1])
        changed = [at for at, c in enumerate(chunks) if self._known[at] != c.seq.blocks]
        if changed:
            for at in changed:
                blocks = self._known[at] = list(chunks[at].seq.blocks)
                self._host_tables[at, : len(blocks)] = blocks
            width = max(len(blocks) for blocks in self._known)
            tables = np.ascontiguousarray(self._host_tables[:, :width])
            self.tables_BX[:, :width].copy_(send(tables, device))


class DecodeGraphs:
    """Decode steps of one model as CUDA graphs, recorded when a batch size has come some times."""

    def __init__(
        self,
        decoder: CudaDecoder,
        cache: PagedCache,
        states: StateCache | None = None,
        experts: ExpertPages | None = None,
        *,
        max_context: int,
    ) -> None:
        self._decoder, self._cache, self._states = decoder, cache, states
        self._experts = experts
        self._no_state = 0 if states is None else states.spare
        self._width = -(-max_context // cache.block_size)
        self._statics: dict[tuple[int, AdapterSlots | None], _Static] = {}
        self._met: Counter[tuple[int, AdapterSlots | None]] = Counter()
        self._slots: dict[Any, AdapterSlots] = {}
        self._pool: Any = None

    def run(
        self, chunks: Sequence[Chunk], lora: LoraBatch | None, drawn: Drawn | None = None
    ) -> Tensor | None:
        """Logits [B, V] of one-token chunks, in their order; None where no graph fits.

        `drawn` holds their tokens where the host does not know them yet. The result is overwritten
        by the next call.
        """
        slots = None
        if lora is not None and lora.spans and (slots := self._slots_for(lora)) is None:
            return None
        if (static := self._static_for(len(chunks), slots)) is None:
            return None
        order = list(range(len(chunks)))
        if lora is not None and slots is not None:
            order = slots.place(lora, len(chunks), static.batch)
        if drawn is not None:
            drawn = drawn[0], [drawn[1][row] for row in order]
        static.fill([chunks[row] for row in order], drawn)
        if static.graph is None:
            self._record(static, slots)
        assert static.graph is not None
        assert static.logits_BV is not None
        static.graph.replay()
        logits = static.logits_BV[: len(chunks)]
        # Slots sort rows by adapter; logits go back in the order of the chunks.
        if order == list(range(len(chunks))):
            return logits
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return logits.index_select(0, send(back, self._decoder.device))

    def _static_for(self, num_rows: int, slots: AdapterSlots | None) -> _Static | None:
        """Room for so many rows, or more. A size is recorded when it has come some times."""
        sizes = [size for size in _BATCH_SIZES if size >= num_rows]
        if not sizes:
            return None
        key = (sizes[0], slots)
        if key not in self._statics:
            self._met[key] += 1
            known = [size for size in sizes if (size, slots) in self._statics]
            worth = _WORTH
            if known:
                worth = _WORTH_LITTLE if known[0] <= 2 * num_rows else _WORTH_SMALLER
            if self._met[key] < worth:
                return self._statics[known[0], slots] if known else None
            self._statics[key] = _Static(
                sizes[0], self._width, self._decoder.device, self._no_state
            )
        return self._statics[key]

    def _record(self, static: _Static, slots: AdapterSlots | None) -> None:
        attend, size = CudaPagedAttend(self._cache, self._states), self._cache.block_size
        lora: dict[str, Any] = {**slots.operands, EXPERTS: slots} if slots else {}
        states_B = None if self._states is None else static.states_B

        def step() -> Tensor:
            tokens_B, positions_B = static.inputs_2B
            at_B = positions_B.clamp(min=0)
            blocks_B1 = static.tables_BX.gather(1, (at_B // size)[:, None])
            rows_B = torch.where(positions_B < 0, -1, blocks_B1[:, 0] * size + at_B % size)
            lengths_B = (positions_B + 1).to(torch.int32)
            attend.prepare(rows_B, _Singles(rows_B, static.tables_BX, lengths_B), None, states_B)
            routing = None if self._experts is None else Routing()
            hidden_BD = self._decoder.infer(tokens_B, positions_B, attend, lora, routing)
            if self._experts is not None and routing is not None:
                self._experts.write(rows_B, routing)
            return self._decoder.logits(hidden_BD, lora.get("head"))

        # Running a step moves states on: what only looks must not touch anyone's.
        wanted_B = static.states_B.clone()
        static.states_B.fill_(self._no_state)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # first runs compile kernels and choose algorithms
                for _ in range(2):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # One pool of memory for all graphs: no two of them are replayed at one time.
            with torch.cuda.graph(graph, pool=self._pool):
                static.logits_BV = step()
        self._pool = self._pool or graph.pool()
        static.states_B.copy_(wanted_B)
        static.graph = graph

    def _slots_for(self, lora: LoraBatch) -> AdapterSlots | None:
        """Room for this batch's adapters; None when they are of several layouts, or too many."""
        adapters = {span.adapter for span in lora.spans}
        signature = lora.spans[0].adapter.signature
        # One slot more than adapters: the first is that of rows without any.
        count = next((n for n in _SLOT_COUNTS if n > len(adapters)), None)
        if count is None or any(adapter.signature != signature for adapter in adapters):
            return None
        if any(EXPERTS in key for key in lora.spans[0].adapter.groups) and not (
            count == 2 and self._decoder.groups_experts(lora)
        ):
            return None  # experts of one adapter at a time are part of a recording
        slots = self._slots.get(signature)
        if slots is None or slots.count < count:
            if slots is not None:  # what was recorded reads the smaller buffer: it goes with it
                known = self._statics.items()
                self._statics = {key: one for key, one in known if key[1] is not slots}
                self._met = Counter({key: n for key, n in self._met.items() if key[1] is not slots})
            like, dtype = lora.spans[0].adapter, self._decoder.dtype
            slots = AdapterSlots(like, count, dtype, max_rows=_BATCH_SIZES[-1])
            self._slots[signature] = slots
        return slots
