"""The value of a datum's loss and its slopes by every logprob, in numpy.

The formulas are `train.formulas`, the settings `contract.losses`. Knows arrays, not models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tinkex.contract.losses import CUSTOM, LOSSES, Loss, read_settings
from tinkex.engine.jobs import Array, TracedLoss
from tinkex.engine.metrics import Gap
from tinkex.engine.train.formulas import FORMULAS, Arrays, F, sampled
from tinkex.errors import InvalidInputError


class Evaluated(NamedTuple):
    """The loss of one datum, its slopes and metrics."""

    logp: F
    loss: float
    slopes: F
    """Of the loss, by logprob."""
    metrics: Mapping[str, float] = {}
    """Of a custom loss."""
    gaps: tuple[Gap, ...] = ()
    """One, where a sampler produced tokens."""


def evaluate(
    loss: Loss | TracedLoss, config: Mapping[str, float | str], logp: F, inputs: Mapping[str, Array]
) -> Evaluated:
    """The loss of a datum whose logprobs are `logp`."""
    if isinstance(loss, TracedLoss):
        name, done = CUSTOM, _evaluate_custom(loss, logp, inputs)
    else:
        floats = {name: value.astype(np.float64) for name, value in inputs.items()}
        name, valued = loss.name, loss_and_slopes(loss.name, logp, floats, config)
        done = Evaluated(logp, *valued, gaps=_gaps(logp, floats))
    if not math.isfinite(done.loss):
        raise InvalidInputError(f"loss {name} is {done.loss}; look at logprobs and weights")
    return done


def loss_and_slopes(
    name: str, logp: F, inputs: Arrays, config: Mapping[str, float | str]
) -> tuple[float, F]:
    """The summed loss, and its slope by every logprob."""
    loss = LOSSES[name]
    values, slopes = FORMULAS[name].slopes(logp, inputs, read_settings(loss, config))
    if "weights" in inputs and loss.token_local and not loss.weighs_itself:
        values, slopes = values * inputs["weights"], slopes * inputs["weights"]
    return float(values.sum()), slopes


def _gaps(logp: F, inputs: Arrays) -> tuple[Gap, ...]:
    """The distance of the sampler's logprobs from these, over the tokens that it produced."""
    if logp.ndim != 1 or "logprobs" not in inputs:
        return ()
    gap = (logp - inputs["logprobs"])[sampled(inputs)]
    if not gap.size:
        return ()
    k3 = np.exp(gap) - gap - 1
    return (Gap(float(np.abs(gap).sum()), float(np.abs(gap).max()), float(k3.sum()), gap.size),)


def _evaluate_custom(custom: TracedLoss, logp: F, inputs: Mapping[str, Array]) -> Evaluated:
    """A traced loss. The one thing here that needs torch."""
    import torch

    from tinkex.engine.train.graph import build_loss

    logprobs = torch.from_numpy(logp.astype(np.float32)).requires_grad_()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    loss, metrics = build_loss(custom)({"logprobs": logprobs, **tensors})
    (slopes,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    zeros = torch.zeros_like(logprobs)
    slopes_f64 = (zeros if slopes is None else slopes).double().numpy()
    numbers = {name: float(value.detach()) for name, value in metrics.items()}
    return Evaluated(logp, float(loss.detach()), slopes_f64, numbers)
