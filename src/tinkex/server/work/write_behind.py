"""Hand writes that nobody waits for to the store a moment later, many at once.

The good end of a request is such a write: when it is lost in a crash, the request simply runs
again. A
commit costs an fsync, and the promises of the next requests wait behind it; gathering the ends of a
few milliseconds keeps the disk for them. A write that finds no room on the disk is kept and made
again until it succeeds, because a replay goes by what the journal says: `is_behind` until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from tinkex.server.files import disk

DELAY_S = 0.025
RETRY_S = 1.0
MAX_WAITING = 256
Write = Callable[[], Future[None]]
Then = Callable[[], object]


class WriteBehind:
    def __init__(self, *, delay_s: float = DELAY_S, retry_s: float = RETRY_S) -> None:
        self._delay_s = delay_s
        self._retry_s = retry_s
        self._waiting: list[tuple[Write, Then | None]] = []
        self._failed: list[tuple[Write, Then | None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_behind(self) -> bool:
        """Whether a write failed and was not made again yet."""
        return bool(self._failed)

    def put(self, write: Write, then: Then | None = None) -> None:
        """Call `write` soon, after everything put before it, and `then` once it is durable.

        Neither may block. A write that can never succeed is logged by the store, and `then` is
        called all the same: somebody waits for it.
        """
        self._waiting.append((write, then))
        if len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self.flush)

    def flush(self) -> None:
        """Hand everything over now, what failed before first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        writes = [*self._failed, *self._waiting]
        self._failed, self._waiting = [], []
        loop = asyncio.get_running_loop()
        for write, then in writes:
            self._hand_over(write, then, loop)

    def _hand_over(self, write: Write, then: Then | None, loop: asyncio.AbstractEventLoop) -> None:
        def look(done: Future[None]) -> None:  # on the store's thread
            error = done.exception()
            if loop.is_closed():
                return
            if error is not None and disk.may_pass(error):
                loop.call_soon_threadsafe(self._keep, write, then)
            elif then is not None:
                loop.call_soon_threadsafe(then)

        write().add_done_callback(look)

    def _keep(self, write: Write, then: Then | None) -> None:
        self._failed.append((write, then))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._retry_s, self.flush)
