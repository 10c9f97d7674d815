"""What an engine accepts as training data, checked before anything changes.

Names, types and shapes are those that `contract.losses` declares; what depends on the model is in
`Limits`. Numpy only: the toy, which has no torch, refuses what the real engine refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.losses import CUSTOM, Loss, check_inputs, find_loss
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.routing import ExpertCounts
from tinkex.engine.jobs import Array, CsrArray, TracedLoss, TrainDatum, TrainJob
from tinkex.engine.numerics import routed_experts
from tinkex.engine.numerics.arrays import check_dense_bytes, dense, form_of, sparse_inputs
from tinkex.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The sizes of a model that decide whether a datum fits it."""

    vocab_size: int
    max_length: int
    experts: ExpertCounts | None = None


@dataclass(frozen=True, slots=True)
class DatumArrays:
    """Copies that are the engine's own, dense."""

    tokens_T: NDArray[np.int64]
    targets: NDArray[np.int64]
    """[T], or [T, K] for several candidates per position."""
    inputs: Mapping[str, Array]
    """float32 in the shape of the targets; of a custom loss, int64 too, in shapes of their own."""
    experts_TLk: NDArray[np.int16] | None
    """The experts of each token in the layers that have any; -1: the router chooses."""


def loss_of(job: TrainJob) -> Loss | TracedLoss:
    """The loss of a job, declared or traced, by which its data are checked and computed."""
    if not job.data:
        raise InvalidInputError("must hold at least one datum", path="data")
    # A part of a job was judged with the whole, which has more tokens.
    if not job.shards and (sparse := sparse_inputs(job.data)):
        check_dense_bytes(sparse, [len(datum.tokens) for datum in job.data])
    if job.loss_fn != CUSTOM:
        return find_loss(job.loss_fn)
    if job.custom_loss is None:
        raise InvalidInputError("loss 'custom' came without its graph", path="loss_fn")
    return job.custom_loss


def read_datum(
    datum: TrainDatum, loss: Loss | TracedLoss, *, path: str, limits: Limits
) -> DatumArrays:
    """Read a datum as arrays, checked against its loss and the model.

    A server has judged the same before. But an engine works without one too; a server does not know
    the vocabulary and the context while a busy engine has not told it; and one token outside of the
    vocabulary ends the process of a CUDA device, for everybody on it.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    tokens_T = _read_tokens(datum.tokens, f"{path}.model_input", limits.vocab_size)
    if not 1 <= len(tokens_T) <= limits.max_length:
        raise InvalidInputError(
            f"has {len(tokens_T)} tokens; the model takes 1 to {limits.max_length}",
            path=f"{path}.model_input",
        )
    fields = f"{path}.loss_fn_inputs"
    experts_TLk = _read_experts(datum, limits.experts, f"{fields}.{ROUTED_EXPERTS}")
    forms = {name: form_of(value) for name, value in datum.inputs.items()}
    declared = loss if isinstance(loss, Loss) else None
    check_inputs(declared, forms, num_tokens=len(tokens_T), path=fields)
    where = f"{fields}.target_tokens"
    targets = _read_tokens(dense(datum.inputs["target_tokens"], where), where, limits.vocab_size)
    if isinstance(loss, TracedLoss):
        inputs = _read_custom(datum, loss, targets, fields)
    else:
        inputs = {
            name: _read_floats(value, targets.ndim, f"{fields}.{name}", name == "logprobs")
            for name, value in datum.inputs.items()
            if name != "target_tokens"
        }
    return DatumArrays(tokens_T, targets, inputs, experts_TLk)


def _read_tokens(tokens: Array, path: str, vocab_size: int) -> NDArray[np.int64]:
    given = np.asarray(tokens)
    if given.dtype.kind not in "iu":
        raise InvalidInputError(f"must be integers, got {given.dtype}", path=path)
    ids = given.astype(np.int64)
    # Without its sign a negative id is larger than any vocabulary: one look at them finds both.
    if ids.size and ids.view(np.uint64).max() >= vocab_size:
        bad = int(ids.max() if ids.min() >= 0 else ids.min())
        raise InvalidInputError(
            f"token {bad} is outside the vocabulary 0..{vocab_size - 1}", path=path
        )
    return ids


def _read_experts(
    datum: TrainDatum, experts: ExpertCounts | None, path: str
) -> NDArray[np.int16] | None:
    if datum.routed_experts is None:
        return None
    known = routed_experts.require(experts, "this model", path)
    return routed_experts.unpack(datum.routed_experts, known, len(datum.tokens), path).copy()


def _read_custom(
    datum: TrainDatum, custom: TracedLoss, targets: NDArray[np.int64], path: str
) -> dict[str, Array]:
    rank = dict(custom.inputs).get("logprobs", 1)
    if targets.ndim > max(rank, 1):
        raise InvalidInputError(
            f"must be {rank}-D, got shape {list(targets.shape)}", path=f"{path}.target_tokens"
        )
    inputs: dict[str, Array] = {}
    for name in (name for name, _ in custom.inputs if name != "logprobs"):
        where = f"{path}.{name}"
        if name not in datum.inputs:
            raise InvalidInputError("is an input of the custom loss and is missing", path=where)
        value = dense(datum.inputs[name], where)
        if not np.isfinite(value).all():
            raise InvalidInputError("holds a value that is not finite", path=where)
        is_whole = np.issubdtype(value.dtype, np.integer)
        inputs[name] = np.array(value, dtype=np.int64 if is_whole else np.float32)
    return inputs


def _read_floats(
    value: Array | CsrArray, num_dims: int, path: str, is_logprob: bool
) -> NDArray[np.float32]:
    # An absent cell of sparse logprobs is a candidate of probability zero.
    may_be_empty = is_logprob and num_dims == 2
    floats = np.array(dense(value, path, pad=-np.inf if may_be_empty else 0.0), dtype=np.float32)
    allowed = np.isfinite(floats)
    if may_be_empty:
        allowed |= floats == -np.inf
    if not allowed.all():
        where = int(np.flatnonzero(~allowed)[0])
        raise InvalidInputError(
            f"value {float(floats.flat[where])} at position {where} is not finite", path=path
        )
    return floats
