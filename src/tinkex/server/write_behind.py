"""Hand writes that nobody waits for to the store a moment later, many at once.

The end of a request is such a write: when it is lost in a crash, the request simply runs again. A
commit costs an fsync, and the promises of the next requests wait behind it; gathering the ends of a
few milliseconds keeps the disk for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DELAY_S = 0.025
MAX_WAITING = 256


class WriteBehind:
    def __init__(self, *, delay_s: float = DELAY_S) -> None:
        self._delay_s = delay_s
        self._waiting: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None

    def put(self, write: Callable[[], object]) -> None:
        """Call `write` soon, after everything put before it. It must not block."""
        self._waiting.append(write)
        if len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self.flush)

    def flush(self) -> None:
        """Hand everything over now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()
