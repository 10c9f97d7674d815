"""Pack ragged datums into passes: flat token streams with a budget, nothing padded.

A pass holds whole datums of any number of adapters, ordered so that each adapter's rows (and each
job's) are contiguous. Packing sees lengths and owners, never tensors of the model. With `alone`
every datum is a pass of its own, so its bits cannot depend on its company.

Where sums must not depend on who else is in a pass, `pack_pieces` first cuts every virtual shard
into pieces, by what the shard holds and nothing else, and then fills passes with whole pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Item:
    """A datum to be packed. `owner` and `job` are the indexes of its adapter and its job."""

    owner: int
    job: int
    datum: int
    length: int
    backward: bool
    shard: int = 0
    """Its virtual shard; see `shards`."""
    piece: int = 0
    """What its shard's items are summed up in: counted within the shard."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Datums that go through the decoder together."""

    items: tuple[Item, ...]
    backward: bool

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)

    @property
    def bounds(self) -> list[int]:
        """Where each datum starts in the stream, and where the last one stops."""
        bounds = [0]
        for item in self.items:
            bounds.append(bounds[-1] + item.length)
        return bounds

    @property
    def pieces(self) -> list[int]:
        """How many datums each piece holds, in their order."""
        return [len(list(group)) for _, group in groupby(self.items, _piece)]

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(start, stop, owner, shard) for the contiguous rows of each adapter and piece."""
        edges, bounds, at = [], self.bounds, 0
        for count in self.pieces:
            first = self.items[at]
            edges.append((bounds[at], bounds[at + count], first.owner, first.shard))
            at += count
        return edges


def _piece(item: Item) -> tuple[int, int, int]:
    return item.owner, item.shard, item.piece


def pack(items: Sequence[Item], *, max_tokens: int, alone: bool = False) -> list[Pass]:
    """Split items into passes of at most `max_tokens`; a longer datum gets a pass of its own.

    Datums that need no gradient are packed apart, so that they run without any bookkeeping.
    """
    passes: list[Pass] = []
    for backward in (True, False):
        chosen = [item for item in items if item.backward == backward]
        if alone:
            passes += [Pass((item,), backward) for item in chosen]
            continue
        # Equal lengths side by side share one attention kernel.
        chosen.sort(key=lambda item: (item.owner, item.job, item.length, item.datum))
        passes += [Pass(tuple(group), backward) for group in _fill(chosen, max_tokens)]
    return passes


def pack_pieces(items: Sequence[Item], *, piece_tokens: int, max_tokens: int) -> list[Pass]:
    """Passes of whole pieces: the first of every shard, then the second of every shard, ..."""
    passes: list[Pass] = []
    shards = sorted({(item.owner, item.shard) for item in items})
    for backward in (True, False):
        pieces: list[tuple[int, tuple[Item, ...]]] = []
        for shard in shards:
            mine = [i for i in items if i.backward == backward and (i.owner, i.shard) == shard]
            cut = pack(mine, max_tokens=piece_tokens)
            pieces += [
                (number, tuple(replace(item, piece=number) for item in one.items))
                for number, one in enumerate(cut)
            ]
        pieces.sort(key=lambda piece: piece[0])
        group: list[Item] = []
        for _, piece in pieces:
            if group and sum(item.length for item in (*group, *piece)) > max_tokens:
                passes.append(Pass(tuple(group), backward))
                group = []
            group += piece
        if group:
            passes.append(Pass(tuple(group), backward))
    return passes


def _fill(items: Sequence[Item], max_tokens: int) -> list[list[Item]]:
    """Cut the ordered items into as few groups as the budget allows, about equally full."""
    total = sum(item.length for item in items)
    num_groups = max(1, -(-total // max_tokens))
    even_share = total / num_groups
    groups: list[list[Item]] = []
    filled = 0
    for item in items:
        if not groups or filled + item.length > max_tokens or filled >= even_share:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.length
    return groups
