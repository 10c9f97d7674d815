"""A limit on how long requests wait for a number that never comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinkex.server.work.futures import Outcome
from tinkex.server.work.request_queue import RequestQueue


class GapTimer:
    """Fails what waits behind a gap after a while, instead of letting it wait for ever."""

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

    @property
    def reason(self) -> str:
        """Why the requests behind a gap wait, for a person."""
        return (
            f"waiting for seq_id {self._queue.numbers.next} of {self._model_id}, which has not "
            f"arrived; {len(self._queue)} later requests wait for it"
        )

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
