"""The thread of a recovering client: it decides what errors mean, and rebuilds a lost run.

Both may take minutes, so neither may happen on the background loop or in a caller's thread. The
thread knows neither: it does what it is handed, one job after the other, and calls `look` whenever
there is none. It starts with the client and ends once `is_over` says so.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from tinkex.client.background_loop import background
from tinkex.client.recovery.run_monitor import SLICE_S
from tinkex.errors import ClientClosedError

logger = logging.getLogger("tinkex.recovery")


class Keeper:
    """Does what it is handed, in order. `look` returns when to be called again; None is never."""

    def __init__(
        self, name: str, look: Callable[[], float | None], is_over: Callable[[], bool]
    ) -> None:
        self._look = look
        self._is_over = is_over
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """True where the owner's futures end: on this thread, and on the background loop."""
        return threading.current_thread() is self._thread or background().is_current

    def submit(self, callback: Callable[..., object], *args: Any) -> None:
        """Do this after all that was handed over before."""
        self._jobs.put(lambda: callback(*args))

    def wake(self) -> None:
        """Look now: what `look` answered last no longer holds."""
        self._jobs.put(_nothing)

    def _run(self) -> None:
        wait_s: float | None = SLICE_S
        while not self._is_over():
            try:
                self._next_job(wait_s)()
                wait_s = self._look()
            except ClientClosedError:  # the program is ending
                wait_s = SLICE_S
            except Exception:
                # The thread must not end here: futures that wait for it would never be answered.
                logger.exception("Looking after a run failed; going on.")
                wait_s = SLICE_S

    def _next_job(self, wait_s: float | None) -> Callable[[], object]:
        try:
            return self._jobs.get(timeout=wait_s)
        except queue.Empty:
            return _nothing


def _nothing() -> None:
    """The job of a thread that was only woken."""
