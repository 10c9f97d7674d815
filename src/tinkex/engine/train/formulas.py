"""The formulas of the losses that `contract.losses` declares, each told twice.

`values` works on tensors and leaves the gradient to autograd: the real engine. `slopes` works on
numpy arrays and gives d(value)/d(logp) by hand: the toy engine, and the slow, obvious version that
a test compares with the first. A value has the shape of its targets, and a token-local loss may be
evaluated piece by piece. This module uses methods of tensors only, so that it loads without torch.

r = exp(logp - q), where q is the datum's `logprobs`, reported by the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

F = NDArray[np.float64]
Tensors = Mapping[str, "Tensor"]
Arrays = Mapping[str, F]
Settings = Mapping[str, float]
_CLIPS = ("clip_low_threshold", "clip_high_threshold")


class Formula(NamedTuple):
    """Both forms of one loss."""

    values: Callable[[Tensor, Tensors, Settings], Tensor]
    """The value of each target; autograd finds the slopes."""
    slopes: Callable[[F, Arrays, Settings], tuple[F, F]]
    """The value of each target, and the slope of the sum of all by each logprob.

    Like the values above they are without `weights`, which multiply both afterwards; but a loss
    that is not token-local has its weights in here, since its slopes are sums over targets.
    """


# -------------------------------------------------------------------------------- what they share


def _ratio(logp: Tensor, x: Tensors) -> Tensor:
    return (logp - x["logprobs"]).exp()


def _bounds(x: Tensors, settings: Settings) -> tuple[Tensor, Tensor]:
    """Clip limits: per token where the datum carries them, else from the settings."""
    like = x["logprobs"]
    low, high = (x[key] if key in x else like.new_full(like.shape, settings[key]) for key in _CLIPS)
    return low, high


def _clipped_objective(ratio: Tensor, x: Tensors, settings: Settings) -> Tensor:
    low, high = _bounds(x, settings)
    advantages = x["advantages"]
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def sampled(x: Mapping[str, Any]) -> Any:
    """Which tokens a sampler produced: clients fill prompts with logprob 0 and advantage 0."""
    mask = x["logprobs"] != 0
    return mask | (x["advantages"] != 0) if "advantages" in x else mask


def _np_bounds(x: Arrays, settings: Settings) -> tuple[Any, Any]:
    low, high = (x[key] if key in x else settings[key] for key in _CLIPS)
    return low, high


# ------------------------------------------------------------------------------------ the losses


def _cross_entropy(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    return -x["weights"] * logp


def _cross_entropy_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    return -x["weights"] * logp, -x["weights"]


def _importance_sampling(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    return -_ratio(logp, x) * x["advantages"]


def _importance_sampling_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    values = -np.exp(logp - x["logprobs"]) * x["advantages"]
    return values, values


def _ppo(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    return _clipped_objective(_ratio(logp, x), x, settings)


def _ppo_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    low, high = _np_bounds(x, settings)
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    free, clipped = r * adv, np.clip(r, low, high) * adv
    # Where both are equal nothing is clipped, or the advantage is 0.
    return -np.minimum(free, clipped), np.where(free <= clipped, -free, 0.0)


def _cispo(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    low, high = _bounds(x, settings)
    scale = _ratio(logp, x).detach().clamp(low, high)
    return -scale * x["advantages"] * logp


def _cispo_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    low, high = _np_bounds(x, settings)
    scale = np.clip(np.exp(logp - x["logprobs"]), low, high) * x["advantages"]
    return -scale * logp, -scale


def _dro(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    gap = logp - x["logprobs"]
    return -(logp * x["advantages"] - settings["beta"] / 2 * gap.square())


def _dro_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    beta, gap, adv = settings["beta"], logp - x["logprobs"], x["advantages"]
    return -(logp * adv - beta / 2 * gap**2), -(adv - beta * gap)


def _gspo(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    """PPO whose ratio is the geometric mean over the sequence, equal for all its tokens."""
    mask = x["sequence_ratio_mask"] if "sequence_ratio_mask" in x else sampled(x)
    mask = mask.to(logp.dtype)
    log_ratio = ((logp - x["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    return _clipped_objective(log_ratio.exp().expand_as(logp), x, settings) * mask


def _gspo_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    mask = x["sequence_ratio_mask"] if "sequence_ratio_mask" in x else sampled(x).astype(np.float64)
    low, high = _np_bounds(x, settings)
    share = mask / max(mask.sum(), 1.0)
    r = np.exp(((logp - x["logprobs"]) * share).sum())
    free, clipped = r * x["advantages"], np.clip(r, low, high) * x["advantages"]
    # Every token's value depends on every token's logprob, through r.
    counted = mask * x.get("weights", 1.0)
    slope_of_r = (np.where(free <= clipped, -free, 0.0) * counted).sum()
    return -np.minimum(free, clipped) * counted, slope_of_r * share


def _dppo(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    """Policy gradient, except where the token's probability has already moved too far.

    A token is masked when |p - p_q| exceeds the threshold and its gradient would push it further.
    """
    ratio, advantages = _ratio(logp, x), x["advantages"]
    divergence = (logp.detach().exp() - x["logprobs"].exp()).abs()
    outward = (ratio.detach() > 1).where(advantages > 0, ratio.detach() < 1)
    kept = ~(outward & (divergence > settings["divergence_threshold"]))
    return -ratio * advantages * kept


def _dppo_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    moved = np.abs(np.exp(logp) - np.exp(x["logprobs"])) > settings["divergence_threshold"]
    outward = np.where(adv > 0, r > 1, r < 1)
    values = np.where(moved & outward, 0.0, -r * adv)
    return values, values


def _sapo(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    """Policy gradient through a soft gate: a slope of 1 at r = 1 that fades as r moves away.

    Gao et al., Soft Adaptive Policy Optimization (2025), without its means over tokens. The
    gate of bad tokens is the narrower one: pushing a token down raises all others.
    """
    advantages = x["advantages"]
    wide = advantages.new_full(advantages.shape, settings["tau_pos"])
    tau = wide.where(advantages > 0, settings["tau_neg"])
    return -(tau * (_ratio(logp, x) - 1)).sigmoid() * (4 / tau) * advantages


def _sapo_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    r, adv = np.exp(logp - x["logprobs"]), x["advantages"]
    tau = np.where(adv > 0, settings["tau_pos"], settings["tau_neg"])
    # The sigmoid by tanh, which does not overflow however far r has gone.
    gate = 0.5 * (1 + np.tanh(0.5 * tau * (r - 1)))
    return -4 / tau * gate * adv, -4 * gate * (1 - gate) * r * adv


def _kl_divergence(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    """2-D: forward KL over the given support. 1-D: the k3 estimate, never negative."""
    q = x["logprobs"]
    if logp.ndim == 2:
        p = q.exp()
        # A support padded with -inf contributes nothing: 0 * log 0 = 0.
        return (p * (q.where(p > 0, 0.0) - logp)).where(p > 0, 0.0)
    gap = q - logp
    return gap.exp() - gap - 1


def _kl_divergence_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    q = x["logprobs"]
    if logp.ndim == 2:
        p = np.exp(q)
        return np.where(p > 0, p * (np.where(p > 0, q, 0.0) - logp), 0.0), -p
    ratio = np.exp(q - logp)
    return ratio - (q - logp) - 1, 1 - ratio


def _reverse_kl(logp: Tensor, x: Tensors, settings: Settings) -> Tensor:
    return (logp - x["logprobs"]) ** 2 / 2


def _reverse_kl_slopes(logp: F, x: Arrays, settings: Settings) -> tuple[F, F]:
    gap = logp - x["logprobs"]
    return gap**2 / 2, gap


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": Formula(_cross_entropy, _cross_entropy_slopes),
    "importance_sampling": Formula(_importance_sampling, _importance_sampling_slopes),
    "ppo": Formula(_ppo, _ppo_slopes),
    "cispo": Formula(_cispo, _cispo_slopes),
    "dro": Formula(_dro, _dro_slopes),
    "gspo": Formula(_gspo, _gspo_slopes),
    "dppo": Formula(_dppo, _dppo_slopes),
    "sapo": Formula(_sapo, _sapo_slopes),
    "kl_divergence": Formula(_kl_divergence, _kl_divergence_slopes),
    "reverse_kl": Formula(_reverse_kl, _reverse_kl_slopes),
}
