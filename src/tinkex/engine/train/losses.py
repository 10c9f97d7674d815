"""The table of losses: what each needs, which settings it takes, and its value per target.

Every loss is a plain sum over targets; the client normalises. A loss function sees the trainer's
logprobs and the datum's inputs in one shape and returns a value per target of that shape, so a
token-local loss may be evaluated piece by piece. It never sees logits, models or packing. Inputs
or settings that a loss would have to ignore are refused by name.

r = exp(logp - q), where q is the datum's `logprobs`, reported by the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.jobs import Array, CsrArray, CustomLoss, TrainDatum
from tinkex.errors import InvalidInputError, NotSupportedError

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
LossFn = Callable[[Tensor, Inputs, Settings], Tensor]

_CLIPS = ("clip_low_threshold", "clip_high_threshold")


# ------------------------------------------------------------------------------------ the losses


def _cross_entropy(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -x["weights"] * logp


def _importance_sampling(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -_ratio(logp, x) * x["advantages"]


def _ppo(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return _clipped_objective(_ratio(logp, x), x, settings)


def _cispo(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    low, high = _bounds(x, settings)
    scale = torch.clamp(_ratio(logp, x).detach(), low, high)
    return -scale * x["advantages"] * logp


def _dro(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    gap = logp - x["logprobs"]
    return -(logp * x["advantages"] - settings["beta"] / 2 * gap.square())


def _gspo(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    """PPO whose ratio is the geometric mean over the sequence, equal for all its tokens."""
    mask = x["sequence_ratio_mask"] if "sequence_ratio_mask" in x else _sampled(x)
    mask = mask.to(logp.dtype)
    log_ratio = ((logp - x["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    return _clipped_objective(log_ratio.exp().expand_as(logp), x, settings) * mask


def _dppo(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    """Policy gradient, except where the token's probability has already moved too far.

    A token is masked when |p - p_q| exceeds the threshold and its gradient would push it further.
    """
    ratio, advantages = _ratio(logp, x), x["advantages"]
    divergence = (logp.detach().exp() - x["logprobs"].exp()).abs()
    outward = torch.where(advantages > 0, ratio.detach() > 1, ratio.detach() < 1)
    kept = ~(outward & (divergence > settings["divergence_threshold"]))
    return -ratio * advantages * kept


def _kl_divergence(logp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    """2-D: forward KL over the given support. 1-D: the k3 estimate, never negative."""
    q = x["logprobs"]
    if logp.ndim == 2:
        p = q.exp()
        # A support padded with -inf contributes nothing: 0 * log 0 = 0.
        return torch.where(p > 0, p * (torch.where(p > 0, q, 0.0) - logp), 0.0)
    gap = q - logp
    return gap.exp() - gap - 1


def _ratio(logp: Tensor, x: Inputs) -> Tensor:
    return (logp - x["logprobs"]).exp()


def _bounds(x: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Clip limits: per token where the datum carries them, else from the settings."""
    like = x["logprobs"]
    low, high = (x[key] if key in x else torch.full_like(like, settings[key]) for key in _CLIPS)
    return low, high


def _clipped_objective(ratio: Tensor, x: Inputs, settings: Settings) -> Tensor:
    low, high = _bounds(x, settings)
    advantages = x["advantages"]
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, low, high) * advantages)


def _sampled(x: Inputs) -> Tensor:
    """Which tokens a sampler produced: clients fill prompts with logprob 0 and advantage 0."""
    mask = x["logprobs"] != 0
    return mask | (x["advantages"] != 0) if "advantages" in x else mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One row of the table."""

    fn: LossFn
    needs: tuple[str, ...]
    """Inputs besides `target_tokens` that must be there."""
    takes: tuple[str, ...] = ()
    """Inputs that may be there."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """`loss_fn_config` keys with their defaults; others are refused."""
    soft_targets: bool = False
    """True: `target_tokens` may be 2-D, several candidates per position."""
    token_local: bool = True
    """False: a token's value depends on the whole datum."""
    gates: tuple[str, ...] = ("weights",)
    """Inputs whose zero switches a target off: no loss, no gradient."""


_PPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_RL = ("logprobs", "advantages")
_GATES = ("advantages", "weights")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        fn=_cross_entropy, needs=("weights",), takes=("logprobs",), soft_targets=True
    ),
    "importance_sampling": Loss(
        fn=_importance_sampling, needs=_RL, takes=("weights",), gates=_GATES
    ),
    "ppo": Loss(fn=_ppo, needs=_RL, takes=("weights", *_CLIPS), settings=_PPO_CLIP, gates=_GATES),
    "cispo": Loss(
        fn=_cispo,
        needs=_RL,
        takes=("weights", *_CLIPS),
        settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        gates=_GATES,
    ),
    "dro": Loss(fn=_dro, needs=_RL, takes=("weights",), settings={"beta": 0.05}),
    "gspo": Loss(
        fn=_gspo,
        needs=_RL,
        takes=("weights", "sequence_ratio_mask", *_CLIPS),
        settings=_PPO_CLIP,
        token_local=False,
    ),
    "dppo": Loss(
        fn=_dppo,
        needs=_RL,
        takes=("weights",),
        settings={"divergence_threshold": 0.2},
        gates=_GATES,
    ),
    "kl_divergence": Loss(
        fn=_kl_divergence, needs=("logprobs",), takes=("weights",), soft_targets=True
    ),
}


