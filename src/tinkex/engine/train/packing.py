"""Pack ragged datums into passes: flat token streams with a budget, nothing padded.

A pass holds whole datums of any number of adapters, ordered so that each adapter's rows (and each
job's) are contiguous. Packing sees lengths and owners, never tensors of the model. With `alone`
every datum is a pass of its own, so its bits cannot depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Item:
    """One datum to be packed. `owner` is the adapter's place in the batch, `job` its job's."""

    owner: int
    job: int
    datum: int
    length: int
    backward: bool


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

    def owner_spans(self) -> list[tuple[int, int, int]]:
        """(start, stop, owner) for each adapter's contiguous rows."""
        spans: list[tuple[int, int, int]] = []
        for item, (start, stop) in zip(self.items, pairwise(self.bounds), strict=True):
            if spans and spans[-1][2] == item.owner:
                spans[-1] = (spans[-1][0], stop, item.owner)
            else:
                spans.append((start, stop, item.owner))
        return spans


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
