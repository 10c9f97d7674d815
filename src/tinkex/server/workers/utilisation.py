"""How much of the last minute an engine was busy, from looks at what it says of itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0


class Utilisation:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, float]] = deque()

    def note(self, busy_s: float) -> None:
        """The seconds that the engine has been busy since it started."""
        now = self._clock()
        if self._looks and busy_s < self._looks[-1][1]:  # another engine
            self._looks.clear()
        self._looks.append((now, busy_s))
        while self._looks[0][0] < now - WINDOW_S:
            self._looks.popleft()

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        if len(self._looks) < 2:
            return 0.0
        (began_at, before_s), (ended_at, after_s) = self._looks[0], self._looks[-1]
        return min(1.0, (after_s - before_s) / max(ended_at - began_at, 1e-9))
