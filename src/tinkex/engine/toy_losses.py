"""The losses of the toy engine: value and d(loss)/d(logprob), in numpy.

Each loss is a plain sum over tokens, as the torch table in `losses.py` says; the tests compare
the two, so this file is also the slow, obvious version of that one. Knows arrays, not models.
r = exp(logp - q), where q is the logprob the sampler reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError

F = NDArray[np.float64]
Inputs = Mapping[str, F]
Config = Mapping[str, float | str]
LossAndSlope = tuple[float, F]


def _number(config: Config, key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, str) or not np.isfinite(value):
        raise InvalidInputError(
            f"must be a finite number, got {value!r}", path=f"loss_fn_config.{key}"
        )
    return float(value)


def _cross_entropy(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    return float(-(x["weights"] * logp).sum()), -x["weights"]


def _importance_sampling(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    r = np.exp(logp - x["logprobs"])
    return float(-(r * x["advantages"]).sum()), -r * x["advantages"]


def _bounds(config: Config, x: Inputs, low: float, high: float) -> tuple[Any, Any]:
    """Clip limits: per token where the datum carries them, else from the config."""
    return (
        x.get("clip_low_threshold", _number(config, "clip_low_threshold", low)),
        x.get("clip_high_threshold", _number(config, "clip_high_threshold", high)),
    )


def _ppo(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    low, high = _bounds(config, x, 0.8, 1.2)
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    free, clipped = r * adv, np.clip(r, low, high) * adv
    return float(-np.minimum(free, clipped).sum()), np.where(free <= clipped, -free, 0.0)


def _cispo(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    low, high = _bounds(config, x, 0.0, 4.0)
    scale = np.clip(np.exp(logp - x["logprobs"]), low, high) * x["advantages"]
    return float(-(scale * logp).sum()), -scale


def _dro(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    beta = _number(config, "beta", 0.05)
    gap, adv = logp - x["logprobs"], x["advantages"]
    return float(-(logp * adv - beta / 2 * gap**2).sum()), -(adv - beta * gap)


def _kl_divergence(logp: F, x: Inputs, config: Config) -> LossAndSlope:
    q = x["logprobs"]
    if logp.ndim == 2:
        p = np.exp(q)
        return float((p * (q - logp)).sum()), -p
    ratio = np.exp(q - logp)
    return float((ratio - (q - logp) - 1).sum()), 1 - ratio


LOSSES: dict[str, tuple[tuple[str, ...], Callable[[F, Inputs, Config], LossAndSlope]]] = {
    "cross_entropy": (("weights",), _cross_entropy),
    "importance_sampling": (("logprobs", "advantages"), _importance_sampling),
    "ppo": (("logprobs", "advantages"), _ppo),
    "cispo": (("logprobs", "advantages"), _cispo),
    "dro": (("logprobs", "advantages"), _dro),
    "kl_divergence": (("logprobs",), _kl_divergence),
}
"""Name -> (inputs it needs besides target_tokens, value and slope)."""
