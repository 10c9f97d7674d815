"""A run of a recipe as the server's console shows it: its settings and its metrics.

Knows a training client and numbers; the run's own folder is written by others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex import APIFuture, TrainingClient

__all__ = ["ServerTracker"]

logger = logging.getLogger(__name__)


class ServerTracker:
    """Shows a run in the console of the server that trains it: its settings, and its metrics.

    Nothing waits for it, and a server that does not take them, such as the hosted one, is asked
    once. What the server measures by itself is left out, and so is what is no number: the run's
    own log has it, and what to do about a loss that is not finite is the loop's to say.
    """

    MEASURED = frozenset({"learning_rate", "grad_norm", "tokens_per_s", "num_tokens"})

    def __init__(self, training: TrainingClient, settings: Mapping[str, Any] | None = None) -> None:
        self._training = training
        self._sent: dict[str, APIFuture[Any]] = {}
        self._refused: set[str] = set()
        if settings:
            self._sent["settings"] = training.log_settings(settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        drawn = {
            name: value
            for name, value in metrics.items()
            if name not in self.MEASURED and math.isfinite(value)
        }
        for kind, sent in self._sent.items():
            if sent.done():
                self._look(kind, timeout_s=None)
        if drawn and "metrics" not in self._refused:
            self._sent["metrics"] = self._training.log_metrics(drawn, step=step)

    def close(self) -> None:
        for kind in self._sent:
            self._look(kind, timeout_s=5.0)

    def _look(self, kind: str, timeout_s: float | None) -> None:
        try:
            self._sent[kind].result(timeout_s)
        except Exception as exc:  # A picture is not worth a run.
            if kind not in self._refused:
                logger.info("the server does not take this run's %s: %s", kind, exc)
            self._refused.add(kind)
