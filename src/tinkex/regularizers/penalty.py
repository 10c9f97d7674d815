"""What all penalties share: reading logprobs and references, and reducing rows to one number.

A penalty is a frozen value that is called like any regularizer function, `penalty(data, logprobs)
-> (scalar tensor, metrics)`. `logprobs` is one tensor or a list of them, one per datum: 1-D holds
one logprob per position, 2-D one row of logprobs per position. This module knows neither weights
nor the sum they enter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

Logprobs = Any
"""A tensor, or a sequence of tensors, one per datum."""
Reference = Any
"""A tensor, a list of tensors, the name of a loss_fn_inputs field, or `fn(data, logprobs)`."""
Metrics = dict[str, float]
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Base of the penalties. Subclasses compute; this names and checks."""

    @property
    def name(self) -> str:
        """`KLDivergence` -> `kl_divergence`: the name when a RegularizerSpec gives none."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__)
        return words.lower()

    def __post_init__(self) -> None:
        """Refuse a choice that the type of its field does not name."""
        for field, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                _check_choice(field, getattr(self, field), get_args(kind))

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, Metrics]:
        """Return the penalty as a scalar with its graph, and metrics for people to read."""
        raise NotImplementedError


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidInputError(f"expected one of {', '.join(allowed)}, got {value!r}.", path=name)


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse what is not a number in [low, high]; NaN never is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidInputError(f"expected a number in [{low}, {high}], got {value!r}.", path=name)


def as_tensors(logprobs: Logprobs, path: str = "logprobs") -> list[Tensor]:
    """The tensor of each datum, checked: floating point, 1-D or 2-D, not empty, finite."""
    import torch

    tensors = [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)
    if not tensors:
        raise InvalidInputError("got no tensors.", path=path)
    for index, tensor in enumerate(tensors):
        where = f"{path}[{index}]"
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise InvalidInputError(f"expected a floating point tensor, got {kind}.", path=where)
        if tensor.dim() not in (1, 2) or tensor.numel() == 0:
            raise InvalidInputError(
                f"expected a non-empty 1-D or 2-D tensor, got shape {tuple(tensor.shape)}.",
                path=where,
            )
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InvalidInputError(f"{bad} of {tensor.numel()} values are not finite.", path=where)
    return tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All values of the batch as one vector."""
    import torch

    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def reduce(values: Tensor, how: Reduction) -> Tensor:
    return values.mean() if how == "mean" else values.sum()


def resolve(
    reference: Reference,
    data: Sequence[Any],
    tensors: Sequence[Tensor],
    *,
    path: str,
) -> list[Tensor]:
    """The reference as one tensor per datum, shaped and typed like the logprobs.

    A reference has no gradient: it is what the model is measured against.
    """
    import torch

    if reference is None:
        raise InvalidInputError(
            "is missing. Give a tensor, a list of tensors, the name of a loss_fn_inputs field, or "
            "a function of (data, logprobs).",
            path=path,
        )
    if isinstance(reference, str):
        value: Any = [_field(datum, reference, index) for index, datum in enumerate(data or ())]
    elif callable(reference) and not isinstance(reference, torch.Tensor):
        with torch.no_grad():
            value = reference(data, [tensor.detach() for tensor in tensors])
    else:
        value = reference
    others = as_tensors(_as_sequence(value), path)
    if len(others) != len(tensors):
        raise InvalidInputError(f"has {len(others)} tensors for {len(tensors)} datums.", path=path)
    return [
        _like(other, tensor, path, i)
        for i, (other, tensor) in enumerate(zip(others, tensors, strict=True))
    ]


def _as_sequence(value: Any) -> Any:
    """A list of numbers is one tensor; a list of lists or tensors is several."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Sequence) and value and isinstance(value[0], int | float):
        return [torch.tensor(value)]
    if isinstance(value, Sequence):
        return [v if isinstance(v, torch.Tensor) else torch.as_tensor(v) for v in value]
    return [torch.as_tensor(value)]


def _field(datum: Any, name: str, index: int) -> Tensor:
    import torch

    inputs: Mapping[str, Any] = getattr(datum, "loss_fn_inputs", datum)
    if name not in inputs:
        raise InvalidInputError(
            f"is missing; the datum has {sorted(inputs)}.",
            path=f"data[{index}].loss_fn_inputs.{name}",
        )
    value = inputs[name]
    return value.to_torch() if hasattr(value, "to_torch") else torch.as_tensor(value)


def _like(other: Tensor, tensor: Tensor, path: str, index: int) -> Tensor:
    if other.shape != tensor.shape:
        raise InvalidInputError(
            f"has shape {tuple(other.shape)}, the logprobs have {tuple(tensor.shape)}.",
            path=f"{path}[{index}]",
        )
    return other.detach().to(dtype=tensor.dtype, device=tensor.device)
