"""What a named loss makes of a datum: checked tensors in, values per target out.

The declarations are `contract.losses`, the formulas `formulas`. A loss sees the trainer's logprobs
and the datum's inputs in one shape, never logits, models or packing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tinkex.contract.losses import Loss, check_inputs
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.routing import ExpertCounts
from tinkex.engine import routed_experts
from tinkex.engine.arrays import dense, form_of
from tinkex.engine.jobs import Array, CsrArray, TracedLoss, TrainDatum
from tinkex.engine.metrics import Gap
from tinkex.engine.train.formulas import FORMULAS, Settings, sampled
from tinkex.errors import InvalidInputError

Inputs = Mapping[str, Tensor]


def loss_values(loss: Loss, logp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The loss of each target; `weights` multiply every loss that has no other use for them."""
    values = FORMULAS[loss.name].values(logp, inputs, settings)
    if "weights" in inputs and not loss.weighs_itself:
        values = values * inputs["weights"]
    return values


GAP_INPUTS = frozenset({"logprobs", "advantages"})
"""What `gap_metrics` reads of a datum."""


def gap_metrics(logp: Tensor, inputs: Inputs) -> Gap | None:
    """Compare with the datum's `logprobs`, where a sampler produced the token."""
    if logp.ndim != 1 or "logprobs" not in inputs:
        return None
    gap = (logp - inputs["logprobs"])[sampled(inputs)].double()
    if gap.numel() == 0:
        return None
    k3 = gap.exp() - gap - 1
    return Gap(float(gap.abs().sum()), float(gap.abs().max()), float(k3.sum()), gap.numel())


# ---------------------------------------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked datum: its tokens, its targets and its float inputs in the shape of the targets."""

    tokens_T: Tensor
    targets: Tensor
    """[T], or [T, K] for several candidates per position."""
    inputs: Mapping[str, Tensor]
    active_T: Tensor
    """False where no gradient can arise, whatever the model says."""
    experts_TLk: Tensor | None = None
    """The experts of each token in the layers that have any, int16; -1: the router chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What of a model decides whether a datum fits it."""

    vocab_size: int
    max_length: int
    experts: ExpertCounts | None = None


def prepare(datum: TrainDatum, loss: Loss | None, *, path: str, limits: Limits) -> Prepared:
    """Check one datum against its loss and the model, and turn it into tensors.

    None is a custom loss: its inputs have names and shapes of their own, see `prepare_custom`.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    tokens_T = _check_tokens(datum.tokens, f"{path}.model_input", limits.vocab_size)
    if not 1 <= len(tokens_T) <= limits.max_length:
        raise InvalidInputError(
            f"has {len(tokens_T)} tokens; the model takes 1 to {limits.max_length}",
            path=f"{path}.model_input",
        )
    fields = f"{path}.loss_fn_inputs"
    experts_TLk = _check_experts(datum, limits.experts, f"{fields}.{ROUTED_EXPERTS}")
    forms = {name: form_of(value) for name, value in datum.inputs.items()}
    check_inputs(loss, forms, num_tokens=len(tokens_T), path=fields)
    where = f"{fields}.target_tokens"
    targets = _check_tokens(dense(datum.inputs["target_tokens"], where), where, limits.vocab_size)
    if loss is None:
        active_T = torch.ones(len(targets), dtype=torch.bool)
        return Prepared(tokens_T, targets, {}, active_T, experts_TLk)
    floats = {
        name: _check_floats(value, targets.shape, f"{fields}.{name}", name == "logprobs")
        for name, value in datum.inputs.items()
        if name != "target_tokens"
    }
    return Prepared(tokens_T, targets, floats, _active_rows(loss, targets, floats), experts_TLk)


def prepare_custom(datum: TrainDatum, custom: TracedLoss, *, path: str, limits: Limits) -> Prepared:
    """Like `prepare` for a traced loss, whose inputs have names and shapes of their own."""
    checked = prepare(datum, None, path=path, limits=limits)
    rank = dict(custom.inputs).get("logprobs", 1)
    if checked.targets.ndim > max(rank, 1):
        raise InvalidInputError(
            f"must be {rank}-D, got shape {list(checked.targets.shape)}",
            path=f"{path}.loss_fn_inputs.target_tokens",
        )
    inputs: dict[str, Tensor] = {}
    for name in (name for name, _ in custom.inputs if name != "logprobs"):
        where = f"{path}.loss_fn_inputs.{name}"
        if name not in datum.inputs:
            raise InvalidInputError("is an input of the custom loss and is missing", path=where)
        inputs[name] = _any_tensor(dense(datum.inputs[name], where), where)
    return replace(checked, inputs=inputs)


def _check_experts(datum: TrainDatum, experts: ExpertCounts | None, path: str) -> Tensor | None:
    if datum.routed_experts is None:
        return None
    known = routed_experts.require(experts, "this model", path)
    chosen_TLk = routed_experts.unpack(datum.routed_experts, known, len(datum.tokens), path)
    return torch.from_numpy(chosen_TLk.copy())


def _any_tensor(value: Array, path: str) -> Tensor:
    if np.issubdtype(value.dtype, np.integer):
        return torch.from_numpy(np.array(value, dtype=np.int64))
    if not np.isfinite(value).all():
        raise InvalidInputError("holds a value that is not finite", path=path)
    return torch.from_numpy(np.array(value, dtype=np.float32))


def _active_rows(loss: Loss, targets: Tensor, inputs: Inputs) -> Tensor:
    active = torch.ones(targets.shape, dtype=torch.bool)
    for gate in loss.gates:
        if gate.name in inputs:
            active &= inputs[gate.name] != 0
    return active if active.ndim == 1 else active.any(dim=1)


def _check_tokens(tokens: Array, path: str, vocab_size: int) -> Tensor:
    if not np.issubdtype(np.asarray(tokens).dtype, np.integer):
        raise InvalidInputError(f"must be integers, got {np.asarray(tokens).dtype}", path=path)
    ids = np.ascontiguousarray(tokens, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = int(ids.max() if ids.min() >= 0 else ids.min())
        raise InvalidInputError(
            f"token {bad} is outside the vocabulary 0..{vocab_size - 1}", path=path
        )
    return torch.from_numpy(ids.copy())


def _check_floats(
    value: Array | CsrArray, shape: torch.Size, path: str, is_logprob: bool
) -> Tensor:
    # An absent cell of sparse logprobs is a candidate of probability zero.
    dense_ = dense(value, path, pad=-math.inf if is_logprob and len(shape) == 2 else 0.0)
    floats = torch.from_numpy(np.array(dense_, dtype=np.float32))
    allowed = torch.isfinite(floats)
    if is_logprob and len(shape) == 2:
        allowed |= floats == -math.inf
    if not bool(allowed.all()):
        where = int((~allowed).flatten().nonzero()[0])
        raise InvalidInputError(
            f"value {float(floats.flatten()[where])} at position {where} is not finite", path=path
        )
    return floats
