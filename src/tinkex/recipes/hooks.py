"""Callbacks of a run: plain functions, called on its way with plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.runs.run_log import SavedStep

__all__ = ["Hooks", "OnEval", "OnNote", "OnSave", "OnStep", "print_step"]

OnNote = Callable[[str], None]
"""Called with lines for a person, such as the report on bad rows."""
OnStep = Callable[[int, int, Mapping[str, float]], Any]
"""Called after each step with the step, the number of steps, and the step's metrics. A result of
False ends the run there, with a checkpoint, as Ctrl-C does; everything else is ignored."""
OnEval = Callable[[int, Mapping[str, float]], None]
"""Called after each evaluation with the number of steps done and what was measured."""
OnSave = Callable[[SavedStep], None]
"""Called after each checkpoint with its step and its paths."""


def print_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
    """The plainest progress report."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    print(f"step {step + 1}/{num_steps}  {shown}", flush=True)


def _nothing(*values: object) -> None:
    """The callback of those who gave none."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The callbacks of a run. An exception of theirs ends the run as a crash would."""

    on_step: OnStep = print_step
    on_note: OnNote = print
    on_eval: OnEval = _nothing
    on_save: OnSave = _nothing

    @classmethod
    def of(
        cls, on_step: OnStep, on_note: OnNote, on_eval: OnEval | None, on_save: OnSave | None
    ) -> Hooks:
        return cls(on_step, on_note, on_eval or _nothing, on_save or _nothing)
