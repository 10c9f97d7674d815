"""Packing loses no datum, keeps tenants apart and respects its budget."""

from __future__ import annotations

import numpy as np
import pytest

from tinkex.engine.train.packing import Item, pack


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
        owners = [owner for _, _, owner in one.owner_spans()]
        assert len(owners) == len(set(owners))
        assert one.owner_spans()[-1][1] == one.num_tokens


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
