"""Requests that wait for a number which never comes fail after a while, instead of for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinkex.server.work.futures import Outcome
from tinkex.server.work.request_queue import RequestQueue


class GapTimer:
    def __init__(
        self,
        queue: RequestQueue,
        model_id: str,
        limit_s: float,
        fail_all: Callable[[Outcome], None],
    ) -> None:
        self._queue, self._model_id = queue, model_id
        self._limit_s, self._fail_all = limit_s, fail_all
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, *, is_idle: bool) -> None:
        """Begin to wait when an idle lane has a gap, and stop when it has none."""
        has_gap = is_idle and self._queue.has_gap
        if not has_gap:
            self.cancel()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self.expire)

    def expire(self) -> None:
        """Fail what waits behind a gap."""
        self._timer = None
        if not self._queue.has_gap:
            return
        missing = self._queue.gap
        shown = ", ".join(str(n) for n in missing[:5]) + (", ..." if len(missing) > 5 else "")
        self._fail_all(
            Outcome(
                error=f"seq_id {shown} of {self._model_id} did not arrive within "
                f"{self._limit_s:g} s, so the requests after it were not run. "
                "Number requests without gaps, and send this one again under a new number.",
                category="user",
            )
        )

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
