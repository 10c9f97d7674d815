"""Pauses for users whose work took a worker from everybody.

A job is to blame when the watchdog ended an engine for it, or when a worker died by itself while it
ran nothing else. Anybody has bad luck once. From the second time on the user's next jobs wait, each
time twice as long, before they stand in any line: others are never queued behind them. By user, not
by key, because keys are free. Which job is to blame is for the workers to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)
FREE_TIMES = 1
"""So often a user is to blame without a pause."""
FIRST_S, LONGEST_S = 10.0, 600.0
"""The first pause, which doubles each time, and the longest."""
FORGET_S = 3600.0
"""After so long without another time all is forgotten."""
MAX_USERS = 10_000


@dataclass(slots=True)
class _Record:
    count: int = 0
    last_at: float = 0.0
    ends_at: float = 0.0


class Pauses:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def blame(self, user_id: str) -> None:
        """Note that work of a user took a worker; from the second time on it begins a pause."""
        now = self._clock()
        self._forget(now)
        record = self._records.setdefault(user_id, _Record())
        record.count, record.last_at = record.count + 1, now
        if (extra := record.count - FREE_TIMES - 1) >= 0:
            pause_s = min(FIRST_S * 2.0 ** min(extra, 30), LONGEST_S)
            record.ends_at = max(record.ends_at, now + pause_s)
            logger.warning(
                "%s was to blame %d times; pause of %g s", user_id, record.count, pause_s
            )

    def left_s(self, user_id: str) -> float:
        """Seconds until the user's jobs run again; 0 when there is no pause."""
        record = self._records.get(user_id)
        return 0.0 if record is None else max(0.0, record.ends_at - self._clock())

    def reason(self, user_id: str) -> str:
        """Why the user's jobs wait, for a person; empty when there is no pause."""
        if not (left_s := self.left_s(user_id)):
            return ""
        return (
            f"paused for {left_s:.0f} s: jobs of this account ended a worker "
            f"{self._records[user_id].count} times. Send less at a time"
        )

    async def over(self, user_id: str) -> None:
        """Wait until there is no pause."""
        while left_s := self.left_s(user_id):
            await asyncio.sleep(min(left_s, 1.0))  # it may be prolonged meanwhile

    def _forget(self, now: float) -> None:
        kept = {u: r for u, r in self._records.items() if now - r.last_at < FORGET_S}
        while len(kept) >= MAX_USERS:
            kept.pop(min(kept, key=lambda user_id: kept[user_id].last_at))
        self._records = kept
