"""Attention over a paged KV cache: where keys and values are written, and how they are read.

`PagedCache` owns the memory, `PagedAttend` is the `Attend` of one pass of the sampler; what delta
layers keep instead of keys and values is in `states`. Tokens that are alone in their chunk, those
of decoding sequences, attend in groups of similar length, so that padding stays small; a longer
chunk of a prompt attends by itself. Knows blocks and lengths, not samples or adapters. `begin`
prepares masks and indexes once; the call per layer does only device work.

Shapes: T tokens of the pass, H query heads, K key/value heads, G = H / K, d head size, P tokens per
block, N blocks, B sequences of a group, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tinkex.engine.model.attention import attend_with_sinks
from tinkex.engine.model.delta import DeltaWeights, mix
from tinkex.engine.model.exact_attention import exact_attention
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.sample import slabs
from tinkex.engine.sample.scheduler import Chunk
from tinkex.engine.sample.state_pool import Copy
from tinkex.engine.sample.states import StateCache

Placed = tuple[int, Chunk]
"""The first row of a chunk in its pass, and the chunk."""
_SPREAD = 0.6
"""A group holds sequences at least this long, relative to its longest."""


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    num_layers = max(1, len(config.attention_layers))
    return 2 * num_layers * config.num_kv_heads * config.head_size * dtype.itemsize


def cells(blocks: Sequence[int], start: int, stop: int, size: int) -> NDArray[np.int64]:
    """Where the tokens `start` to `stop` of a sequence are in flat pages."""
    at = np.arange(start, stop)
    return np.asarray(blocks, np.int64)[at // size] * size + at % size


def split(chunks: Sequence[Chunk]) -> tuple[list[Placed], list[Placed]]:
    """The chunks of one token, which attend together, and the longer ones, each with its row."""
    singles: list[Placed] = []
    longs: list[Placed] = []
    row = 0
    for chunk in chunks:
        (singles if chunk.length == 1 else longs).append((row, chunk))
        row += chunk.length
    return singles, longs


def slots_of(chunks: Sequence[Chunk], size: int) -> NDArray[np.int64]:
    """The place of each row of a pass, whose rows are the tokens of `chunks`, in flat pages."""
    parts: list[NDArray[np.int64] | list[int]] = []
    for chunk in chunks:
        if chunk.length == 1:  # most chunks; an array of a long sequence's blocks takes longer
            block = chunk.seq.blocks[chunk.start // size]
            parts.append([block * size + chunk.start % size])
        else:
            parts.append(cells(chunk.seq.blocks, chunk.start, chunk.start + chunk.length, size))
    return np.concatenate(parts).astype(np.int64, copy=False)


class PagedCache:
    """Keys and values of all layers that have them, in blocks."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.block_size = config, block_size
        # PagedAttention (Kwon et al., arXiv 2309.06180): sequences of any length waste at most the
        # rest of one block, and share blocks of a common prefix.
        layers = config.attention_layers
        self.index_of_layer = {layer: at for at, layer in enumerate(layers)}
        """Of a layer with attention, among those in `k` and `v`."""
        shape = (len(layers), num_blocks, block_size, config.num_kv_heads, config.head_size)
        self.k = slabs.zeros(shape, device, dtype)
        self.v = slabs.zeros(shape, device, dtype)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks that hold numbers that are not finite: masked cells must stay harmless."""
        slabs.clear((self.k, self.v), blocks)

    def copy_blocks(self, pairs: Sequence[Copy]) -> None:
        slabs.copy((self.k, self.v), pairs)


@dataclass(slots=True)
class _Group:
    """Chunks of one token and similar length, attended together."""

    rows: slice | Tensor
    table: Tensor | slice
    """Block numbers, flat [B * X]; of a lone sequence whose blocks are neighbours, their range."""
    num_blocks: int
    num_seqs: int
    num_keys: int
    lengths: NDArray[np.int64]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Long:
    """A chunk of several tokens of one sequence."""

    rows: slice
    start: int
    length: int
    table: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Move:
    """Rows of chunks of one length, and the slots of their sequences' states."""

    rows: Tensor
    slots: Tensor
    length: int


