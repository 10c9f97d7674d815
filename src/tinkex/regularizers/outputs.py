"""What a regularized loss came to, term by term. Plain numbers; no tensor outlives the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class BaseLossOutput:
    """The loss before any regularizer."""

    value: float
    grad_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RegularizerOutput:
    """A term: `contribution` = `weight` * `value`. Norms are set when they are tracked."""

    name: str
    value: float
    weight: float
    contribution: float
    grad_norm: float | None = None
    """Norm of the gradient of `value` with respect to the logprobs."""
    grad_norm_weighted: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CustomLossOutput:
    """loss_total = base_loss.value + sum of contributions."""

    loss_total: float
    base_loss: BaseLossOutput
    regularizers: Mapping[str, RegularizerOutput]
    regularizer_total: float
    total_grad_norm: float | None = None

    def flat(self) -> dict[str, float]:
        """Every number by a flat name, ready for a log: `regularizer/l1:sum`, ..."""
        numbers = {
            "base_loss:sum": self.base_loss.value,
            "regularizer_total:sum": self.regularizer_total,
            **{f"base/{key}": value for key, value in self.base_loss.metrics.items()},
        }
        if self.total_grad_norm is not None:
            numbers["grad_norm/total:mean"] = self.total_grad_norm
        if self.base_loss.grad_norm is not None:
            numbers["grad_norm/base:mean"] = self.base_loss.grad_norm
        for name, term in self.regularizers.items():
            numbers[f"regularizer/{name}:sum"] = term.value
            numbers[f"contribution/{name}:sum"] = term.contribution
            if term.grad_norm is not None:
                numbers[f"grad_norm/{name}:mean"] = term.grad_norm
            numbers |= {f"regularizer/{name}/{key}": v for key, v in term.metrics.items()}
        return numbers
