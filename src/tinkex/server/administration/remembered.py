"""Answers that cost the database much, found once in a few seconds however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
MAX_KEPT = 64


class Remembered:
    """Whoever asks while an answer is being found waits for it too; a failure is not kept."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._found: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def of(self, key: Hashable, find: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The value that `find` gave for this key, at most `for_s` seconds ago."""
        now = time.monotonic()
        until, task = self._found.get(key, (0.0, None))
        if task is None or until <= now or (task.done() and _failed(task)):
            self._found = {k: one for k, one in self._found.items() if one[0] > now}
            if len(self._found) >= MAX_KEPT:
                self._found.clear()
            task = asyncio.create_task(find())
            self._found[key] = now + self._for_s, task
        answer: Awaitable[T] = asyncio.shield(task)
        return await answer


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
