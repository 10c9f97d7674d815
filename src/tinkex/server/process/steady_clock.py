"""The time of day for deciding what is old, on machines whose clock may jump.

Expiry compares stored times with now. A clock that jumps ahead by a month would end every state and
checkpoint at once; one that jumps back, none. So now is the time at which the process started plus
the seconds that really passed, and follows the system's clock only by small steps. After a restart
the system's clock counts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
MAX_STEP_S = 600.0
"""How far the system's clock may be off before it is no longer followed."""


class SteadyClock:
    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        passed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._passed = wall, passed
        self._offset = wall() - passed()
        self._has_warned = False

    def now(self) -> float:
        """Seconds since the epoch."""
        jump = self._wall() - self._passed() - self._offset
        if abs(jump) <= MAX_STEP_S:
            self._offset += jump
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the system's clock jumped by %.0f s; what expires goes by the seconds that passed "
                "until the server starts again",
                jump,
            )
        return self._passed() + self._offset
