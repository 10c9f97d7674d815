"""The numpy losses of the toy engine and the torch losses of the real one are the same table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinkex.engine.toy import losses as toy
from tinkex.engine.train import losses as real

CASES = [
    (name, extras, soft)
    for name, loss in toy.LOSSES.items()
    for extras in ((), loss.takes)
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
    return {key: made[key] for key in (*toy.LOSSES[name].needs, *extras)}


def test_the_tables_have_the_same_rows():
    assert set(toy.LOSSES) == set(real.LOSSES)
    for name, row in toy.LOSSES.items():
        other = real.LOSSES[name]
        assert set(row.needs) == set(other.needs), name
        assert set(row.takes) == set(other.takes), name
        assert dict(row.settings) == dict(other.settings), name
        assert row.soft_targets == other.soft_targets, name


@pytest.mark.parametrize(("name", "extras", "soft"), CASES)
def test_values_and_slopes_agree_with_torch(name, extras, soft):
    shape = (40, 3) if soft else (40,)
    x = inputs(name, extras, shape)
    logp = -np.random.default_rng(4).exponential(1.0, shape) - 0.01
    value, slopes = toy.loss_and_slopes(name, logp, x, {})
    tensor = torch.tensor(logp, requires_grad=True)
    tensors = {key: torch.tensor(array) for key, array in x.items()}
    loss = real.LOSSES[name]
    total = real.loss_values(loss, tensor, tensors, loss.settings).sum()
    total.backward()
    assert value == pytest.approx(total.item(), rel=1e-12)
    np.testing.assert_allclose(slopes, tensor.grad.numpy(), rtol=1e-9, atol=1e-12)
