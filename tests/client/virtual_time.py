"""An event loop whose clock jumps: a wait of an hour costs nothing when nobody has work.

`run_virtual` runs a coroutine on such a loop and makes it the SDK's background loop, so the whole
client (retries, heartbeats, polls) lives in virtual time, in one thread, and repeats exactly.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinkex.client import background_loop as loop_module
from tinkex.client.background_loop import LoopThread
from tinkex.client.http.limits import RateLimiter

T = TypeVar("T")


class Hang(AssertionError):
    """Nothing is scheduled and nothing will ever happen."""


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:  # only another thread can wake us
            events = super().select(60.0)
            if not events:
                raise Hang("the loop waits for ever")
            return events
        self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


class _HereLoop(LoopThread):
    """The SDK's loop thread, but it is this thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pending = deque()
        self._waking = False
        self._ended = False
        self._lock = threading.Lock()
        self.loop = loop
        self._thread = threading.current_thread()


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 4 * 3600.0) -> T:
    """Run to the end; more than `limit_s` virtual seconds, or a hang, is an error."""
    loop = VirtualLoop()
    before = loop_module._background
    RateLimiter._shared.clear()  # its moments are on the clock of the last loop
    loop_module._background = _HereLoop(loop)
    try:
        return loop.run_until_complete(_limited(main, limit_s))
    finally:
        loop_module._background = before
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _limited(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    async with asyncio.timeout(limit_s):
        result = await main
    left = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    assert not left, f"tasks leaked: {left}"
    return result
