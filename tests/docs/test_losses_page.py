"""The worked examples of docs/losses.md are what the engine computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tinkex.contract.losses import LOSSES, read_settings
from tinkex.engine.train.losses import loss_values

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
INPUTS = {
    "weights": torch.tensor([1.0, 1.0, 0.5]).double(),
    "logprobs": torch.tensor([-1.3, -0.4, -2.1]).double(),
    "advantages": torch.tensor([1.0, -2.0, 0.5]).double(),
}
_ROW = re.compile(r"^\| `(\w+)` \| ([-\d., ]+) \| ([-\d.]+) \| ([-\d., ]+) \|$", re.M)


def rows() -> dict[str, tuple[list[float], float, list[float]]]:
    def numbers(text: str) -> list[float]:
        return [float(number) for number in text.split(",")]

    found = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {name: (numbers(v), float(total), numbers(g)) for name, v, total, g in found}


def test_every_loss_of_the_table_has_a_worked_example():
    assert set(rows()) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_numbers_are_those_of_the_engine(name):
    loss = LOSSES[name]
    logp = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = {key: value for key, value in INPUTS.items() if key in {i.name for i in loss.needs}}
    values = loss_values(loss, logp, inputs, read_settings(loss, {}))
    (gradient,) = torch.autograd.grad(values.sum(), logp)
    shown, total, slope = rows()[name]
    assert shown == pytest.approx(values.tolist(), abs=5e-5)
    assert total == pytest.approx(values.sum().item(), abs=5e-5)
    assert slope == pytest.approx(gradient.tolist(), abs=5e-5)
