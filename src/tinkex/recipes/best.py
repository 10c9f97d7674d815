"""Which weights of a run were the best, and when to stop: a held-out metric, watched.

Every improvement is a line of `best.jsonl` in the run's folder with the checkpoint that was saved
for it; `stopped.json` says that a run ended early. A resumed run reads both and forgets what lies
after the step it goes on from, so it stops where the undisturbed one would have stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tinkex.errors import ConfigError
from tinkex.runs import json_lines
from tinkex.runs.run_log import RunLog, SavedStep

__all__ = ["Best", "Watch"]


_STOPPED = "stopped.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best value so far and its weights; paths are empty where none were kept."""

    step: int
    value: float
    state_path: str = ""
    sampler_path: str = ""


class SaveStep(Protocol):
    """Saves the weights after so many steps."""

    def __call__(self, step: int, *, for_sampler: bool) -> SavedStep: ...


class Watch:
    """The held-out metric of one run: its best value, and whether to stop."""

    def __init__(
        self,
        log: RunLog,
        metric: str,
        *,
        mode: Literal["min", "max"],
        keep: bool = False,
        patience: int = 0,
        stop_at: float | None = None,
        on_note: Callable[[str], None] = print,
    ) -> None:
        """Args:
        keep: Save a checkpoint for every improvement.
        patience: Evaluations without an improvement after which a run ends; 0 is never.
        stop_at: A value that is good enough to end the run.
        """
        if patience < 0:
            raise ConfigError(f"patience must be at least 0, got {patience}.")
        self._log, self._metric, self._mode = log, metric, mode
        self._keep, self._patience, self._stop_at = keep or patience > 0, patience, stop_at
        self._note = on_note
        self._file = log.folder / "best.jsonl"
        self.best = self._read(log.last.step if log.last else 0)
        values = [record for record in log.read_metrics() if metric in record]
        after = self.best.step if self.best else 0
        self._waited = sum(record["step"] > after for record in values)

    @property
    def is_asked_for(self) -> bool:
        """Whether a checkpoint or the end of the run depends on evaluations."""
        return self._keep or self._stop_at is not None

    def see(self, save: SaveStep, step: int, metrics: Mapping[str, float]) -> bool:
        """Note an evaluation after `step` steps. True: the run should end here."""
        value = metrics[self._metric]
        if self._is_better(value):
            self._waited = 0
            paths: dict[str, Any] = {}
            if self._keep:
                saved = save(step, for_sampler=True)
                paths = {"state_path": saved.state_path, "sampler_path": saved.sampler_path or ""}
            self.best = Best(step=step, value=value, **paths)
            # After the save: a crash in between leaves a checkpoint too many, no line without one.
            json_lines.append(self._file, {"step": step, "value": value, **paths})
        elif self.best is None or step > self.best.step:
            self._waited += 1
        return self._should_stop(step, value)

    def has_stopped(self, step: int) -> bool:
        """Whether the run in this folder was ended early at this very step."""
        file = self._log.folder / _STOPPED
        return file.exists() and json.loads(file.read_text(encoding="utf-8"))["step"] == step

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        return value < self.best.value if self._mode == "min" else value > self.best.value

    def _should_stop(self, step: int, value: float) -> bool:
        assert self.best is not None
        reason = ""
        if self._stop_at is not None and (
            value <= self._stop_at if self._mode == "min" else value >= self._stop_at
        ):
            reason = f"{self._metric} has reached {value:.4g}"
        elif self._patience and self._waited >= self._patience:
            reason = (
                f"{self._metric} has not improved for {self._waited} evaluations; "
                f"the best was {self.best.value:.4g} at step {self.best.step}"
            )
        if reason:
            self._note(f"Stopping at step {step}: {reason}.")
            record = json.dumps({"step": step, "reason": reason})
            (self._log.folder / _STOPPED).write_text(record + "\n", encoding="utf-8")
        return bool(reason)

    def _read(self, last_step: int) -> Best | None:
        """The best so far. Lines of steps that will be trained again are dropped."""
        json_lines.keep(self._file, lambda line: line["step"] <= last_step)
        kept = list(json_lines.read(self._file))
        return Best(**kept[-1]) if kept else None
