"""Penalties on directions and slopes: orthogonality of vectors, norm of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    reduce,
    resolve,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Orthogonality(Penalty):
    """How far the vectors of a matrix M are from orthogonal, by their Gram matrix.

    G = M M^T for `axis="rows"`, M^T M for `axis="columns"`.
    soft:      sum_{i != j} G_ij^2: other vectors at right angles, any length
    hard:      sum_ij (G - I)_ij^2: at right angles and of length one
    spectral:  the largest singular value of G - I: the worst direction only

    M is a 2-D tensor, or equally long 1-D tensors, one per datum, stacked as rows. A single 1-D
    tensor is refused: one vector is orthogonal to nothing. The 2-D tensors of several datums are
    penalised one by one and summed.
    """

    mode: Literal["soft", "hard", "spectral"] = "soft"
    axis: Literal["rows", "columns"] = "rows"

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        import torch

        grams = [m @ m.T if self.axis == "rows" else m.T @ m for m in _matrices(logprobs)]
        value = torch.stack([self._distance(gram) for gram in grams]).sum()
        with torch.no_grad():
            off = torch.cat([(g - torch.diag(torch.diagonal(g))).reshape(-1) for g in grams])
        return value, {"max_off_diagonal": float(off.abs().max())}

    def _distance(self, gram: Tensor) -> Tensor:
        import torch

        if self.mode == "soft":
            return (gram - torch.diag(torch.diagonal(gram))).square().sum()
        rest = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        if self.mode == "hard":
            return rest.square().sum()
        largest: Tensor = torch.linalg.matrix_norm(rest, ord=2)
        return largest


def _matrices(logprobs: Logprobs) -> list[Tensor]:
    import torch

    tensors = as_tensors(logprobs)
    vectors = [t for t in tensors if t.dim() == 1]
    if not vectors:
        return tensors
    lengths = sorted({len(v) for v in vectors})
    if len(vectors) != len(tensors) or len(vectors) < 2 or len(lengths) > 1:
        raise InvalidInputError(
            f"orthogonality needs a 2-D tensor, or two or more 1-D tensors of one length; got "
            f"{len(tensors)} tensors of lengths {lengths}. Cut them to one length first.",
            path="logprobs",
        )
    return [torch.stack(vectors)]


def _total_probability(x: Tensor) -> Tensor:
    return x.exp().sum()


@dataclass(frozen=True, kw_only=True)
class GradientPenalty(Penalty):
    """(|grad f(z)| - target_norm)^2 per datum, with f a scalar function of its logprobs.

    z is the logprobs x, or with `interpolated` the point alpha * x + (1 - alpha) * y between them
    and a reference y. The default f is the total probability sum_i exp(x_i), whose gradient is the
    vector of probabilities. The penalty is differentiated through the gradient, so f needs a second
    derivative that is not zero everywhere: the sum of logprobs, for one, has none and is refused.
    """

    target_norm: float = 1.0
    fn: Callable[[Any], Any] = _total_probability
    interpolated: bool = False
    alpha: float = 0.5
    reference: Reference = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_range("target_norm", self.target_norm, 0.0)
        check_range("alpha", self.alpha, 0.0, 1.0)
        super().__post_init__()
        if not callable(self.fn):
            raise InvalidInputError(f"expected a function, got {self.fn!r}.", path="fn")
        if self.interpolated and self.reference is None:
            raise InvalidInputError("an interpolated penalty needs one.", path="reference")

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        import torch

        points = as_tensors(logprobs)
        if self.interpolated:
            others = resolve(self.reference, data, points, path="reference")
            pairs = zip(points, others, strict=True)
            points = [self.alpha * x + (1.0 - self.alpha) * y for x, y in pairs]
        norms = torch.stack([self._slope(z) for z in points])
        value = reduce((norms - self.target_norm).square(), self.reduction)
        return value, {"mean_norm": float(norms.detach().mean())}

    def _slope(self, point: Tensor) -> Tensor:
        import torch

        z = point if point.requires_grad else point.detach().requires_grad_(True)
        value = self.fn(z)
        if not isinstance(value, torch.Tensor) or value.dim() != 0 or not value.requires_grad:
            raise InvalidInputError(
                "must return a scalar tensor computed from its argument.", path="fn"
            )
        (slope,) = torch.autograd.grad(value, z, create_graph=True)
        if not slope.requires_grad:
            raise InvalidInputError(
                "is linear: its gradient is constant and this penalty could not change it.",
                path="fn",
            )
        norm: Tensor = torch.linalg.vector_norm(slope)
        return norm
