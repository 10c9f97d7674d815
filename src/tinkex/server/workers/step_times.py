"""The time of an adapter's steps, by phase.

A step lasts from its first request, or the end of the step before when that came later, to the end
of its `optim_step`. What of that was neither compute, nor adding gradients, nor bringing them was
waiting: for its turn on the device, for another member, for the next request.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

PHASES = ("compute", "wait", "reduce", "transfer")
MAX_STEPS = 32
"""Steps that an average is over."""


class StepTimes:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[dict[str, float]] = deque(maxlen=MAX_STEPS)
        self._spent: Counter[str] = Counter()
        self._began_at: float | None = None
        self._num_open = 0

    def begun(self) -> None:
        """A pass or a step was posted."""
        self._num_open += 1
        if self._began_at is None:
            self._began_at = self._clock()

    def ended(self) -> None:
        """The pass or step has ended, well or not."""
        self._num_open -= 1

    def spent(self, **seconds: float) -> None:
        self._spent.update(seconds)

    def stepped(self) -> None:
        """The adapter's step has ended, whose pass or step is still counted as open."""
        now = self._clock()
        lasted_s = now - (now if self._began_at is None else self._began_at)
        known = {phase: self._spent[phase] for phase in PHASES}
        wait_s = max(0.0, lasted_s - sum(known.values()))
        self._steps.append(known | {"wait": wait_s})
        self._spent.clear()
        self._began_at = now if self._num_open > 1 else None

    def lost(self) -> None:
        """Forget the step under way, whose gradients are gone; those that ended are remembered."""
        self._spent.clear()
        self._began_at = None

    @property
    def average(self) -> dict[str, float]:
        """Seconds of a step by phase, over the last ones; empty before the first."""
        if not self._steps:
            return {}
        return {p: sum(step[p] for step in self._steps) / len(self._steps) for p in PHASES}
