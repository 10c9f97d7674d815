"""How far a run has come, in lists: steps as its program counts them, and the figure that tells."""

from __future__ import annotations

import pytest
import store_rows as rows

from tinkex.server.runs.curves import Course
from tinkex.server.runs.progress import progress_of


def course(last_step: float, value: float) -> Course:
    return Course(last_step, value, value, [value])


@pytest.mark.parametrize(
    ("curves", "settings", "num_steps", "metric", "last"),
    [
        # Two updates a step: fourteen steps of the recipe, 28 of the optimizer.
        (
            {"reward": (13, 0.5), "loss_per_token": (28, 1e-8), "learning_rate": (28, 1e-4)},
            {"recipe": "rl"},
            14,
            "reward",
            {"reward": 0.5, "loss": 1e-8},
        ),
        (
            {"kl": (1, 0.2), "loss_per_token": (2, -1e-6), "learning_rate": (2, 1e-4)},
            {"recipe": "distill"},
            2,
            "kl",
            {"kl": 0.2, "loss": -1e-6},
        ),
        # A step that the server forgot in a crash is still one of the recipe's.
        (
            {"loss": (119, 0.7), "loss_per_token": (115, 0.8), "learning_rate": (115, 1e-4)},
            {"recipe": "sft"},
            120,
            "loss",
            {"loss": 0.7},
        ),
        # Where a program of one's own begins to count is not known.
        (
            {"loss": (1000, 0.7), "learning_rate": (10, 1e-4)},
            {"model": "mine"},
            10,
            "loss",
            {"loss": 0.7},
        ),
        ({}, None, None, None, {}),
    ],
)
def test_a_run_in_a_line(curves, settings, num_steps, metric, last):
    model = rows.model("a", settings=settings)
    progress = progress_of(model, {("a", name): course(*point) for name, point in curves.items()})
    assert (progress.num_steps, progress.metric, dict(progress.last)) == (num_steps, metric, last)
