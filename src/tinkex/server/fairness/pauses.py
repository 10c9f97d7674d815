"""Pauses for users whose work took a worker from everybody.

A job is to blame when the watchdog ended an engine for it, or when a worker died by itself while it
ran nothing else. Anybody has bad luck once. From the second time on the user's next jobs wait, each
time twice as long, before they stand in any line: others are never queued behind them. By user, not
by key, because keys are free. Which job is to blame is for the workers to say.

Each blame is an event of the audit log, and so is the end that an administrator puts to it. A
server that starts again reads the last hour of them (`restore`), so a pause outlives a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)
FREE_TIMES = 1
"""So often a user is to blame without a pause."""
FIRST_S, LONGEST_S = 10.0, 600.0
"""The first pause, which doubles each time, and the longest."""
FORGET_S = 3600.0
"""After so long without another time all is forgotten."""
MAX_USERS = 10_000
EVENTS = "blame_"
"""How the names of its events begin."""
NOTED, LIFTED = EVENTS + "noted", EVENTS + "lifted"
CAUSES = {
    "memory": "its worker ran out of memory",
    "crash": "its worker crashed",
    "stuck": "its engine did not get on",
}

Record = Callable[[str, str, dict[str, Any]], None]
"""Writes an event of a user with its details."""


@dataclass(slots=True)
class Blame:
    """The losses of workers that one user is to blame for."""

    count: int = 0
    last_at: float = 0.0
    ends_at: float = 0.0
    cause: str = ""
    request_id: str = ""
    """The last request that was to blame."""

    def add(self, at: float, cause: str, request_id: str) -> float:
        """Count once more; gives the seconds of the pause that begins with it."""
        self.count, self.last_at = self.count + 1, at
        self.cause, self.request_id = cause, request_id
        extra = self.count - FREE_TIMES - 1
        pause_s = min(FIRST_S * 2.0 ** min(extra, 30), LONGEST_S) if extra >= 0 else 0.0
        self.ends_at = max(self.ends_at, at + pause_s)
        return pause_s


class Pauses:
    def __init__(
        self, record: Record | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._record = record or (lambda user_id, event, details: None)
        self._clock = clock
        self._blames: dict[str, Blame] = {}

    def blame(self, user_id: str, *, cause: str = "", request_id: str = "") -> None:
        """Note that work of a user took a worker; from the second time on it begins a pause."""
        now = self._clock()
        self._forget(now)
        blame = self._blames.setdefault(user_id, Blame())
        pause_s = blame.add(now, cause, request_id)
        details = {"request_id": request_id, "cause": cause, "count": blame.count}
        self._record(user_id, NOTED, details | {"pause_s": pause_s})
        logger.warning(
            "%s was to blame %d times, now by %s (%s); pause of %g s",
            user_id,
            blame.count,
            request_id,
            CAUSES.get(cause, cause),
            pause_s,
        )

    def lift(self, user_id: str) -> bool:
        """Forget what is held against a user; False when nothing is."""
        return self._blames.pop(user_id, None) is not None

    def restore(self, events: Iterable[tuple[float, str, str, dict[str, Any]]]) -> None:
        """Take up what was held against users before: age in seconds, user, event and details.

        The oldest first.
        """
        now = self._clock()
        for age_s, user_id, event, details in events:
            if event == LIFTED:
                self.lift(user_id)
            elif event == NOTED and age_s < FORGET_S:
                blame = self._blames.setdefault(user_id, Blame())
                # Earlier ones count although they are too old to be told here.
                blame.count = int(details.get("count", blame.count + 1)) - 1
                cause, request_id = details.get("cause", ""), details.get("request_id", "")
                blame.add(now - max(age_s, 0.0), str(cause), str(request_id))

    def left_s(self, user_id: str) -> float:
        """Seconds until the user's jobs run again; 0 when there is no pause."""
        blame = self._blames.get(user_id)
        return 0.0 if blame is None else max(0.0, blame.ends_at - self._clock())

    def retry_after(self, user_id: str) -> dict[str, str]:
        """The header that tells a client when to come again; none when there is no pause."""
        left_s = self.left_s(user_id)
        return {"Retry-After": str(math.ceil(left_s))} if left_s else {}

    def reason(self, user_id: str) -> str:
        """Why the user's jobs wait, for a person; empty when there is no pause."""
        if not (left_s := self.left_s(user_id)):
            return ""
        blame = self._blames[user_id]
        last = (
            f" (the last one: {blame.request_id}, {CAUSES.get(blame.cause, blame.cause)})"
            if blame.cause
            else ""
        )
        return (
            f"paused for {math.ceil(left_s)} s: jobs of this account ended a worker "
            f"{blame.count} times{last}. Send less at a time"
        )

    async def over(self, user_id: str) -> None:
        """Wait until there is no pause."""
        while left_s := self.left_s(user_id):
            await asyncio.sleep(min(left_s, 1.0))  # it may be prolonged meanwhile, or lifted

    def _forget(self, now: float) -> None:
        kept = {u: r for u, r in self._blames.items() if now - r.last_at < FORGET_S}
        while len(kept) >= MAX_USERS:
            kept.pop(min(kept, key=lambda user_id: kept[user_id].last_at))
        self._blames = kept
