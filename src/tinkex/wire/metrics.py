"""Combine the metrics of the chunks of one batch (R1, contract 5.4).

A metric's name says how: `loss:sum`, `entropy:mean`. Weights are the number of outputs per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tinkex.errors import InvalidInputError

_MOD = 2**64
_Reduce = Callable[[Sequence[float], Sequence[float]], float]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    if total == 0:
        return 0.0
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def _slack(values: Sequence[float], weights: Sequence[float]) -> float:
    """How far the worst chunk lies above the mean; 0.0 when no chunk has weight."""
    return max(values) - _mean(values, weights) if sum(weights) else 0.0


def _hash(values: Sequence[float], weights: Sequence[float]) -> float:
    """The same for any order of chunks, and on every platform."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return sum(int(value) % _MOD for value in values) % _MOD


_REDUCTIONS: dict[str, _Reduce] = {
    "mean": _mean,
    "slack": _slack,
    "sum": lambda values, weights: sum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "hash2": _hash,
    "hash_unordered": _hash,
}


def reduce_metrics(
    metrics: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """The metrics of all chunks as one set.

    Keys come from the first chunk. A metric missing from any chunk is dropped, and so is one whose
    name has no reduction, or an unknown one: the pass itself is done, and its gradient gathered.
    `unique` keeps every chunk's value: `NAME:unique`, `NAME:unique_2`, ...

    Raises:
        InvalidInputError: The lengths differ.
    """
    if len(metrics) != len(weights):
        raise InvalidInputError(f"{len(metrics)} metrics but {len(weights)} weights")
    if not metrics:
        return {}
    reduced: dict[str, float] = {}
    for key in metrics[0]:
        suffix = key.partition(":")[2]
        if any(key not in chunk for chunk in metrics):
            continue
        values = [chunk[key] for chunk in metrics]
        if suffix == "unique":
            reduced[key] = values[0]
            reduced |= {f"{key}_{number}": v for number, v in enumerate(values[1:], start=2)}
        elif suffix in _REDUCTIONS:
            reduced[key] = _REDUCTIONS[suffix](values, weights)
    return reduced
