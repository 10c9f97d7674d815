"""Penalties on the size of logprobs: L1, L2 and their mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinkex.regularizers.penalty import (
    Logprobs,
    Metrics,
    Penalty,
    Reduction,
    as_tensors,
    check_range,
    flatten,
    reduce,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class L1(Penalty):
    """sum_i |x_i| over every logprob x of the batch, or their mean.

    Logprobs are not positive, so this is minus their sum: it pulls every probability up.
    """

    reduction: Reduction = "sum"

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        x = flatten(as_tensors(logprobs))
        sizes = x.abs()
        return reduce(sizes, self.reduction), {"mean_abs": float(sizes.detach().mean())}


@dataclass(frozen=True, kw_only=True)
class L2(Penalty):
    """sum_i clip(x_i - c, -k, k)^2 over every logprob x of the batch, or their mean.

    c is 0, a number, or the batch mean (`center="mean"`, which makes the mean of squares the
    variance). Past the clip k the penalty is flat and its gradient zero: no outlier is chased.
    """

    reduction: Reduction = "sum"
    clip: float | None = None
    center: Literal["mean"] | float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            check_range("clip", self.clip, 0.0)
        if self.center is not None and self.center != "mean":
            check_range("center", self.center, -float("inf"))

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        x = flatten(as_tensors(logprobs))
        center = x.mean() if self.center == "mean" else (self.center or 0.0)
        shifted = x - center
        kept = shifted if self.clip is None else shifted.clamp(-self.clip, self.clip)
        metrics = {"rms": float(shifted.detach().square().mean().sqrt())}
        if self.clip is not None:
            metrics["clipped_fraction"] = float((shifted.abs() > self.clip).float().mean())
        return reduce(kept.square(), self.reduction), metrics


@dataclass(frozen=True, kw_only=True)
class ElasticNet(Penalty):
    """r * sum_i |x_i| + (1 - r) * sum_i x_i^2 with r = l1_ratio, or the same with means."""

    l1_ratio: float = 0.5
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        check_range("l1_ratio", self.l1_ratio, 0.0, 1.0)
        super().__post_init__()

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        x = flatten(as_tensors(logprobs))
        l1, l2 = reduce(x.abs(), self.reduction), reduce(x.square(), self.reduction)
        value = self.l1_ratio * l1 + (1.0 - self.l1_ratio) * l2
        return value, {"l1": float(l1.detach()), "l2": float(l2.detach())}
