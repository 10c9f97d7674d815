"""How far a run has come and how well it does, as every list of runs shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinkex.server.runs.curves import Course
from tinkex.store import Model

__all__ = ["LISTED", "RunProgress", "progress_of"]

# The loss of RL and of distillation is near zero whatever happens. What a recipe logs as its loss
# is a mean, however it weighs its tokens, and comes before what the server measures.
_SHOWN = {"reward": "reward", "kl": "kl", "loss": "loss", "loss_per_token": "loss"}
"""Curves that say how well a run does, the most telling first, and what each is called."""
LISTED = (*_SHOWN, "learning_rate")
"""Curves that a list of runs needs."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run in a line of a list."""

    num_steps: int | None
    metric: str | None
    """`reward`, `loss` or `kl`, whichever says most; None before the first step."""
    course: Course | None
    """Of that metric."""
    last: Mapping[str, float]
    """The last value of each metric there is."""


def progress_of(model: Model, curves: Mapping[tuple[str, str], Course]) -> RunProgress:
    """Read the progress of a run from those of its curves that are `LISTED`."""
    own = {
        name: curves[model.model_id, name] for name in LISTED if (model.model_id, name) in curves
    }
    shown = [(metric, own[name]) for name, metric in _SHOWN.items() if name in own]
    metric, course = shown[0] if shown else (None, None)
    return RunProgress(
        num_steps=_num_steps(model, own),
        metric=metric,
        course=course,
        last={name: course.last_value for name, course in reversed(shown)},
    )


def _num_steps(model: Model, own: Mapping[str, Course]) -> int | None:
    """Steps as the run's program counts them, else optimizer steps.

    A step of a recipe may take several optimizer steps, and recipes number their first step 0.
    """
    logged = [own[name].last_step for name in ("reward", "loss", "kl") if name in own]
    if logged and "recipe" in (model.settings or {}):
        return int(max(logged)) + 1
    return int(own["learning_rate"].last_step) if "learning_rate" in own else None
