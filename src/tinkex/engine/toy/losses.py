"""The value of a datum's loss and its slopes by every logprob, in numpy.

The formulas are `train.formulas`, the settings `contract.losses`. Knows arrays, not models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.losses import LOSSES, read_settings
from tinkex.engine.jobs import TracedLoss
from tinkex.engine.train.formulas import FORMULAS, Arrays, F


def loss_and_slopes(
    name: str, logp: F, inputs: Arrays, config: Mapping[str, float | str]
) -> tuple[float, F]:
    """The summed loss, and its slope by every logprob."""
    loss = LOSSES[name]
    values, slopes = FORMULAS[name].slopes(logp, inputs, read_settings(loss, config))
    if "weights" in inputs and loss.token_local and not loss.weighs_itself:
        values, slopes = values * inputs["weights"], slopes * inputs["weights"]
    return float(values.sum()), slopes


def custom_loss_and_slopes(
    custom: TracedLoss, logp: F, inputs: Mapping[str, NDArray[Any]]
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
