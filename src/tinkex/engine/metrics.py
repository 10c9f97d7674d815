"""Metrics of a training pass, as both engines report them. Needs no torch.

A pass may be run in parts, by several workers. Each part gives a `Tally` of what it counted; joined
they give the metrics of the whole, to the bit: sums are exact until they are rounded once
(`math.fsum`), so neither the order nor the grouping of the parts shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Gap:
    """Distances between trainer and sampler over some tokens; gap = logp - q."""

    sum_abs: float
    max_abs: float
    sum_k3: float
    """k3 estimates KL(sampler || trainer) without bias and is never negative."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """Where the routers of a mixture sent the tokens: L layers with experts, E experts."""

    tokens_LE: NDArray[np.float64]
    entropies: tuple[float, ...]
    """Sums over some rows each."""
    num_routed: int
    num_replayed: int = 0
    """Of those, the ones that a datum prescribed."""
    num_changed: int = 0
    """Of those, the ones that their router would have sent elsewhere."""

    def metrics(self) -> dict[str, float]:
        """A violation is how far an expert's load is from an equal share, relative to that."""
        load_LE = self.tokens_LE / self.tokens_LE.mean(1, keepdims=True)
        most_L = load_LE.max(1) - 1
        replay = {}
        if self.num_replayed:
            replay = {
                "e_replayed:mean": self.num_replayed / self.num_routed,
                "e_replay_changed:mean": self.num_changed / self.num_replayed,
            }
        return {
            "e_frac_with_tokens:mean": float((self.tokens_LE > 0).mean()),
            "e_frac_oversubscribed:mean": float((load_LE > 1).mean()),
            "e_max_violation:mean": float(most_L.mean()),
            "e_max_violation:max": float(most_L.max()),
            "e_min_violation:mean": float((load_LE.min(1) - 1).mean()),
            "e_entropy:mean": math.fsum(self.entropies) / self.num_routed,
            "e_dropped:sum": 0.0,
            **replay,
        }


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts and sums that the metrics of a pass, or of a part of it, are made of."""

    losses: tuple[float, ...] = ()
    sums: Mapping[str, float] = field(default_factory=dict)
    """Metrics that add up, by their whole names."""
    gaps: tuple[Gap, ...] = ()
    custom: tuple[Mapping[str, float], ...] = ()
    """What a custom loss says of each datum."""
    routers: RouterCounts | None = None

    def metrics(self) -> dict[str, float]:
        return {
            "loss:sum": fsum(self.losses),
            **self.sums,
            **gap_summary(self.gaps),
            **(self.routers.metrics() if self.routers is not None else {}),
            **reduce_metrics(self.custom),
        }


def join(parts: Sequence[Tally]) -> Tally:
    """The tally of the whole."""
    names = dict.fromkeys(name for part in parts for name in part.sums)
    routers = [part.routers for part in parts if part.routers is not None]
    return Tally(
        losses=tuple(loss for part in parts for loss in part.losses),
        sums={name: fsum([part.sums.get(name, 0.0) for part in parts]) for name in names},
        gaps=tuple(gap for part in parts for gap in part.gaps),
        custom=tuple(metrics for part in parts for metrics in part.custom),
        routers=RouterCounts(
            np.sum([counts.tokens_LE for counts in routers], axis=0),
            tuple(value for counts in routers for value in counts.entropies),
            sum(counts.num_routed for counts in routers),
            sum(counts.num_replayed for counts in routers),
            sum(counts.num_changed for counts in routers),
        )
        if routers
        else None,
    )


def fsum(values: Sequence[float]) -> float:
    """The sum, rounded once. What is infinite stays so, where `math.fsum` would raise."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def gap_summary(gaps: Sequence[Gap]) -> dict[str, float]:
    """Trainer against sampler, over the tokens that a sampler produced."""
    count = sum(gap.num_tokens for gap in gaps)
    if not count:
        return {}
    return {
        "sampler_gap_mean:mean": fsum([gap.sum_abs for gap in gaps]) / count,
        "sampler_gap_max:max": max(gap.max_abs for gap in gaps),
        "sampler_gap_k3:mean": fsum([gap.sum_k3 for gap in gaps]) / count,
    }


def reduce_metrics(per_datum: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of the datums of one request: `:sum` adds, `:mean` averages."""
    names = per_datum[0].keys() if per_datum else ()
    sums = {name: math.fsum(float(metrics[name]) for metrics in per_datum) for name in names}
    return {k: v / len(per_datum) if k.endswith(":mean") else v for k, v in sums.items()}