def loss_values(loss: Loss, logp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The loss of each target; `weights` multiply every loss that has no other use for them."""
    values = loss.fn(logp, inputs, settings)
    if "weights" in inputs and "weights" not in loss.needs:
        values = values * inputs["weights"]
    return values


GAP_INPUTS = frozenset({"logprobs", "advantages"})
"""What `gap_metrics` reads of a datum."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far trainer and sampler disagree over some tokens; gap = logp - q."""

    sum_abs: float
    max_abs: float
    sum_k3: float
    """k3 estimates KL(sampler || trainer) without bias and is never negative."""
    num_tokens: int


def gap_metrics(logp: Tensor, inputs: Inputs) -> Gap | None:
    """Compare with the datum's `logprobs`, where a sampler produced the token."""
    if logp.ndim != 1 or "logprobs" not in inputs:
        return None
    gap = (logp - inputs["logprobs"])[_sampled(inputs)].double()
    if gap.numel() == 0:
        return None
    k3 = gap.exp() - gap - 1
    return Gap(float(gap.abs().sum()), float(gap.abs().max()), float(k3.sum()), gap.numel())


# ---------------------------------------------------------------------------------------- checks


def find_loss(name: str) -> Loss:
    if (loss := LOSSES.get(name)) is None:
        raise NotSupportedError(
            f"no loss {name!r}; supported: {', '.join(sorted(LOSSES))}, custom", path="loss_fn"
        )
    return loss


def check_settings(name: str, loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss with defaults filled in; unknown or unusable ones are refused."""
    settings = dict(loss.settings)
    for key, value in given.items():
        path = f"loss_fn_config.{key}"
        if key not in loss.settings:
            known = ", ".join(sorted(loss.settings)) or "none"
            raise InvalidInputError(
                f"loss {name!r} has no such setting; it has: {known}", path=path
            )
        if isinstance(value, (str, bool)) or not math.isfinite(value) or value < 0:
            raise InvalidInputError(f"must be a finite number >= 0, got {value!r}", path=path)
        settings[key] = float(value)
    if settings.get(_CLIPS[0], 0.0) > settings.get(_CLIPS[1], math.inf):
        raise InvalidInputError(
            f"clip_low_threshold {settings[_CLIPS[0]]} is above clip_high_threshold "
            f"{settings[_CLIPS[1]]}",
            path="loss_fn_config",
        )
    return settings


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked datum: its tokens, its targets and its float inputs in the shape of the targets."""

    tokens_T: Tensor
    targets: Tensor
    """[T], or [T, K] for several candidates per position."""
    inputs: Mapping[str, Tensor]
    active_T: Tensor
    """False where no gradient can arise, whatever the model says."""


def prepare(
    datum: TrainDatum, loss: Loss, *, path: str, vocab_size: int, max_length: int
) -> Prepared:
    """Check one datum against its loss and the model, and turn it into tensors.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    tokens_T = _check_tokens(datum.tokens, f"{path}.model_input", vocab_size)
    if not 1 <= len(tokens_T) <= max_length:
        raise InvalidInputError(
            f"has {len(tokens_T)} tokens; the model takes 1 to {max_length}",
            path=f"{path}.model_input",
        )
    fields = f"{path}.loss_fn_inputs"
    _check_names(datum.inputs, loss, fields)
    where = f"{fields}.target_tokens"
    targets = _check_tokens(_dense(datum.inputs["target_tokens"], where), where, vocab_size)
    if targets.ndim != 1 and not (loss.soft_targets and targets.ndim == 2):
        allowed = "1-D or 2-D" if loss.soft_targets else "1-D"
        raise InvalidInputError(f"must be {allowed}, got shape {tuple(targets.shape)}", path=where)
    if len(targets) != len(tokens_T):
        raise InvalidInputError(
            f"has {len(targets)} rows for {len(tokens_T)} model input tokens; one each is needed",
            path=where,
        )
    floats = {
        name: _check_floats(value, targets.shape, f"{fields}.{name}", name == "logprobs")
        for name, value in datum.inputs.items()
        if name != "target_tokens"
    }
    return Prepared(tokens_T, targets, floats, _active_rows(loss, targets, floats))


def prepare_custom(
    datum: TrainDatum, custom: CustomLoss, *, path: str, vocab_size: int, max_length: int
) -> Prepared:
    """Like `prepare` for a traced loss, whose inputs have names and shapes of their own."""
    names = [name for name, _ in custom.inputs if name != "logprobs"]
    rank = dict(custom.inputs).get("logprobs", 1)
    targets = {k: v for k, v in datum.inputs.items() if k == "target_tokens"}
    anything = Loss(fn=_cross_entropy, needs=(), soft_targets=rank == 2)
    checked = prepare(
        TrainDatum(tokens=datum.tokens, inputs=targets),
        anything,
        path=path,
        vocab_size=vocab_size,
        max_length=max_length,
    )
    inputs: dict[str, Tensor] = {}
    for name in names:
        where = f"{path}.loss_fn_inputs.{name}"
        if name not in datum.inputs:
            raise InvalidInputError("is an input of the custom loss and is missing", path=where)
        inputs[name] = _any_tensor(_dense(datum.inputs[name], where), where)
    return Prepared(checked.tokens_T, checked.targets, inputs, torch.ones_like(checked.active_T))


def _any_tensor(value: Array, path: str) -> Tensor:
    if np.issubdtype(value.dtype, np.integer):
        return torch.from_numpy(np.array(value, dtype=np.int64))
    if not np.isfinite(value).all():
        raise InvalidInputError("holds a value that is not finite", path=path)
    return torch.from_numpy(np.array(value, dtype=np.float32))


def _active_rows(loss: Loss, targets: Tensor, inputs: Inputs) -> Tensor:
    active = torch.ones(targets.shape, dtype=torch.bool)
    for name in loss.gates:
        if name in inputs:
            active &= inputs[name] != 0
    return active if active.ndim == 1 else active.any(dim=1)


def _check_names(inputs: Mapping[str, Array | CsrArray], loss: Loss, path: str) -> None:
    needed = ("target_tokens", *loss.needs)
    if missing := [name for name in needed if name not in inputs]:
        raise InvalidInputError(
            f"lacks {', '.join(missing)}; given: {', '.join(sorted(inputs)) or 'nothing'}",
            path=path,
        )
    if unknown := sorted(set(inputs) - {*needed, *loss.takes}):
        raise InvalidInputError(
            f"this loss has no use for {', '.join(unknown)}; it reads {', '.join(needed)}"
            f"{f' and optionally {chr(44).join(loss.takes)}' if loss.takes else ''}. Leave it out.",
            path=path,
        )


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
    dense = _dense(value, path, pad=-math.inf if is_logprob and len(shape) == 2 else 0.0)
    if tuple(dense.shape) != tuple(shape):
        raise InvalidInputError(
            f"has shape {tuple(dense.shape)}, target_tokens has {tuple(shape)}", path=path
        )
    floats = torch.from_numpy(np.array(dense, dtype=np.float32))
    allowed = torch.isfinite(floats)
    if is_logprob and len(shape) == 2:
        allowed |= floats == -math.inf
    if not bool(allowed.all()):
        where = int((~allowed).flatten().nonzero()[0])
        raise InvalidInputError(
            f"value {float(floats.flatten()[where])} at position {where} is not finite", path=path
        )
    return floats


def _dense(value: Array | CsrArray, path: str, pad: float = 0.0) -> Array:
    if not isinstance(value, CsrArray):
        return np.asarray(value)
    rows, columns = value.shape
    counts = np.diff(value.crow_indices)
    stored, cols = np.asarray(value.values), np.asarray(value.col_indices)
    consistent = (
        len(value.crow_indices) == rows + 1
        and (counts >= 0).all()
        and value.crow_indices[0] == 0
        and int(value.crow_indices[-1]) == len(stored) == len(cols)
        and (len(cols) == 0 or (0 <= cols.min() and cols.max() < columns))
    )
    if not consistent:
        raise InvalidInputError(
            f"the sparse indices do not describe shape {value.shape}", path=path
        )
    is_int = np.issubdtype(stored.dtype, np.integer)
    dense = np.full((rows, columns), 0 if is_int else pad, dtype=stored.dtype)
    dense[np.repeat(np.arange(rows), counts), cols] = stored
    return dense
