"""R1: metrics of chunks become metrics of the batch."""

from __future__ import annotations

import math
import random

import pytest

from tinkex.errors import InvalidInputError
from tinkex.wire.metrics import reduce_metrics


@pytest.mark.parametrize(
    ("name", "values", "weights", "expected"),
    [
        ("x:mean", [1.0, 4.0], [1, 2], 3.0),
        ("x:sum", [1.0, 4.0], [1, 2], 5.0),
        ("x:min", [1.0, 4.0], [1, 2], 1.0),
        ("x:max", [1.0, 4.0], [1, 2], 4.0),
        ("x:slack", [1.0, 4.0], [1, 2], 1.0),
        ("x:hash2", [2**64 - 1, 3], [1, 2], 2),
        ("x:hash_unordered", [2**64 - 1, 3], [1, 2], 2),
        ("x:mean", [1.0, 4.0], [0, 0], 0.0),
        ("x:slack", [1.0, 4.0], [0, 0], 0.0),
    ],
)
def test_each_suffix_reduces_as_promised(name, values, weights, expected):
    assert reduce_metrics([{name: value} for value in values], weights) == {name: expected}


def test_unique_keeps_every_value_counting_from_two():
    chunks = [{"t:unique": 1.0}, {"t:unique": 2.0}, {"t:unique": 3.0}]
    expected = {"t:unique": 1.0, "t:unique_2": 2.0, "t:unique_3": 3.0}
    assert reduce_metrics(chunks, [1, 1, 1]) == expected


def test_a_metric_missing_from_any_chunk_is_dropped():
    assert reduce_metrics([{"a:sum": 1, "b:sum": 1}, {"a:sum": 1}], [1, 1]) == {"a:sum": 2}
    assert reduce_metrics([{"a:sum": 1}, {"a:sum": 1, "b:sum": 1}], [1, 1]) == {"a:sum": 2}


def test_an_unknown_suffix_is_skipped_and_nothing_gives_nothing():
    assert reduce_metrics([{"a:median": 1.0, "a:sum": 2.0}], [1]) == {"a:sum": 2.0}
    assert reduce_metrics([], []) == {}


@pytest.mark.parametrize("name", ["loss", "a:b:sum", "a:"])
def test_a_metric_whose_name_says_no_reduction_does_not_fail_the_step(name):
    """The gradient is gathered: a caller who tried again would count it twice."""
    assert reduce_metrics([{name: 1.0, "b:sum": 2.0}], [1]) == {"b:sum": 2.0}
    with pytest.raises(InvalidInputError, match="1 metrics but 2 weights"):
        reduce_metrics([{name: 1.0}], [1, 1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hash_of_what_is_no_number_is_none_and_fails_nothing(value):
    reduced = reduce_metrics([{"h:hash_unordered": 3.0}, {"h:hash_unordered": value}], [1, 1])
    assert math.isnan(reduced["h:hash_unordered"])


def test_the_hash_does_not_depend_on_the_order_of_chunks():
    values = [random.Random(0).getrandbits(63) for _ in range(20)]
    one = reduce_metrics([{"h:hash_unordered": v} for v in values], [1] * 20)
    two = reduce_metrics([{"h:hash_unordered": v} for v in reversed(values)], [1] * 20)
    assert one == two
