"""Add up the gradients of several ranks, in the fixed tree of virtual shards.

A rank has gathered gradients of some shards, each as long as the adapter. The vector is cut into
as many slices as there are ranks; each gets one slice of everybody's gradients, adds it up in the
order of the tree, and gives the sum to all. So each number is added once, by some rank, in an order
that does not depend on who gathered what: one rank or eight, the bits are those of `tree_sum`.
Every link carries at once, and where whole subtrees lie with one rank only their sums travel.

Nothing of what was gathered is changed: a rank that loses the others in the middle still has it.

Letters: N numbers of an adapter, P parts on their way, W numbers of a slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tinkex.engine.collectives.process_group import ProcessGroup, join, use_card
from tinkex.engine.jobs import JoinGroupJob
from tinkex.engine.optim.resident import SharedGradients
from tinkex.engine.optim.shards import NUM_SHARDS, tree_sum
from tinkex.errors import EngineError

PIECE = 1 << 22
"""Numbers that are under way at a time, so that little memory is needed beside the gradients."""


class GradientReducer:
    """A rank that adds up the gradients of adapters; see `process_groups.Reducer`.

    On CUDA it has a stream of its own, so that nothing the engine computes waits for it.
    """

    @staticmethod
    def join(
        device: torch.device,
        shared_of: Callable[[str], SharedGradients],
        job: JoinGroupJob,
        store: object,
    ) -> GradientReducer:
        stream = None
        if device.type == "cuda":
            use_card(device)
            stream = torch.cuda.Stream(device)
        # Its first collective too: on the default stream the engine would wait for other ranks.
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            group = join(
                job.rank,
                job.size,
                device,
                job.address,
                timeout_s=job.timeout_s,
                host=job.host,
            )
        return GradientReducer(group, shared_of, stream)

    def __init__(
        self,
        group: ProcessGroup,
        shared_of: Callable[[str], SharedGradients],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`shared_of` gives what an adapter has put aside."""
        self._group, self._shared_of, self._stream = group, shared_of, stream

    def reduce(self, adapter_id: str, root: int | None) -> int:
        shared = self._shared_of(adapter_id)
        if self._stream is None:
            shared.brought = self._bring(shared, root)
        else:
            with torch.cuda.stream(self._stream):
                # What was gathered was computed on the engine's stream, and is used there.
                engines = torch.cuda.default_stream(self._group.device)
                self._stream.wait_stream(engines)
                shared.brought = self._bring(shared, root)
                self._stream.synchronize()
                for grad_N in shared.brought.values():
                    grad_N.record_stream(engines)
        return sum(grad_N.nbytes for grad_N in shared.shards.values())

    def _bring(self, shared: SharedGradients, root: int | None) -> dict[int, Tensor]:
        if root is None:
            return reduce(self._group, shared.shards, shared.num_numbers)
        return collect(self._group, shared.shards, shared.num_numbers, root)

    def close(self) -> None:
        self._group.close()


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum of some shards, all those there are of a subtree, on one rank."""

    rank: int
    first: int
    width: int


def parts_of(holders: Mapping[int, tuple[int, ...]]) -> list[PartialSum]:
    """The sums that have to travel, by who has each shard; in the order of the tree, then ranks."""

    def below(first: int, width: int) -> list[PartialSum]:
        ranks = [holders.get(shard, ()) for shard in range(first, first + width)]
        every = sorted({rank for some in ranks for rank in some})
        if len(every) < 2 or width == 1:
            return [PartialSum(rank, first, width) for rank in every]
        half = width // 2
        return below(first, half) + below(first + half, half)

    return below(0, NUM_SHARDS)


def reduce(
    group: ProcessGroup, shards: Mapping[int, Tensor], num_numbers: int
) -> dict[int, Tensor]:
    """The sum of all ranks' shards, for all, as shard 0; nothing when nobody has any.

    Raises:
        PeerLost: Another rank is gone, or did not come.
        EngineError: The ranks' gradients are not of one adapter.
    """
    parts = parts_of(_holders(group, shards, num_numbers))
    if not parts:
        return {}
    total_N = torch.empty(num_numbers, device=group.device)
    for start in range(0, num_numbers, PIECE):
        stop = min(start + PIECE, num_numbers)
        piece = {shard: grad_N[start:stop] for shard, grad_N in shards.items()}
        _reduce_piece(group, piece, parts, total_N[start:stop])
    return {0: total_N}


def collect(
    group: ProcessGroup, shards: Mapping[int, Tensor], num_numbers: int, root: int
) -> dict[int, Tensor]:
    """The shards of all ranks, for `root`; nothing for the others. Raises as `reduce` does."""
    collected: dict[int, Tensor] = {}
    none = torch.empty(0, device=group.device)
    for shard, ranks in _holders(group, shards, num_numbers).items():
        for rank in ranks:
            # From one rank to the root, and nothing between all others.
            sent = shards[shard] if group.rank == rank else none
            received = none.new_empty(num_numbers) if group.rank == root else none
            sent_sizes, sizes = [0] * group.size, [0] * group.size
            sent_sizes[root], sizes[rank] = len(sent), len(received)
            group.all_to_all(sent, sent_sizes, received, sizes)
            if group.rank == root:
                before = collected.get(shard)
                collected[shard] = received if before is None else before.add_(received)
    return collected


def _holders(
    group: ProcessGroup, shards: Mapping[int, Tensor], num_numbers: int
) -> dict[int, tuple[int, ...]]:
    """The ranks that have each shard, once it is seen that all speak of one adapter."""
    fits = all(grad_N.shape == (num_numbers,) for grad_N in shards.values())
    mine = [num_numbers if fits else -1, *(int(s in shards) for s in range(NUM_SHARDS))]
    rows = [
        row.tolist()
        for row in group.all_gather(torch.tensor(mine, dtype=torch.int64, device=group.device))
    ]
    if any(row[0] != rows[0][0] or row[0] < 0 for row in rows):  # all see it, and nobody waits
        raise EngineError(f"gradients of {[row[0] for row in rows]} numbers do not fit each other")
    return {
        shard: tuple(rank for rank, row in enumerate(rows) if row[1 + shard])
        for shard in range(NUM_SHARDS)
    }


def _reduce_piece(
    group: ProcessGroup, shards: Mapping[int, Tensor], parts: list[PartialSum], total: Tensor
) -> None:
    size, rank = group.size, group.rank
    bounds = [len(total) * index // size for index in range(size + 1)]
    widths = [stop - start for start, stop in pairwise(bounds)]
    mine = [part for part in parts if part.rank == rank]
    sums = [_sum_of(part, shards) for part in mine]
    slices = [s[bounds[index] : bounds[index + 1]] for index in range(size) for s in sums]
    sent = torch.cat(slices) if slices else total.new_empty(0)
    counts = [sum(part.rank == other for part in parts) for other in range(size)]
    received_PW = total.new_empty(len(parts), widths[rank])
    group.all_to_all(
        sent,
        [len(mine) * width for width in widths],
        received_PW.view(-1),
        [count * widths[rank] for count in counts],
    )
    # They came rank by rank, each one's in the order of the tree.
    order = sorted(parts, key=lambda part: part.rank)
    by_shard: dict[int, Tensor] = {}
    for part, received_W in zip(order, received_PW, strict=True):
        before = by_shard.get(part.first)
        by_shard[part.first] = received_W if before is None else before.add_(received_W)
    sum_W = tree_sum(by_shard, lambda one, other: one.add_(other))
    assert sum_W is not None
    group.all_to_all(sum_W.repeat(size), [widths[rank]] * size, total, widths)


def _sum_of(part: PartialSum, shards: Mapping[int, Tensor]) -> Tensor:
    below = range(part.first, part.first + part.width)
    # Not in place: what was gathered is still needed if a rank is lost.
    value = tree_sum({s: grad for s, grad in shards.items() if s in below}, torch.add)
    assert value is not None
    return value
