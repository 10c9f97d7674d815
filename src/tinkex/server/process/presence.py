"""Who is using a private server, so that it can end with its last client.

A client process says `attach` with its pid and counts as present while the pid lives, even when a
busy loop keeps it from sending heartbeats. Requests count too: a client that never attached (a
stock SDK) is present for `until_idle_s` after its last request. Both are looked at every
half second; a production server (`until_idle_s` 0) never starts that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tinkex.wire.local_servers import is_alive

POLL_S = 0.5


class Presence:
    def __init__(
        self,
        *,
        until_idle_s: float,
        parent_pid: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._until_idle_s = until_idle_s
        self._clock = clock
        self._pids: set[int] = {parent_pid} if parent_pid else set()
        self._last_seen = clock()
        self._open_requests = 0

    def attach(self, pid: int) -> None:
        self._pids.add(pid)
        self._last_seen = self._clock()

    def detach(self, pid: int) -> None:
        self._pids.discard(pid)

    def request_started(self) -> None:
        self._open_requests += 1
        self._last_seen = self._clock()

    def request_ended(self) -> None:
        self._open_requests -= 1
        self._last_seen = self._clock()

    def is_deserted(self) -> bool:
        """Whether nobody is attached, and nobody asked for anything for `until_idle_s`."""
        self._pids = {pid for pid in self._pids if is_alive(pid)}
        quiet_s = self._clock() - self._last_seen
        return not self._pids and not self._open_requests and quiet_s >= self._until_idle_s

    async def wait_until_deserted(self) -> None:
        while not self.is_deserted():
            await asyncio.sleep(POLL_S)
