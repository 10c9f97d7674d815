"""Add up the gradients of several members, in the fixed tree of virtual shards.

A member has gathered gradients of some shards, each as long as the adapter. The vector is cut into
as many slices as there are members; each gets one slice of everybody's gradients, adds it up in the
order of the tree, and gives the sum to all. So each number is added once, by somebody, in an order
that does not depend on who gathered what: one member or eight, the bits are those of `tree_sum`.
Every link carries at once, and where whole subtrees lie with one member only their sums travel.

Nothing of what was gathered is changed: whoever loses the others in the middle still has it.

Letters: N numbers of an adapter, P parts on their way, W numbers of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinkex.engine.collectives.process_group import ProcessGroup
from tinkex.engine.optim.shards import NUM_SHARDS, tree_sum
from tinkex.errors import EngineError

PIECE = 1 << 22
"""Numbers that are under way at a time, so that little memory is needed beside the gradients."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum of some shards, all those there are of a subtree, with one member."""

    rank: int
    first: int
    width: int


def parts_of(holders: Mapping[int, tuple[int, ...]]) -> list[PartialSum]:
    """What has to travel, given who has each shard; in the order of the tree, then of members."""

    def below(first: int, width: int) -> list[PartialSum]:
        ranks = [holders.get(shard, ()) for shard in range(first, first + width)]
        every = sorted({rank for some in ranks for rank in some})
        if len(every) < 2 or width == 1:
            return [PartialSum(rank, first, width) for rank in every]
        half = width // 2
        return below(first, half) + below(first + half, half)

    return below(0, NUM_SHARDS)


def reduce(meeting: ProcessGroup, shards: Mapping[int, Tensor], like_N: Tensor) -> Tensor | None:
    """The sum of all members' shards, for everybody; None when nobody has any.

    Raises:
        PeerLost: Another member is gone, or did not come.
        EngineError: The members' gradients are not of one adapter.
    """
    holders = _holders(meeting, shards, like_N)
    parts = parts_of(holders)
    if not parts:
        return None
    total_N = torch.empty_like(like_N)
    for start in range(0, len(total_N), PIECE):
        stop = min(start + PIECE, len(total_N))
        piece = {shard: grad_N[start:stop] for shard, grad_N in shards.items()}
        _reduce_piece(meeting, piece, parts, total_N[start:stop])
    return total_N


def _holders(
    meeting: ProcessGroup, shards: Mapping[int, Tensor], like_N: Tensor
) -> dict[int, tuple[int, ...]]:
    """Who has each shard, after a look at whether all speak of one thing."""
    fits = all(grad_N.shape == like_N.shape for grad_N in shards.values())
    mine = [like_N.numel() if fits else -1, *(int(s in shards) for s in range(NUM_SHARDS))]
    rows = [
        row.tolist()
        for row in meeting.all_gather(torch.tensor(mine, dtype=torch.int64, device=meeting.device))
    ]
    if any(row[0] != rows[0][0] or row[0] < 0 for row in rows):  # all see it, and nobody waits
        raise EngineError(f"gradients of {[row[0] for row in rows]} numbers do not fit each other")
    return {
        shard: tuple(rank for rank, row in enumerate(rows) if row[1 + shard])
        for shard in range(NUM_SHARDS)
    }


def _reduce_piece(
    meeting: ProcessGroup, shards: Mapping[int, Tensor], parts: list[PartialSum], total: Tensor
) -> None:
    size, rank = meeting.size, meeting.rank
    bounds = [len(total) * place // size for place in range(size + 1)]
    widths = [stop - start for start, stop in pairwise(bounds)]
    mine = [part for part in parts if part.rank == rank]
    sums = [_sum_of(part, shards) for part in mine]
    slices = [s[bounds[place] : bounds[place + 1]] for place in range(size) for s in sums]
    given = torch.cat(slices) if slices else total.new_empty(0)
    counts = [sum(part.rank == other for part in parts) for other in range(size)]
    got_PW = total.new_empty(len(parts), widths[rank])
    meeting.all_to_all(
        given,
        [len(mine) * width for width in widths],
        got_PW.view(-1),
        [count * widths[rank] for count in counts],
    )
    # They came member by member, each one's in the order of the tree.
    order = sorted(parts, key=lambda part: part.rank)
    by_shard: dict[int, Tensor] = {}
    for part, got_W in zip(order, got_PW, strict=True):
        before = by_shard.get(part.first)
        by_shard[part.first] = got_W if before is None else before.add_(got_W)
    sum_W = tree_sum(by_shard, lambda one, other: one.add_(other))
    assert sum_W is not None
    meeting.all_to_all(sum_W.repeat(size), [widths[rank]] * size, total, widths)


def _sum_of(part: PartialSum, shards: Mapping[int, Tensor]) -> Tensor:
    below = range(part.first, part.first + part.width)
    value = tree_sum({s: grad for s, grad in shards.items() if s in below}, torch.add)
    assert value is not None
    return value
