"""The one background thread of the process: an event loop that does all networking of all clients.

Started by the first call, never at import; a daemon, so that it never keeps a program alive. Work
handed over from other threads is queued and the loop is woken once for all of it: waking costs a
system call, and thousands of samples are submitted in a burst. After a fork the child starts
afresh, because threads do not survive one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["LoopThread", "background", "loop_time"]

logger = logging.getLogger("tinkex.loop")


class LoopThread:
    """An asyncio loop on a daemon thread. `submit` may be called from any thread."""

    def __init__(self, name: str = "tinkex") -> None:
        self.pid = os.getpid()
        self._pending: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waking = False
        self._lock = threading.Lock()
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_current(self) -> bool:
        """True when the caller runs on this thread, where blocking would stop everything."""
        return threading.current_thread() is self._thread

    def submit(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` soon on the loop. Calls keep the order in which they were made."""
        with self._lock:
            self._pending.append((callback, args))
            if self._waking:
                return
            self._waking = True
        self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            batch, self._pending = self._pending, deque()
            self._waking = False
        for callback, args in batch:
            try:
                callback(*args)
            except Exception:
                logger.exception("A background callback failed: %r", callback)


def loop_time() -> float:
    """Seconds on the running loop's clock: what every wait of the SDK is measured by."""
    return asyncio.get_running_loop().time()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed (it comes with `tinkex[server]`), else asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_background: LoopThread | None = None
_background_lock = threading.Lock()


def background() -> LoopThread:
    """The process's loop thread, started when first asked for."""
    global _background
    current = _background
    if current is not None:
        return current
    with _background_lock:
        if _background is None:
            _background = LoopThread()
        return _background


def _forget_after_fork() -> None:
    global _background, _background_lock
    _background = None
    _background_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
