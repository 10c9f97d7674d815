"""Write checkpoints beside the engine's thread, which copies them and goes on.

There is one copy at a time: saves that come faster than the disk would fill the memory, so the
next one waits for the one before. Unnamed weights have a thread of their own and do not wait for a
large checkpoint; they are synced later, by the other thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tinkex.engine import folders, jobs
from tinkex.engine.reports import attempt

_LATER_S = 0.5
"""How long unnamed weights wait for the disk: first the server's journal hears of them."""


class Saves:
    def __init__(self, name: str) -> None:
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-disk")
        self._quick_disk = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-quick-disk")
        self._written: dict[ThreadPoolExecutor, Future[None]] = {}

    def save(
        self,
        job: jobs.SaveAdapterJob,
        emit: jobs.Emit,
        capture: Callable[[jobs.SaveAdapterJob], Callable[[], jobs.AdapterResult]],
    ) -> None:
        """Copy an adapter now, once the copy before it is written; write it on another thread."""
        disk = self._quick_disk if job.ephemeral else self._disk
        if (before := self._written.get(disk)) is not None:
            before.result()
        self._written[disk] = disk.submit(attempt, job, emit, capture(job))
        if job.ephemeral:
            self._written[disk].add_done_callback(
                lambda _: self._disk.submit(_make_safe, job.folder)
            )

    def close(self) -> None:
        """Wait until all is written. The quick thread first: it hands its folders to the other."""
        self._quick_disk.shutdown()
        self._disk.shutdown()


def _make_safe(folder: str) -> None:
    """Sync a folder. If it could not be written, or is gone by now, that was told elsewhere."""
    time.sleep(_LATER_S)
    with contextlib.suppress(OSError):
        folders.make_safe(folder)
