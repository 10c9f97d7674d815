"""Results as they are asked for: from memory while they are young, else from the journal.

A promise in memory is the quick way to a result; the journal is the lasting one. A large result
leaves the memory once it is in the journal, a fetched one too, and one that nobody fetches after
the grace; a poll that comes then reads the row. A promise made from a row is not put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial

from tinkex.server.operations.operation import request_type
from tinkex.server.work.futures import Outcome, Promise, PromiseTable
from tinkex.server.work.write_behind import WriteBehind
from tinkex.store import JournalRow, Store, UsageCount

LARGE_RESULT_BYTES = 65_536
"""Results beyond this leave the memory once they are in the journal."""


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
        self._resume = resume  # makes a model's unfinished requests go on

    def promise(self, request_id: str, user_id: str, name: str) -> Promise:
        """A new promise of an operation's result."""
        promise = Promise(request_id, user_id, request_type(name))
        promise.on_settle = self._promises.settled
        return self._promises.add(promise)

    async def find(self, request_id: str) -> Promise | None:
        found = self._promises.get(request_id)
        if found is not None:
            return found
        row = await self._store.call(self._store.journal.get, request_id)
        if row is None:
            return None
        if row.state == "accepted":  # its lane has not been opened since the start
            await self._resume(row.model_id)
        return self.of_row(row)

    def of_row(self, row: JournalRow) -> Promise:
        found = self._promises.get(row.request_id)
        if found is not None:
            return found
        promise = Promise(row.request_id, row.user_id, request_type(row.kind))
        promise.outcome = _outcome(row)
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
        journal, began = self._store.journal, started_at or None

        def write() -> Future[None]:
            if not outcome.ok:
                written = journal.fail(
                    request_id, outcome.error, outcome.category, started_at=began
                )
            else:
                written = journal.finish(
                    request_id,
                    outcome.payload,
                    result_type=outcome.kind,
                    started_at=began,
                    usage=usage,
                )
            is_large = len(outcome.payload) > LARGE_RESULT_BYTES
            leave = self._promises.drop if is_large else self._promises.soon
            self._after(written, leave, request_id)
            return written

        self._ends.put(write, then)

    def fetched(self, request_id: str) -> None:
        """A result was handed out: the journal keeps it for the grace, so the memory need not."""
        self._ends.put(partial(self._mark_retrieved, request_id))

    def _mark_retrieved(self, request_id: str) -> Future[None]:
        written = self._store.journal.retrieved(request_id, self._grace_s)
        if not self._ends.is_behind:  # else its end may not be in the journal yet
            self._after(written, self._promises.drop, request_id)
        return written

    def _after(
        self, written: Future[None], leave: Callable[[list[str]], None], request_id: str
    ) -> None:
        """Let the memory go of a result once it is in the journal; without room there it stays."""
        loop = asyncio.get_running_loop()

        def look(done: Future[None]) -> None:  # on the store's thread
            if done.exception() is None and not loop.is_closed():
                loop.call_soon_threadsafe(leave, [request_id])

        written.add_done_callback(look)


def _outcome(row: JournalRow) -> Outcome:
    if row.state in ("failed", "refused"):
        return Outcome(error=row.error or "failed", category=row.error_category or "server")
    if row.state == "accepted":  # no lane has it: it ran, and a crash on a full disk lost its end
        error = "The request ran, but its result was lost when the server died."
        return Outcome(error=error, category="lost")
    if row.result is None:
        return Outcome(error="The result was handed out before and is gone.", category="lost")
    return Outcome(kind=row.result_type or "json", payload=row.result)  # type: ignore[arg-type]
