"""What batched pollers are told: which of their samples have finished, and which still wait.

A poller is one (sampling session, clone); a sample belongs to it by its number. Each poller has a
log of what finished, in that order, and a ledger on disk remembers what was promised to all of
them: a sample that a crash of the server lost is in the log of its poller after the restart, so
that a client that waits for it is told at once (410) and asks again.

Who waits for whom: a log wakes the batched polls that are held, a promise the single ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinkex.server.work.futures import Polls, Promise
from tinkex.store import SampleLedger

CLONE_STRIDE = 10**9
"""The numbers of one clone; a client counts from its clone's number times this."""
IDLE_LOG_S = 3600.0
LOST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class FinishedSample:
    cursor: int
    request_id: str
    size_bytes: int


class FinishedLog:
    """The samples of one poller: the finished ones in the order they finished, and the others.

    Cursors start at the server's start time in microseconds, so that a cursor a client kept from
    before a restart is behind every new entry. Where the clock went back in between it is not, and
    the entries are numbered again behind it.
    """

    def __init__(self, *, start: int | None = None) -> None:
        self._entries: deque[FinishedSample] = deque()
        self._unfinished: dict[str, Promise] = {}
        self._cursor = int(time.time() * 1e6) if start is None else start
        self.polls = Polls()
        self.used_at = time.monotonic()

    def promised(self, promise: Promise) -> None:
        self._unfinished[promise.request_id] = promise

    def add(self, request_id: str, size_bytes: int) -> None:
        self._unfinished.pop(request_id, None)
        if not self._entries:  # its hour begins now, however long the sample was waited for
            self.used_at = time.monotonic()
        self._cursor += 1
        self._entries.append(FinishedSample(self._cursor, request_id, size_bytes))
        self.polls.wake()

    @property
    def is_of_no_use(self) -> bool:
        """Nothing is in it and nobody waits for it: a new one would do as well."""
        return not (self._entries or self._unfinished or self.polls)

    def unfinished(self, limit: int) -> list[Promise]:
        """Samples that are not done, the oldest first."""
        pairs = zip(self._unfinished.values(), range(limit), strict=False)
        return [promise for promise, _ in pairs]

    def after(self, cursor: int, limit: int = 1000) -> list[FinishedSample]:
        """Entries later than `cursor`; those at or before it are forgotten."""
        if cursor > self._cursor:
            self._continue_after(cursor)
        # A client names the cursor it was given: it has what came before, and will not ask again.
        while self._entries and self._entries[0].cursor <= cursor:
            self._entries.popleft()
        self.used_at = time.monotonic()
        return [entry for entry, _ in zip(self._entries, range(limit), strict=False)]

    def _continue_after(self, cursor: int) -> None:
        entries = [replace(e, cursor=cursor + n + 1) for n, e in enumerate(self._entries)]
        self._entries, self._cursor = deque(entries), cursor + len(entries)

    async def wait_after(self, cursor: int, timeout_s: float) -> list[FinishedSample]:
        if entries := self.after(cursor):
            return entries
        await self.polls.wait(timeout_s)
        return self.after(cursor)

    def clear(self) -> None:
        """Forget what finished: nobody came for it."""
        self._entries.clear()


class FinishedLogs:
    """The logs of all pollers, and the ledger of what was promised to them."""

    def __init__(self, ledger: SampleLedger) -> None:
        self._ledger = ledger
        self._logs: dict[tuple[str, int], FinishedLog] = {}
        self._lost = list(ledger.lost)
        self._started_at = time.monotonic()
        for request_id in self._lost:
            if (poller := _poller_of(request_id)) is not None:
                self.log(*poller).add(request_id, 0)

    def log(self, sampling_session_id: str, clone: int) -> FinishedLog:
        poller = (sampling_session_id, clone)
        log = self._logs.get(poller)
        if log is None:
            log = self._logs[poller] = FinishedLog()
        return log

    def leave(self, sampling_session_id: str, clone: int) -> None:
        """A poll was answered: forget a log that has nothing to tell."""
        poller = (sampling_session_id, clone)
        log = self._logs.get(poller)
        if log is not None and log.is_of_no_use:
            del self._logs[poller]

    def promised(self, promise: Promise) -> None:
        """Note a sample before anybody is told of its promise.

        Raises:
            OSError: There is no room to note it; nothing is promised then.
        """
        self._ledger.promised(promise.request_id)
        if (poller := _poller_of(promise.request_id)) is not None:
            self.log(*poller).promised(promise)

    def settled(self, promise: Promise) -> None:
        """Tell the poller of a sample that it has finished."""
        if (poller := _poller_of(promise.request_id)) is not None:
            size = promise.outcome.size_bytes if promise.outcome else 0
            self.log(*poller).add(promise.request_id, size)

    def handed_out(self, request_ids: Iterable[str]) -> None:
        """Strike samples out of the ledger: their clients have them, or know that they are lost."""
        self._ledger.handed_out(request_ids)

    def forget(self) -> None:
        """Drop logs nobody asked for in an hour, and losses nobody asked for in a day."""
        now = time.monotonic()
        if self._lost and now - self._started_at > LOST_S:
            self.handed_out(self._lost)
            self._lost = []
        idle = [key for key, log in self._logs.items() if now - log.used_at > IDLE_LOG_S]
        for key in idle:
            self._logs[key].clear()
            self.leave(*key)

    def wake_all(self) -> None:
        for log in self._logs.values():
            log.polls.wake()

    def close(self) -> None:
        self._ledger.close()


def _poller_of(request_id: str) -> tuple[str, int] | None:
    """The (sampling session, clone) whose poller waits for a sample; None when it has no number."""
    session_id, _, seq_id = request_id.rpartition(":")
    return (session_id, int(seq_id) // CLONE_STRIDE) if seq_id.isdigit() else None
