"""What the toy engine accepts as training data, checked before anything changes.

Knows shapes, names and ranges; the formulas are in `toy_losses`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.engine import jobs
from tinkex.engine.toy.losses import LOSSES
from tinkex.errors import InvalidInputError, NotSupportedError

Prepared = tuple[NDArray[np.int64], dict[str, NDArray[Any]]]


def check_tokens(
    tokens: NDArray[np.int64], path: str, vocab_size: int, max_length: int | None = None
) -> None:
    """Refuse no tokens, too many, or ids outside the vocabulary."""
    if len(tokens) == 0:
        raise InvalidInputError("must hold at least one token", path=path)
    if max_length is not None and len(tokens) > max_length:
        raise InvalidInputError(
            f"{len(tokens)} tokens exceed the context of {max_length}", path=path
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise InvalidInputError(
            f"token {bad} is outside the vocabulary 0..{vocab_size - 1}", path=path
        )


def prepare(job: jobs.TrainJob, index: int, vocab_size: int, max_length: int) -> Prepared:
    """(targets, other inputs) of one datum, dense."""
    datum, where = job.data[index], f"data[{index}]"
    check_tokens(datum.tokens, f"{where}.model_input", vocab_size, max_length)
    fields = f"{where}.loss_fn_inputs"
    _check_names(job, datum, fields)
    targets = _dense(datum.inputs["target_tokens"]).astype(np.int64)
    check_tokens(targets.reshape(-1), f"{fields}.target_tokens", vocab_size)
    if len(targets) != len(datum.tokens):
        raise InvalidInputError(
            f"has {len(targets)} rows for {len(datum.tokens)} model input tokens; one each is "
            "needed",
            path=f"{fields}.target_tokens",
        )
    inputs = {}
    for name, value in datum.inputs.items():
        if name != "target_tokens":
            soft_logprob = name == "logprobs" and targets.ndim == 2
            inputs[name] = _dense(value, pad=-np.inf if soft_logprob else 0.0)
            if job.loss_fn != "custom":
                _check_floats(inputs[name], targets.shape, f"{fields}.{name}", soft_logprob)
    return targets, inputs


def _check_names(job: jobs.TrainJob, datum: jobs.TrainDatum, path: str) -> None:
    needed: tuple[str, ...] = ("target_tokens",)
    allowed = set(datum.inputs)
    if job.loss_fn == "custom":
        if job.custom_loss is None:
            raise InvalidInputError("loss 'custom' came without its graph", path="loss_fn")
        needed += tuple(name for name, _ in job.custom_loss.inputs if name != "logprobs")
    elif (loss := LOSSES.get(job.loss_fn)) is None:
        raise NotSupportedError(
            f"no loss {job.loss_fn!r}; supported: {', '.join(sorted(LOSSES))}, custom",
            path="loss_fn",
        )
    else:
        needed += loss.needs
        allowed = {*needed, *loss.takes}
    if missing := [name for name in needed if name not in datum.inputs]:
        raise InvalidInputError(
            f"lacks {', '.join(missing)}; given: {', '.join(sorted(datum.inputs)) or 'nothing'}",
            path=path,
        )
    if unknown := sorted(set(datum.inputs) - allowed):
        raise InvalidInputError(
            f"loss {job.loss_fn!r} has no use for {', '.join(unknown)}; leave it out", path=path
        )


def _check_floats(
    value: NDArray[Any], shape: tuple[int, ...], path: str, may_be_empty: bool
) -> None:
    if value.shape != shape:
        raise InvalidInputError(f"has shape {value.shape}, target_tokens has {shape}", path=path)
    good = np.isfinite(value) | (may_be_empty & (value == -np.inf))
    if not good.all():
        raise InvalidInputError("holds a value that is not finite", path=path)


def _dense(value: jobs.Array | jobs.CsrArray, pad: float = 0.0) -> NDArray[Any]:
    """A CSR array as a dense one; integers are padded with 0."""
    if not isinstance(value, jobs.CsrArray):
        return np.asarray(value)
    is_int = np.issubdtype(value.values.dtype, np.integer)
    out = np.full(value.shape, 0 if is_int else pad, dtype=value.values.dtype)
    rows = np.repeat(np.arange(value.shape[0]), np.diff(value.crow_indices))
    out[rows, value.col_indices] = value.values
    return out
