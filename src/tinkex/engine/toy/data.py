"""What the toy engine accepts as training data, checked before anything changes.

Names, types and shapes are those that `contract.losses` declares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.losses import CUSTOM, Loss, check_inputs, find_loss
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.engine import jobs, routed_experts
from tinkex.engine.arrays import dense, form_of
from tinkex.errors import InvalidInputError

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
    if datum.routed_experts is not None:
        routed_experts.require(None, "the toy", f"{fields}.{ROUTED_EXPERTS}")
    loss = _loss_of(job, datum, fields)
    forms = {name: form_of(value) for name, value in datum.inputs.items()}
    check_inputs(loss, forms, num_tokens=len(datum.tokens), path=fields)
    targets = dense(datum.inputs["target_tokens"], f"{fields}.target_tokens").astype(np.int64)
    check_tokens(targets.reshape(-1), f"{fields}.target_tokens", vocab_size)
    inputs = {}
    for name, value in datum.inputs.items():
        if name != "target_tokens":
            soft_logprob = name == "logprobs" and targets.ndim == 2
            pad = -np.inf if soft_logprob else 0.0
            inputs[name] = dense(value, f"{fields}.{name}", pad=pad)
            if loss is not None:
                _check_floats(inputs[name], f"{fields}.{name}", soft_logprob)
    return targets, inputs


def _loss_of(job: jobs.TrainJob, datum: jobs.TrainDatum, path: str) -> Loss | None:
    """The declaration; None for a custom loss whose inputs are all there."""
    if job.loss_fn != CUSTOM:
        return find_loss(job.loss_fn)
    if job.custom_loss is None:
        raise InvalidInputError("loss 'custom' came without its graph", path="loss_fn")
    for name, _ in job.custom_loss.inputs:
        if name != "logprobs" and name not in datum.inputs:
            raise InvalidInputError(
                "is an input of the custom loss and is missing", path=f"{path}.{name}"
            )
    return None


def _check_floats(value: NDArray[Any], path: str, may_be_empty: bool) -> None:
    good = np.isfinite(value) | (may_be_empty & (value == -np.inf))
    if not good.all():
        raise InvalidInputError("holds a value that is not finite", path=path)
