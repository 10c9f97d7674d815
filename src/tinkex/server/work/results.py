"""Results as they are asked for: from memory while they are young, else from the journal.

A promise in memory is the quick way to a result; the journal is the lasting one. A large result
leaves the memory once it is in the journal, a fetched one too, and one that nobody fetches after
the grace; a poll that comes then reads the row. A promise made from a row is not put back.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tinkex.server.process.problems import ApiError
from tinkex.server.work.futures import Outcome, Promise, PromiseTable, request_type
from tinkex.server.work.write_behind import WriteBehind
from tinkex.store import Ended, Fetched, JournalOutline, Store, UsageCount

LARGE_RESULT_BYTES = 65_536
"""Results beyond this leave the memory once they are in the journal."""


_GONE = "The result was handed out before and is gone."


class Results:
    def __init__(
        self,
        store: Store,
        promises: PromiseTable,
        ends: WriteBehind,
        *,
        grace_s: float,
        resume: Callable[[str], Awaitable[None]],
    ) -> None:
        self._store = store
        self._promises = promises
        self._ends = ends
        self._grace_s = grace_s
        ends.on_written = self._let_go
        self._resume = resume  # makes a model's unfinished requests go on

    def promise(self, request_id: str, user_id: str, name: str) -> Promise:
        """A new promise of an operation's result."""
        promise = Promise(request_id, user_id, request_type(name))
        promise.on_settle = self._promises.settled
        return self._promises.add(promise)

    async def find(self, request_id: str) -> Promise | None:
        known = self._promises.get(request_id)
        if known is not None:
            return known
        row = await self._store.call(self._store.journal.get, request_id)
        if row is None:
            return None
        if row.state == "accepted":  # its lane has not been opened since the start
            await self._resume(row.model_id)
        # Opening the lane made a promise for it, which `of_row` finds.
        return self.of_row(row)

    def of_row(self, row: JournalOutline) -> Promise:
        known = self._promises.get(row.request_id)
        if known is not None:
            return known
        promise = Promise(row.request_id, row.user_id, request_type(row.kind))
        promise.outcome = self._outcome(row)
        return promise

    def settle(
        self,
        promise: Promise,
        outcome: Outcome,
        started_at: float,
        usage: tuple[UsageCount, ...] = (),
    ) -> None:
        """Journal how a request ended, and settle its promise.

        A success may be told first: lost in a crash, it runs again and ends the same. A failure
        may not: who was told that a request was not run must not find its effect after a crash.
        """
        if outcome.ok:
            # Put before it is settled: whoever fetches it at once puts `Fetched` behind its end.
            self.record(promise.request_id, outcome, started_at, usage)
            promise.settle(outcome)
        else:
            promise.reason = lambda: "it failed; the journal has yet to take note of it"
            then = partial(promise.settle, outcome)
            self.record(promise.request_id, outcome, started_at, then=then)

    def record(
        self,
        request_id: str,
        outcome: Outcome,
        started_at: float,
        usage: tuple[UsageCount, ...] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """Journal the end of a request a moment later, and call `then` once it is durable."""
        end = Ended(
            request_id=request_id,
            result=outcome.payload if outcome.ok else None,
            result_type=outcome.kind if outcome.ok else None,
            error=None if outcome.ok else outcome.error,
            error_category=outcome.category or None,
            started_at=started_at or None,
            finished_at=time.time(),
            usage=usage,
        )
        self._ends.put(end, then)

    def fetched(self, request_id: str) -> None:
        """A result was handed out: the journal keeps it for the grace, so the memory need not."""
        drop_at = time.time() + self._grace_s
        self._ends.put(Fetched(request_id=request_id, drop_result_at=drop_at))

    def _let_go(self, notes: Sequence[Ended | Fetched]) -> None:
        """Results in the journal may leave the memory: at once what was fetched or is large."""
        now, soon = [], []
        for note in notes:
            if isinstance(note, Fetched):
                if not self._ends.is_behind:  # else its end may not be in the journal yet
                    now.append(note.request_id)
            elif note.result is not None and len(note.result) > LARGE_RESULT_BYTES:
                now.append(note.request_id)
            else:
                soon.append(note.request_id)
        self._promises.soon(soon)
        self._promises.drop(now)

    def _outcome(self, row: JournalOutline) -> Outcome:
        if row.state in ("failed", "refused"):
            return Outcome(error=row.error or "failed", category=row.error_category or "server")
        # No lane has it: it ran, and a crash on a full disk lost its end.
        if row.state == "accepted":
            error = "The request ran, but its result was lost when the server died."
            return Outcome(error=error, category="lost")
        if row.result_bytes is None:
            return Outcome(error=_GONE, category="lost")
        return Outcome(
            kind=row.result_type or "json",  # type: ignore[arg-type]
            load=partial(self._load, row.request_id),
            stored_bytes=row.result_bytes,
        )

    def _load(self, request_id: str) -> bytes:
        """The result in the journal. Blocks."""
        result = self._store.journal.result(request_id)
        if result is None:  # its time ended since its row was read
            raise ApiError(410, _GONE)
        return result
