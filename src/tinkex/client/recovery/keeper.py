"""A thread that does one thing after another for its owner, and looks around in between.

A recovering client hands it what may take minutes: to decide what an error means, and to rebuild a
run. It knows neither. It starts with the first work and ends after a while without any, so a client
that nobody uses costs no thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tinkex.client.background_loop import background
from tinkex.client.recovery.run_monitor import SLICE_S
from tinkex.errors import ClientClosedError

logger = logging.getLogger("tinkex.recovery")

# Between two steps of a loop it would end and start again for nothing.
_LINGER_S = 10.0


class Keeper:
    """Does what it is handed, in order. `look()` says whether there is something to look after."""

    def __init__(self, name: str, look: Callable[[], bool]) -> None:
        self._name = name
        self._look = look
        self._wake = threading.Condition()
        self._work: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_needed = False
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """True where the owner's futures end: on this thread, and on the background loop."""
        return threading.current_thread() is self._thread or background().is_current

    def submit(self, callback: Callable[..., object], *args: Any) -> None:
        """Do this after all that was handed over before."""
        with self._wake:
            self._work.append((callback, args))
            self._start()
            self._wake.notify()

    def stay(self) -> None:
        """There is something to look after; be there, and start looking within a moment."""
        with self._wake:
            self._is_needed = True
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        needed_s = time.monotonic()
        while True:
            try:
                if self._do_next() or self._look():
                    needed_s = time.monotonic()
            except ClientClosedError:  # the program is ending
                pass
            except Exception:
                # The thread must not end here: futures that wait for it would never be answered.
                logger.exception("Looking after a run failed; going on.")
            if self._may_end(time.monotonic() - needed_s):
                return

    def _do_next(self) -> bool:
        with self._wake:
            if not self._work:
                self._wake.wait(SLICE_S)
            if not self._work:
                return False
            callback, args = self._work.popleft()
        callback(*args)
        return True

    def _may_end(self, idle_s: float) -> bool:
        # Under the lock: work handed over in this moment either finds the thread or starts another.
        with self._wake:
            if self._work or self._is_needed or idle_s < _LINGER_S:
                self._is_needed = False
                return False
            self._thread = None
            return True
