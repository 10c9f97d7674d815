"""A waiting line for coroutines: first come, first served, and whoever leaves lets the next in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class WaitingLine:
    """Lives on one event loop. Who is let in, and when, is for the owner of the line to decide."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: deque[tuple[asyncio.Future[None], int]] = deque()

    def __len__(self) -> int:
        return len(self._turns)

    async def wait(self, size: int, give_back: Callable[[int], object]) -> None:
        """Wait for a turn. `give_back(size)` is called when it came and was cancelled at once."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            # Cancelled after the turn was given: nobody else would ever hear of that turn.
            if turn.done() and not turn.cancelled():
                give_back(size)
            raise

    def wake(self) -> int | None:
        """Let the first in line go on: its size, or None when nobody waits."""
        while self._turns:
            turn, size = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return size
        return None
