"""Metrics of a training pass, as both engines report them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """How far trainer and sampler disagree over some tokens; gap = logp - q."""

    sum_abs: float
    max_abs: float
    sum_k3: float
    """k3 estimates KL(sampler || trainer) without bias and is never negative."""
    num_tokens: int


def gap_summary(gaps: Sequence[Gap]) -> dict[str, float]:
    """Trainer against sampler, over the tokens that a sampler produced."""
    count = sum(gap.num_tokens for gap in gaps)
    if not count:
        return {}
    return {
        "sampler_gap_mean:mean": sum(gap.sum_abs for gap in gaps) / count,
        "sampler_gap_max:max": max(gap.max_abs for gap in gaps),
        "sampler_gap_k3:mean": sum(gap.sum_k3 for gap in gaps) / count,
    }


def reduce_metrics(per_datum: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of the datums of one request: `:sum` adds, `:mean` averages."""
    names = per_datum[0].keys() if per_datum else ()
    sums = {name: math.fsum(float(metrics[name]) for metrics in per_datum) for name in names}
    return {k: v / len(per_datum) if k.endswith(":mean") else v for k, v in sums.items()}
