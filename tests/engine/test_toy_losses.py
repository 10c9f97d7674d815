"""Both forms of each formula, numpy by hand and torch by autograd, are the same loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.contract.losses import LOSSES, read_settings
from tinkex.engine.toy import losses as toy
from tinkex.engine.train import losses as real
from tinkex.engine.train.formulas import FORMULAS

CASES = [
    (name, extras, soft)
    for name, loss in LOSSES.items()
    for extras in ((), tuple(each.name for each in loss.takes))
    for soft in ((False, True) if loss.soft_targets else (False,))
]


def inputs(name: str, extras: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {
        "weights": rng.choice([0.0, 0.5, 2.0], shape),
        "logprobs": -rng.exponential(1.0, shape) - 0.01,
        "advantages": rng.normal(size=shape),
        "clip_low_threshold": rng.uniform(0.5, 0.9, shape),
        "clip_high_threshold": rng.uniform(1.1, 1.5, shape),
        "sequence_ratio_mask": (rng.random(shape) > 0.3).astype(float),
    }
    return {key: made[key] for key in (*(each.name for each in LOSSES[name].needs), *extras)}


def test_every_declared_loss_has_its_formulas():
    assert list(FORMULAS) == list(LOSSES)


@pytest.mark.parametrize(("name", "extras", "soft"), CASES)
def test_values_and_slopes_agree_with_torch(name, extras, soft):
    shape = (40, 3) if soft else (40,)
    x = inputs(name, extras, shape)
    logp = -np.random.default_rng(4).exponential(1.0, shape) - 0.01
    value, slopes = toy.loss_and_slopes(name, logp, x, {})
    tensor = torch.tensor(logp, requires_grad=True)
    tensors = {key: torch.tensor(array) for key, array in x.items()}
    loss = LOSSES[name]
    total = real.loss_values(loss, tensor, tensors, read_settings(loss, {})).sum()
    total.backward()
    assert value == pytest.approx(total.item(), rel=1e-12)
    np.testing.assert_allclose(slopes, tensor.grad.numpy(), rtol=1e-9, atol=1e-12)
