"""What a loss function of the user's own returned: (scalar tensor, metrics), or a clear refusal."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor


def check_answer(answer: Any, name: str) -> tuple[Tensor, dict[str, float]]:
    """Refuse what cannot be trained on; `name` is the function's."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        size = f" of length {len(answer)}" if isinstance(answer, tuple | list) else ""
        raise InvalidInputError(
            f"{name} must return (loss, metrics), got {type(answer).__name__}{size}. "
            "Return (loss, {}) when there are no metrics."
        )
    loss, metrics = answer
    _check_scalar(loss, f"the loss of {name}")
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(f"the metrics of {name} must be a dict, got {metrics!r:.80}.")
    for key in metrics:
        if not isinstance(key, str):
            raise InvalidInputError(f"metric names of {name} must be strings, got {key!r}.")
    return loss, {key: _number(value, key, name) for key, value in metrics.items()}


def _check_scalar(value: Any, what: str) -> None:
    """Refuse what is not one finite floating point number attached to an autograd graph."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"{what} must be a torch tensor, got {type(value).__name__}.")
    if value.dim() != 0:
        raise InvalidInputError(
            f"{what} must be a scalar, got shape {tuple(value.shape)}. Reduce it with .sum()."
        )
    if not value.is_floating_point():
        raise InvalidInputError(f"{what} must be floating point, got {value.dtype}.")
    if not torch.isfinite(value):
        raise InvalidInputError(
            f"{what} is {value.item()}. Look for the log of zero or an overflow in exp."
        )
    if not value.requires_grad:
        raise InvalidInputError(
            f"{what} is detached: it has no gradient with respect to the logprobs. Compute it from "
            "them with torch, without .detach(), .item() or numpy."
        )


def _number(value: Any, key: str, name: str) -> float:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        value = value.detach() if hasattr(value, "detach") else value
        if math.prod(tuple(value.shape)) == 1:
            value = value.item()
    if not isinstance(value, numbers.Real):
        raise InvalidInputError(f"metric {key!r} of {name} must be one number, got {value!r:.80}.")
    return float(value)
