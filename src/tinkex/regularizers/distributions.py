"""Penalties that compare probabilities: entropy, divergence from a reference, consistency.

Entropy and KL are properties of a whole distribution. A 2-D tensor gives one per row (position).
A 1-D tensor has one logprob per position, each from another distribution: the plain sum over
them, the default `form="raw"`, is a number one can optimise but not the entropy or divergence of
the model. The penalty says so, once in the log and always in its metrics (`mass` is the sum of the
probabilities, 1 for a distribution), and offers `form="per_token"`, defined token by token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinkex.errors import InvalidInputError
from tinkex.regularizers.penalty import (
    Logprobs,
    Metrics,
    Penalty,
    Reduction,
    Reference,
    as_tensors,
    check_range,
    flatten,
    reduce,
    resolve,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("tinkex.regularizers")

Form = Literal["raw", "per_token"]
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Entropy(Penalty):
    """H = -sum_i p_i log p_i; `minimize` penalises H, `maximize` penalises -H.

    At temperature 1, p = exp(x) as given. At another temperature T the probabilities are sharpened
    or flattened and normalised again: p = softmax(x / T). `normalize` divides by log n, the largest
    entropy of n outcomes.

    `form="per_token"`, for one logprob per position: the entropy of "this token or another one",
    -(p log p + (1 - p) log(1 - p)), per position; a lower bound of the entropy of that position's
    distribution. Temperature and normalize (by log 2) act on the two outcomes.
    """

    mode: Literal["minimize", "maximize"] = "maximize"
    temperature: float = 1.0
    normalize: bool = False
    reduction: Reduction = "sum"
    form: Form = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, 0.0)
        if self.temperature == 0:
            raise InvalidInputError("must be above 0, got 0.", path="temperature")

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        rows = _rows(as_tensors(logprobs), self)
        entropy = _stack(self._row_entropy(row) for row in rows)
        value = reduce(entropy, self.reduction)
        metrics = {"entropy": float(entropy.detach().mean()), "mass": _mass(rows)}
        return (value if self.mode == "minimize" else -value), metrics

    def _row_entropy(self, row_RV: Tensor) -> Tensor:
        """Entropy of each row of outcomes."""
        import torch

        scaled = row_RV
        if self.temperature != 1.0:
            scaled = torch.log_softmax(row_RV / self.temperature, dim=-1)
        entropy = -(scaled.exp() * scaled).sum(-1)
        outcomes = row_RV.shape[-1]
        return entropy / math.log(outcomes) if self.normalize and outcomes > 1 else entropy


@dataclass(frozen=True, kw_only=True)
class KLDivergence(Penalty):
    """How far the model p = exp(x) is from a reference q = exp(y).

    forward:    sum_i p_i (x_i - y_i), that is KL(p || q)
    reverse:    sum_i q_i (y_i - x_i), that is KL(q || p)
    symmetric:  the mean of both

    `form="per_token"`, for one logprob per position: with d = y - x, forward exp(d) - d - 1 (the
    k3 estimate for tokens the model sampled), reverse exp(-d) + d - 1 (for tokens the reference
    sampled). Never negative, zero only where both agree.

    `reference` is a tensor, a list of them, the name of a loss_fn_inputs field, or a function of
    (data, logprobs). It takes no gradient.
    """

    direction: Literal["forward", "reverse", "symmetric"] = "forward"
    reference: Reference = None
    reduction: Reduction = "sum"
    form: Form = "raw"

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        tensors = as_tensors(logprobs)
        others = resolve(self.reference, data, tensors, path="reference")
        forward, reverse = self._both(tensors, others)
        value = {
            "forward": forward,
            "reverse": reverse,
            "symmetric": (forward + reverse) / 2,
        }[self.direction]
        gap = flatten(tensors).detach() - flatten(others)
        metrics = {
            "forward": float(forward.detach()),
            "reverse": float(reverse.detach()),
            "mean_gap": float(gap.mean()),
        }
        return value, metrics

    def _both(self, tensors: list[Tensor], others: list[Tensor]) -> tuple[Tensor, Tensor]:
        if self.form == "per_token":
            d = flatten(others) - flatten(tensors)
            return reduce(d.exp() - d - 1, self.reduction), reduce(
                (-d).exp() + d - 1, self.reduction
            )
        pairs = list(zip(_rows(tensors, self), _rows(others, None), strict=True))
        forward = _stack((x.exp() * (x - y)).sum(-1) for x, y in pairs)
        reverse = _stack((y.exp() * (y - x)).sum(-1) for x, y in pairs)
        return reduce(forward, self.reduction), reduce(reverse, self.reduction)


@dataclass(frozen=True, kw_only=True)
class Consistency(Penalty):
    """How far the logprobs x of each datum are from those y of a paired view of it.

    mse:     (x - y)^2 per value
    l1:      |x - y| per value
    cosine:  1 - x.y / (|x| |y|) per row: a 1-D tensor is one row
    kl:      the symmetric k3 estimate (exp(y-x) + exp(x-y)) / 2 - 1 per value

    Reduced over values or rows of the batch by mean or sum. `paired` is where y comes from: the
    name of a loss_fn_inputs field, tensors, or a function of (data, logprobs). y takes no gradient.
    """

    metric: Literal["mse", "l1", "cosine", "kl"] = "mse"
    paired: Reference = "paired_logprobs"
    reduction: Reduction = "mean"

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        tensors = as_tensors(logprobs)
        others = resolve(self.paired, data, tensors, path="paired")
        gap = flatten(tensors) - flatten(others)
        if self.metric == "cosine":
            distances = _stack(_cosine_distance(x, y) for x, y in zip(tensors, others, strict=True))
        elif self.metric == "kl":
            distances = (gap.exp() + (-gap).exp()) / 2 - 1
        else:
            distances = gap.square() if self.metric == "mse" else gap.abs()
        metrics = {"mean_abs_gap": float(gap.detach().abs().mean())}
        return reduce(distances, self.reduction), metrics


def _cosine_distance(x: Tensor, y: Tensor) -> Tensor:
    import torch

    return 1.0 - torch.nn.functional.cosine_similarity(x, y, dim=-1).reshape(-1)


# --------------------------------------------------------------------------------- rows of outcomes


def _rows(tensors: list[Tensor], penalty: Any) -> list[Tensor]:
    """Each datum as rows of outcomes [R, V]. For `per_token`, rows of (token, any other)."""
    import torch

    if penalty is not None and penalty.form == "per_token":
        # log(1 - p), kept away from p = 1 where it has no value.
        other = [torch.log(-torch.expm1(t.clamp(max=-1e-6))) for t in tensors]
        return [torch.stack([t, o], -1).reshape(-1, 2) for t, o in zip(tensors, other, strict=True)]
    if penalty is not None and any(t.dim() == 1 for t in tensors):
        _tell_once(penalty, _mass([t.reshape(1, -1) for t in tensors]))
    return [t.reshape(1, -1) if t.dim() == 1 else t for t in tensors]


def _mass(rows: list[Tensor]) -> float:
    """Mean over rows of the sum of their probabilities; 1 says that rows are distributions."""
    return float(_stack(row.detach().exp().sum(-1) for row in rows).mean())


def _stack(parts: Any) -> Tensor:
    import torch

    return torch.cat([part.reshape(-1) for part in parts])


def _tell_once(penalty: Penalty, mass: float) -> None:
    kind = type(penalty).__name__
    if kind in _told or abs(mass - 1.0) < 1e-3:
        return
    _told.add(kind)
    logger.warning(
        "%s got one logprob per position (their probabilities sum to %.3g, not 1), so its raw form "
        "is not a property of the model's distribution. form='per_token' is.",
        kind,
        mass,
    )
