"""Packing loses no datum, keeps tenants apart and respects its budget."""

from __future__ import annotations

import numpy as np
import pytest

from tinkex.engine.train.packing import Item, pack, pack_pieces


def items(rng, count=60) -> list[Item]:
    return [
        Item(int(rng.integers(3)), j, j, int(rng.integers(1, 90)), bool(rng.integers(2)))
        for j in range(count)
    ]


def test_every_datum_is_in_exactly_one_pass_of_its_kind(rng):
    given = items(rng)
    passes = pack(given, max_tokens=100)
    packed = [(item, one.backward) for one in passes for item in one.items]
    assert sorted(item.job for item, _ in packed) == list(range(len(given)))
    assert all(item.backward == backward for item, backward in packed)


@pytest.mark.parametrize("budget", [50, 100, 1000])
def test_no_pass_exceeds_the_budget_unless_one_datum_does(rng, budget):
    for one in pack(items(rng), max_tokens=budget):
        assert one.num_tokens <= budget or len(one.items) == 1


def test_the_rows_of_an_adapter_are_contiguous(rng):
    for one in pack(items(rng), max_tokens=400):
        owners = [owner for _, _, owner, _ in one.spans()]
        assert len(owners) == len(set(owners))
        assert one.spans()[-1][1] == one.num_tokens


def test_deterministic_passes_hold_one_datum(rng):
    given = items(rng)
    passes = pack(given, max_tokens=1000, alone=True)
    assert len(passes) == len(given)


def test_passes_are_about_equally_full():
    given = [Item(0, j, j, 10, True) for j in range(21)]
    sizes = [one.num_tokens for one in pack(given, max_tokens=200)]
    assert len(sizes) == 2
    assert min(sizes) >= 100
    assert np.sum(sizes) == 210


def test_a_shard_is_cut_alike_whoever_else_is_there(rng):
    """So that one worker with eight shards sums up as eight workers with one each."""
    given = [
        Item(0, 0, d, int(rng.integers(1, 90)), bool(rng.integers(2)), d % 4) for d in range(80)
    ]

    def pieces(shards: set[int]) -> dict[tuple[int, int, bool], list[int]]:
        found: dict[tuple[int, int, bool], list[int]] = {}
        mine = [item for item in given if item.shard in shards]
        for one in pack_pieces(mine, piece_tokens=100, max_tokens=350):
            assert one.num_tokens <= 350
            assert sum(one.pieces) == len(one.items)
            for item in one.items:
                found.setdefault((item.shard, item.piece, one.backward), []).append(item.datum)
        return found

    together = pieces({0, 1, 2, 3})
    assert sorted(sum(together.values(), [])) == list(range(80))
    alone = [pieces({shard}) for shard in range(4)]
    assert together == alone[0] | alone[1] | alone[2] | alone[3]


def test_pieces_of_one_shard_follow_each_other(rng):
    given = [Item(0, 0, d, 60, True, d % 2) for d in range(12)]
    for max_tokens in (0, 130, 1000):
        passes = pack_pieces(given, piece_tokens=100, max_tokens=max_tokens)
        order = [(item.shard, item.piece) for one in passes for item in one.items]
        assert [piece for shard, piece in order if shard == 1] == list(range(6))
        if max_tokens == 0:
            assert all(len(one.pieces) == 1 for one in passes)
