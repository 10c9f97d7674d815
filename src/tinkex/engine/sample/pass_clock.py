"""How much of the device's time a sample took: passes, divided equally among who was in them.

A sample's share is the clock when it ends less the clock when it first ran, so a pass costs the
same two readings whatever its number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class PassClock:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._share_s = 0.0
        self._began_at = 0.0
        self._num_rows = 0

    def begin(self) -> None:
        """A pass starts; who is in it is not known yet."""
        self._began_at, self._num_rows = self._clock(), 0

    def among(self, num_rows: int) -> None:
        """So many share the pass under way."""
        self._num_rows = num_rows

    def end(self) -> None:
        self._share_s, self._num_rows = self.read_s(), 0

    def read_s(self) -> float:
        """Seconds that fell to a row that was in every pass so far, this one's part included."""
        if not self._num_rows:
            return self._share_s
        return self._share_s + (self._clock() - self._began_at) / self._num_rows
