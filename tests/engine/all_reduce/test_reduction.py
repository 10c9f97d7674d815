"""Ranks of a process group get the sum that one would get, to the bit, or an error in time.

Members are threads of this process here, each with its own end of a real gloo process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkex.engine.all_reduce import reduction
from tinkex.engine.all_reduce.reduction import PartialSum, collect, parts_of, reduce
from tinkex.engine.collectives.process_group import PeerLost, ProcessGroup, join, open_store
from tinkex.engine.optim.shards import NUM_SHARDS, tree_sum
from tinkex.errors import EngineError

CPU = torch.device("cpu")
LENGTH = 1003


def together(
    size: int, place: str, work: Callable[[ProcessGroup], Any], timeout_s: float = 60
) -> Any:
    """What each of so many members makes of a process group, by rank; errors too."""

    def member(rank: int) -> Any:
        try:
            group = join(rank, size, CPU, place, timeout_s=timeout_s)
            try:
                return work(group)
            finally:
                group.close()
        except EngineError as exc:
            return exc

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


def gradients(num: int = NUM_SHARDS, length: int = LENGTH) -> dict[int, torch.Tensor]:
    """Numbers of such different sizes that every order of additions has bits of its own."""
    made = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-6, 6, (num, length), generator=made)
    return dict(enumerate(torch.randn(num, length, generator=made) * scale))


def dealt(grads: dict[int, torch.Tensor], places: Sequence[int], size: int) -> list[dict]:
    return [{s: g for s, g in grads.items() if places[s] == rank} for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (1, [0] * 8),
        (2, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, [0, 1, 1, 0, 1, 0, 0, 1]),
        (3, [2, 1, 0, 0, 0, 1, 1, 2]),
        (3, [2] * 8),
        (4, [0, 1, 2, 3, 0, 1, 2, 3]),
        (8, [7, 6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_the_sum_has_the_bits_of_one_member_whoever_has_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, places: list[int]
) -> None:
    monkeypatch.setattr(reduction, "PIECE", 400)  # several pieces, the last one uneven
    grads = gradients()
    before = {shard: grad.clone() for shard, grad in grads.items()}
    expected = tree_sum(grads, torch.add)
    mine = dealt(grads, places, size)
    sums = together(size, f"file:{tmp_path / 's'}", lambda m: reduce(m, mine[m.rank], LENGTH))
    for total in sums:
        assert torch.equal(total[0], expected)
    assert all(torch.equal(grads[shard], before[shard]) for shard in grads), "a failure costs none"


def test_shards_that_are_missing_and_members_with_nothing_change_no_bit(tmp_path: Path) -> None:
    grads = {shard: grad for shard, grad in gradients().items() if shard in (1, 2, 6)}
    mine = [{}, {6: grads[6]}, {1: grads[1], 2: grads[2]}]
    sums = together(3, f"file:{tmp_path / 's'}", lambda m: reduce(m, mine[m.rank], LENGTH))
    for total in sums:
        assert torch.equal(total[0], tree_sum(grads, torch.add))
    nothing = together(2, f"file:{tmp_path / 't'}", lambda m: reduce(m, {}, LENGTH))
    assert nothing == [{}, {}]


def test_without_shards_members_are_added_in_their_order(tmp_path: Path) -> None:
    grads = gradients(3, 2)
    sums = together(3, f"file:{tmp_path / 's'}", lambda m: reduce(m, {0: grads[m.rank]}, 2))
    for total in sums:
        assert torch.equal(total[0], grads[0] + grads[1] + grads[2])


def test_shards_are_collected_at_one_member_as_they_were_gathered(tmp_path: Path) -> None:
    grads = gradients(5)
    mine = [{0: grads[0], 3: grads[1]}, {0: grads[2]}, {3: grads[3], 7: grads[4]}]
    ends = together(3, f"file:{tmp_path / 's'}", lambda m: collect(m, mine[m.rank], LENGTH, 1))
    assert ends[0] == ends[2] == {}
    expected = {0: grads[0] + grads[2], 3: grads[1] + grads[3], 7: grads[4]}
    assert ends[1].keys() == expected.keys()
    assert all(torch.equal(ends[1][shard], grad) for shard, grad in expected.items())


def test_only_sums_of_whole_subtrees_travel() -> None:
    assert parts_of({shard: (shard // 4,) for shard in range(8)}) == [
        PartialSum(0, 0, 4),
        PartialSum(1, 4, 4),
    ]
    mixed = {0: (0,), 1: (1,), 2: (1,), 3: (1,), 5: (0,), 6: (0,)}
    assert parts_of(mixed) == [
        PartialSum(0, 0, 1),
        PartialSum(1, 1, 1),
        PartialSum(1, 2, 2),
        PartialSum(0, 4, 4),
    ]
    assert parts_of({}) == []


def test_gradients_of_two_adapters_are_refused_by_all(tmp_path: Path) -> None:
    ends = together(2, f"file:{tmp_path / 's'}", lambda m: reduce(m, {}, 4 + m.rank))
    assert [type(end) for end in ends] == [EngineError, EngineError]
    assert all("[4, 5]" in str(end) for end in ends)


def test_members_find_each_other_at_an_address() -> None:
    store, place = open_store("127.0.0.1")
    grads = gradients(2)
    sums = together(2, place, lambda m: reduce(m, {m.rank: grads[m.rank]}, LENGTH))
    assert all(torch.equal(total[0], grads[0] + grads[1]) for total in sums)
    del store


def test_a_member_that_does_not_come_costs_the_others_their_patience_and_no_more(
    tmp_path: Path,
) -> None:
    over = threading.Event()

    def work(group: ProcessGroup) -> Any:
        if group.rank:
            over.wait(100)  # it hangs
            return None
        try:
            return reduce(group, {0: torch.ones(LENGTH)}, LENGTH)
        finally:
            over.set()

    lost, _ = together(2, f"file:{tmp_path / 's'}", work, timeout_s=12)
    assert isinstance(lost, PeerLost)
    assert "did not come to a gathering within 12 s" in str(lost)


def test_a_member_that_leaves_is_noticed_at_once(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        if group.rank:
            return None
        return reduce(group, {0: torch.ones(LENGTH)}, LENGTH)

    lost, _ = together(2, f"file:{tmp_path / 's'}", work, timeout_s=60)
    assert isinstance(lost, PeerLost)
    assert "is gone in the middle of a gathering" in str(lost)


def test_a_group_that_nobody_else_joins_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="member 0 of 2 found no process group"):
        join(0, 2, CPU, f"file:{tmp_path / 's'}", timeout_s=0.5)
