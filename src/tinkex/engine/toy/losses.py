"""The losses of the toy engine: value and d(loss)/d(logprob), in numpy.

Each loss is a plain sum over targets, as the torch table in `losses.py` says; a test compares the
two row by row, so this is also the slow, obvious version of that one. Knows arrays, not models.
r = exp(logp - q), where q is the datum's `logprobs`, reported by the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.jobs import CustomLoss
from tinkex.errors import InvalidInputError

F = NDArray[np.float64]
Inputs = Mapping[str, F]
Settings = Mapping[str, float]
ValuesAndSlopes = tuple[F, F]
_CLIPS = ("clip_low_threshold", "clip_high_threshold")


def _cross_entropy(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    return -x["weights"] * logp, -x["weights"]


def _importance_sampling(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    values = -np.exp(logp - x["logprobs"]) * x["advantages"]
    return values, values


def _bounds(x: Inputs, settings: Settings) -> tuple[Any, Any]:
    """Clip limits: per token where the datum carries them, else from the settings."""
    low, high = (x[key] if key in x else settings[key] for key in _CLIPS)
    return low, high


def _ppo(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    low, high = _bounds(x, settings)
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    free, clipped = r * adv, np.clip(r, low, high) * adv
    # Where both are equal nothing is clipped, or the advantage is 0.
    return -np.minimum(free, clipped), np.where(free <= clipped, -free, 0.0)


def _cispo(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    low, high = _bounds(x, settings)
    scale = np.clip(np.exp(logp - x["logprobs"]), low, high) * x["advantages"]
    return -scale * logp, -scale


def _dro(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    beta, gap, adv = settings["beta"], logp - x["logprobs"], x["advantages"]
    return -(logp * adv - beta / 2 * gap**2), -(adv - beta * gap)


def _gspo(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    """PPO whose ratio is the geometric mean over the sampled tokens, equal for all of them."""
    sampled = (x["logprobs"] != 0) | (x["advantages"] != 0)
    mask = x["sequence_ratio_mask"] if "sequence_ratio_mask" in x else sampled.astype(np.float64)
    low, high = _bounds(x, settings)
    share = mask / max(mask.sum(), 1.0)
    r = np.exp(((logp - x["logprobs"]) * share).sum())
    free, clipped = r * x["advantages"], np.clip(r, low, high) * x["advantages"]
    weights = mask * x.get("weights", 1.0)
    # Every token's value depends on every token's logprob, through r.
    slope_of_r = (np.where(free <= clipped, -free, 0.0) * weights).sum()
    return -np.minimum(free, clipped) * weights, slope_of_r * share


def _dppo(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    """Policy gradient, except where the token's probability has already moved too far."""
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    moved = np.abs(np.exp(logp) - np.exp(x["logprobs"])) > settings["divergence_threshold"]
    outward = np.where(adv > 0, r > 1, r < 1)
    values = np.where(moved & outward, 0.0, -r * adv)
    return values, values


def _kl_divergence(logp: F, x: Inputs, settings: Settings) -> ValuesAndSlopes:
    """2-D: forward KL over the given support. 1-D: the k3 estimate, never negative."""
    q = x["logprobs"]
    if logp.ndim == 2:
        p = np.exp(q)
        return np.where(p > 0, p * (np.where(p > 0, q, 0.0) - logp), 0.0), -p
    ratio = np.exp(q - logp)
    return ratio - (q - logp) - 1, 1 - ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyLoss:
    """One row of the table: inputs besides `target_tokens`, settings with defaults, the formula."""

    fn: Callable[[F, Inputs, Settings], ValuesAndSlopes]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ("weights",)
    settings: Settings = field(default_factory=dict)
    soft_targets: bool = False
    uses_weights: bool = False
    """True: the formula itself takes `weights`; else they multiply its values."""


_RL = ("logprobs", "advantages")
_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: dict[str, ToyLoss] = {
    "cross_entropy": ToyLoss(
        fn=_cross_entropy,
        needs=("weights",),
        takes=("logprobs",),
        soft_targets=True,
        uses_weights=True,
    ),
    "importance_sampling": ToyLoss(fn=_importance_sampling, needs=_RL),
    "ppo": ToyLoss(fn=_ppo, needs=_RL, takes=("weights", *_CLIPS), settings=_PPO),
    "cispo": ToyLoss(
        fn=_cispo,
        needs=_RL,
        takes=("weights", *_CLIPS),
        settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": ToyLoss(fn=_dro, needs=_RL, settings={"beta": 0.05}),
    "gspo": ToyLoss(
        fn=_gspo,
        needs=_RL,
        takes=("weights", "sequence_ratio_mask", *_CLIPS),
        settings=_PPO,
        uses_weights=True,
    ),
    "dppo": ToyLoss(fn=_dppo, needs=_RL, settings={"divergence_threshold": 0.2}),
    "kl_divergence": ToyLoss(fn=_kl_divergence, needs=("logprobs",), soft_targets=True),
}


def loss_and_slopes(
    name: str, logp: F, inputs: Inputs, config: Mapping[str, float | str]
) -> tuple[float, F]:
    """The summed loss, and its slope by every logprob."""
    loss = LOSSES[name]
    values, slopes = loss.fn(logp, inputs, check_settings(name, config))
    if "weights" in inputs and not loss.uses_weights:
        values, slopes = values * inputs["weights"], slopes * inputs["weights"]
    return float(values.sum()), slopes


def check_settings(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss with defaults filled in; unknown or unusable ones are refused."""
    settings = dict(LOSSES[name].settings)
    for key, value in given.items():
        path = f"loss_fn_config.{key}"
        if key not in settings:
            known = ", ".join(sorted(settings)) or "none"
            raise InvalidInputError(
                f"loss {name!r} has no such setting; it has: {known}", path=path
            )
        if isinstance(value, str | bool) or not np.isfinite(value) or value < 0:
            raise InvalidInputError(f"must be a finite number >= 0, got {value!r}", path=path)
        settings[key] = float(value)
    return settings


def custom_loss_and_slopes(
    custom: CustomLoss, logp: F, inputs: Mapping[str, NDArray[Any]]
) -> tuple[float, F, dict[str, float]]:
    """A traced loss, its slopes and its metrics. The one thing here that needs torch."""
    import torch

    from tinkex.engine.train.graph import build_loss

    logprobs = torch.from_numpy(logp.astype(np.float32)).requires_grad_()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    loss, metrics = build_loss(custom)({"logprobs": logprobs, **tensors})
    (slopes,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    zeros = torch.zeros_like(logprobs)
    slopes_f64 = (zeros if slopes is None else slopes).double().numpy()
    numbers = {name: float(value.detach()) for name, value in metrics.items()}
    return float(loss.detach()), slopes_f64, numbers
