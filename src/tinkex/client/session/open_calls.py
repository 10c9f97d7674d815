"""What runs for one holder: its calls, its background tasks, and who else has to be closed.

It knows how to end all of it, and lets a call that was ended say why instead of "cancelled".
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tinkex.client.futures import cancel_all


class Closable(Protocol):
    """Something with tasks of its own on the background loop."""

    async def close(self) -> None: ...


class OpenCalls:
    """Lives on the background loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Weak: a program makes a sampler per step, and each is only closed here if it still lives.
        self._owned: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._ended: set[asyncio.Task[Any]] = set()
        self._why: Callable[[], Exception] = asyncio.CancelledError  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._calls) + len(self._tasks) + len(self._owned)

    def __enter__(self) -> None:
        """The current task is a call from here to the end of the block."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.discard(task)
        if isinstance(error, asyncio.CancelledError) and task in self._ended:
            raise self._why() from None

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside the calls until all of it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close_first(self, owned: Closable) -> None:
        """Await `owned.close()` before the calls are ended."""
        self._owned.add(owned)

    def cancel(self, why: Callable[[], Exception]) -> set[asyncio.Task[Any]]:
        """End every call with the error that `why` makes, and every task."""
        self._why = why
        self._ended.update(self._calls)
        ending = self._calls | self._tasks
        for task in ending:
            task.cancel()
        return ending

    async def close(self, why: Callable[[], Exception]) -> None:
        for owned in tuple(self._owned):
            await owned.close()
        await cancel_all(self.cancel(why))