class PagedAttend:
    """See `attention.Attend`. `begin` must be called before each forward pass.

    A pass may have rows past those of its chunks; their output is 0.
    """

    def __init__(
        self, cache: PagedCache, states: StateCache | None = None, *, exact: bool = False
    ) -> None:
        """With `exact`, on a CPU, a token's bits do not depend on the pass: `exact_attention`."""
        self.cache, self.states, self._exact = cache, states, exact
        self._num_kv_heads, self._head_size = cache.config.num_kv_heads, cache.config.head_size
        self._flat_k = [k.flatten(0, 1) for k in cache.k]
        self._flat_v = [v.flatten(0, 1) for v in cache.v]
        self._rows_k = [k.flatten(1) for k in cache.k]
        self._rows_v = [v.flatten(1) for v in cache.v]
        self._scratch_k = cache.k.new_empty(0, self._rows_k[0].shape[1])
        self._scratch_v = self._scratch_k
        self._slots_T = torch.empty(0, dtype=torch.long)
        self._groups: list[_Group] = []
        self._longs: list[_Long] = []
        self._moves: list[_Move] = []
        self._num_rows = 0

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Prepare one pass whose rows are the tokens of `chunks`, in order."""
        device = self.cache.k.device
        slots = slots_of(chunks, self.cache.block_size)
        self._slots_T = torch.from_numpy(slots).to(device, non_blocking=True)
        self._num_rows = len(slots)
        singles, longs = split(chunks)
        self._longs = [self._long(row, chunk) for row, chunk in longs]
        if self.states is not None:
            # A slot still holds what its last sequence left there.
            self.states.clear([chunk.seq.state for chunk in chunks if chunk.start == 0])
            together = [singles] if singles else []
            self._moves = [self._move(some) for some in (*together, *([one] for one in longs))]
        self._groups = [self._group(members) for members in _by_length(singles)]
        largest = max(
            [group.num_blocks for group in self._groups] + [len(x.table) for x in self._longs]
        )
        # Twice what is needed, so that sequences that grow do not ask for memory in each pass.
        if largest > len(self._scratch_k):
            self._scratch_k = self.cache.k.new_empty(2 * largest, self._rows_k[0].shape[1])
            self._scratch_v = torch.empty_like(self._scratch_k)

    def _group(self, members: list[Placed]) -> _Group:
        size = self.cache.block_size
        rows = [row for row, _ in members]
        lengths = np.array([chunk.start + 1 for _, chunk in members])
        width = -(-int(lengths.max()) // size)
        # Padding repeats the sequence's first block: masked, and finite.
        table = np.zeros((len(members), width), np.int64)
        for i, (_, chunk) in enumerate(members):
            used = -(-(chunk.start + 1) // size)
            table[i, :used] = chunk.seq.blocks[:used]
            table[i, used:] = table[i, 0]
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        device = self.cache.k.device
        return _Group(
            rows=slice(rows[0], rows[0] + len(rows))
            if contiguous
            else torch.tensor(rows, device=device),
            table=_neighbours(table)
            or torch.from_numpy(table.reshape(-1)).to(device, non_blocking=True),
            num_blocks=table.size,
            num_seqs=len(members),
            num_keys=int(lengths.max()),
            lengths=lengths,
        )

    def _long(self, row: int, chunk: Chunk) -> _Long:
        used = -(-(chunk.start + chunk.length) // self.cache.block_size)
        table = torch.tensor(chunk.seq.blocks[:used] if chunk.start else [], dtype=torch.long)
        return _Long(
            rows=slice(row, row + chunk.length),
            start=chunk.start,
            length=chunk.length,
            table=table.to(self.cache.k.device, non_blocking=True),
        )

    def _move(self, members: Sequence[Placed]) -> _Move:
        """Chunks of one length, whose states move together."""
        device, length = self.cache.k.device, members[0][1].length
        slots = torch.tensor([chunk.seq.state for _, chunk in members], device=device)
        first = torch.tensor([row for row, _ in members], device=device)
        rows = (first[:, None] + torch.arange(length, device=device)).flatten()
        return _Move(rows, slots, length)

    # ------------------------------------------------------------------------------ per layer

    def __call__(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        num_rows = self._num_rows
        if (num_extra := len(q_THd) - num_rows) == 0:
            return self._attend(layer_index, q_THd, k_TKd, v_TKd, sinks_H)
        # Rows past the chunks only make the products larger; they belong to no sequence.
        rows = slice(num_rows)
        out_THd = self._attend(layer_index, q_THd[rows], k_TKd[rows], v_TKd[rows], sinks_H)
        return F.pad(out_THd, (0, 0, 0, 0, 0, num_extra))

    def recur(
        self, layer_index: int, weights: DeltaWeights, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        """See `attention.Attend`: every sequence goes on from its state, and leaves it behind."""
        assert self.states is not None
        delta = weights.config
        out_THv = x_TC.new_zeros(len(x_TC), delta.value_heads, delta.value_size)
        for move in self._moves:
            shape = (-1, move.length)
            x, g, beta = (t[move.rows].unflatten(0, shape) for t in (x_TC, g_TH, beta_TH))
            before = self.states.read(layer_index, move.slots)
            out_BLHv, after = mix(weights, x, g, beta, before)
            self.states.write(layer_index, move.slots, after)
            out_THv[move.rows] = out_BLHv.flatten(0, 1)
        return out_THv

    def _attend(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        window = self.cache.config.window(layer_index)
        at = self.cache.index_of_layer[layer_index]
        self._flat_k[at].index_copy_(0, self._slots_T, k_TKd)
        self._flat_v[at].index_copy_(0, self._slots_T, v_TKd)
        if not self._longs and len(self._groups) == 1:
            group = self._groups[0]
            q_BHd = q_THd if isinstance(group.rows, slice) else q_THd[group.rows]
            out = self._attend_group(at, group, q_BHd, window, sinks_H)
            return out if isinstance(group.rows, slice) else _placed(out, group.rows)
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        for group in self._groups:
            out = self._attend_group(at, group, q_THd[group.rows], window, sinks_H)
            out_THd[group.rows] = out
        for chunk in self._longs:
            rows = chunk.rows
            out = self._attend_long(
                at, chunk, q_THd[rows], k_TKd[rows], v_TKd[rows], window, sinks_H
            )
            out_THd[rows] = out
        return out_THd

    def _gather(self, at: int, table: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(table, slice):
            return self._rows_k[at][table], self._rows_v[at][table]
        k, v = self._scratch_k[: len(table)], self._scratch_v[: len(table)]
        torch.index_select(self._rows_k[at], 0, table, out=k)
        torch.index_select(self._rows_v[at], 0, table, out=v)
        return k, v

    def _attend_group(
        self, at: int, group: _Group, q_BHd: Tensor, window: int | None, sinks_H: Tensor | None
    ) -> Tensor:
        shape = (group.num_seqs, -1, self._num_kv_heads, self._head_size)
        k, v = self._gather(at, group.table)
        k_BKLd = k.view(shape)[:, : group.num_keys].transpose(1, 2)
        v_BKLd = v.view(shape)[:, : group.num_keys].transpose(1, 2)
        if sinks_H is not None:
            mask = self._group_mask(group, window)
            seen = (
                torch.ones((), dtype=torch.bool, device=q_BHd.device) if mask is None else mask == 0
            )
            return attend_with_sinks(q_BHd[:, :, None], k_BKLd, v_BKLd, seen, sinks_H)[:, 0]
        if self._exact:
            ends_B = torch.from_numpy(group.lengths)
            return exact_attention(q_BHd[:, :, None], k_BKLd, v_BKLd, ends_B, window)[:, :, 0]
        # The G query heads of a key head stand in for G queries: no copy of keys per query head.
        q_BKGd = q_BHd.unflatten(1, (self._num_kv_heads, -1))
        out_BKGd = F.scaled_dot_product_attention(
            q_BKGd, k_BKLd, v_BKLd, attn_mask=self._group_mask(group, window)
        )
        return out_BKGd.flatten(1, 2)

    def _group_mask(self, group: _Group, window: int | None) -> Tensor | None:
        if window not in group.masks:
            at_L, ends_B1 = np.arange(group.num_keys), group.lengths[:, None]
            open_BL = at_L < ends_B1
            if window is not None:
                open_BL &= at_L >= ends_B1 - window
            mask = None
            if not open_BL.all():
                bias = np.where(open_BL, np.float32(0), np.float32(-np.inf))[:, None, None]
                mask = torch.from_numpy(bias).to(self.cache.k.device, self.cache.k.dtype)
            group.masks[window] = mask
        return group.masks[window]

    def _attend_long(
        self,
        at: int,
        chunk: _Long,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        if chunk.start:
            k, v = self._gather(at, chunk.table)
            shape = (-1, self._num_kv_heads, self._head_size)
            k_TKd = k.view(shape)[: chunk.start + chunk.length]
            v_TKd = v.view(shape)[: chunk.start + chunk.length]
        q, k, v = (t.transpose(0, 1)[None] for t in (q_THd, k_TKd, v_TKd))
        if self._exact and sinks_H is None:
            return exact_attention(q, k, v, torch.tensor([len(k_TKd)]), window)[0].transpose(0, 1)
        mask = self._long_mask(chunk, window)
        if sinks_H is not None:
            if mask is None:
                every = torch.ones(len(q_THd), len(k_TKd), dtype=torch.bool, device=q_THd.device)
                mask = every.tril()
            return attend_with_sinks(q, k, v, mask, sinks_H)[0]
        grouped = q_THd.shape[1] != self._num_kv_heads
        out_HTd = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return out_HTd[0].transpose(0, 1)

    def _long_mask(self, chunk: _Long, window: int | None) -> Tensor | None:
        """True where a query may look; None: plain causal from the first token on."""
        if window not in chunk.masks:
            num_keys = chunk.start + chunk.length
            if chunk.start == 0 and (window is None or window >= num_keys):
                chunk.masks[window] = None
            else:
                at_T1 = torch.arange(chunk.start, num_keys)[:, None]
                at_L = torch.arange(num_keys)
                open_TL = at_L <= at_T1
                if window is not None:
                    open_TL &= at_L > at_T1 - window
                chunk.masks[window] = open_TL.to(self.cache.k.device)
        return chunk.masks[window]


def _neighbours(table_BX: NDArray[np.int64]) -> slice | None:
    """The range of blocks of a lone sequence, when they lie side by side: nothing to gather."""
    blocks = table_BX.reshape(-1)
    if len(table_BX) == 1 and (np.diff(blocks) == 1).all():
        return slice(int(blocks[0]), int(blocks[-1]) + 1)
    return None


def _placed(out_BHd: Tensor, rows_B: Tensor) -> Tensor:
    placed = torch.empty_like(out_BHd)
    placed[rows_B] = out_BHd
    return placed


def _by_length(singles: list[Placed]) -> list[list[Placed]]:
    """Split into groups of similar length, longest first; rows ascend inside a group."""
    groups: list[list[Placed]] = []
    longest = 0
    for row, chunk in sorted(singles, key=lambda single: -single[1].start):
        if not groups or chunk.start + 1 < _SPREAD * longest:
            groups.append([])
            longest = chunk.start + 1
        groups[-1].append((row, chunk))
    return [sorted(group, key=lambda single: single[0]) for group in groups]
