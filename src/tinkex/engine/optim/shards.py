"""Virtual shards: the fixed order in which gradients of a deterministic pass are added.

A sum of floats depends on its order. So the datums of a pass are dealt into a fixed number of
shards, by their lengths alone; the gradient of a shard is gathered datum after datum, and the
shards are added in a fixed tree. Whoever computes a shard, one worker or eight, the bits are the
same. Knows lengths and numbers of shards, not tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
NUM_SHARDS = 8
"""A power of two, and the most workers that one pass can be split over exactly."""


def deal(
    costs: Sequence[float], num_piles: int = NUM_SHARDS, loads: Sequence[float] | None = None
) -> list[int]:
    """The pile of each item: the most costly first, each to the pile that is lightest by then."""
    filled = list(loads) if loads is not None else [0.0] * num_piles
    piles = [0] * len(costs)
    # Longest processing time first; ties by index, so that every worker deals alike.
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        pile = min(range(num_piles), key=filled.__getitem__)
        piles[item] = pile
        filled[pile] += costs[item]
    return piles


def tree_sum(parts: Mapping[int, T], add: Callable[[T, T], T]) -> T | None:
    """The sum of the shards there are: 0 and 1, 2 and 3, ..., then pairs of pairs."""
    left = dict(parts)
    step = 1
    while step < NUM_SHARDS:
        for shard in range(0, NUM_SHARDS, 2 * step):
            if (other := left.pop(shard + step, None)) is not None:
                left[shard] = add(left[shard], other) if shard in left else other
        step *= 2
    return left.get(0)
