"""The one background thread of the process: an event loop that does all networking of all clients.

Started by the first call, never at import; a daemon, so that it never keeps a program alive. Work
handed over from other threads is queued and the loop is woken once for all of it: waking costs a
system call, and thousands of samples are submitted in a burst. After a fork the child starts
afresh, because threads do not survive one. When the interpreter ends, so does the loop: a callback
of uvloop that came later would ask a dead interpreter for its lock and crash the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tinkex.errors import ClientClosedError

logger = logging.getLogger("tinkex.loop")
_END_S = 3.0


class LoopThread:
    """An asyncio loop on a daemon thread. `submit` may be called from any thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._pending: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waking = False
        self._ended = False
        self._lock = threading.Lock()
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="tinkex", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_current(self) -> bool:
        """True when the caller runs on this thread, where blocking would stop everything."""
        return threading.current_thread() is self._thread

    def submit(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` soon on the loop. Calls keep the order in which they were made.

        Raises:
            ClientClosedError: The program is ending and the loop has ended.
        """
        with self._lock:
            if self._ended:
                raise ClientClosedError(
                    "The program is ending and requests have stopped. Send the last ones earlier, "
                    "or register your exit handler after `import tinkex`."
                )
            self._pending.append((callback, args))
            if self._waking:
                return
            self._waking = True
        self.loop.call_soon_threadsafe(self._drain)

    def end(self) -> None:
        """Stop the loop and wait for its thread, a few seconds at most."""
        with self._lock:
            self._ended = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)

    def _drain(self) -> None:
        with self._lock:
            # Both under one lock: a call that came in between would be queued and wake nobody.
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


def end_background() -> None:
    """For the exit of the interpreter; see `tinkex/__init__.py`."""
    if _background is not None:
        _background.end()


def _forget_after_fork() -> None:
    global _background, _background_lock
    _background = None
    # Another thread of the parent may have held the lock at the fork; nobody would release it.
    _background_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
