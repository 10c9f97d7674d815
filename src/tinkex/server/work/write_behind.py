"""Tell the journal what became of requests a moment later, many at once.

Nobody waits for the good end of a request to be written: when it is lost in a crash, the request
simply runs again. A commit costs an fsync, and the promises of the next requests wait behind it;
gathering the ends of a few milliseconds keeps the disk for them, and the notes of a gathering are
one write to the store and one answer from it. Notes that have waited long enough go along with the
next promise, whose commit they share (`ride`); where none comes they soon get one of their own.

A note that finds no room on the disk is kept and written again until it succeeds, because a replay
goes by what the journal says: `is_behind` until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tinkex.server.process import disk
from tinkex.store import Ended, Fetched
from tinkex.store.journal import Journal

DELAY_S = 0.025
"""How long notes are gathered. They wait twice as long when there is no commit to share."""
RETRY_S = 1.0
MAX_WAITING = 256
Note = Ended | Fetched
Then = Callable[[], object]


class WriteBehind:
    def __init__(
        self, journal: Journal, *, delay_s: float = DELAY_S, retry_s: float = RETRY_S
    ) -> None:
        self._journal = journal
        self._delay_s = delay_s
        self._retry_s = retry_s
        self._waiting: list[tuple[Note, Then | None]] = []
        self._failed: list[tuple[Note, Then | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ride_at = 0.0
        self.on_written: Callable[[Sequence[Note]], None] | None = None
        """Told what is durable now."""

    @property
    def is_behind(self) -> bool:
        """Whether a note could not be written and was not written since."""
        return bool(self._failed)

    def put(self, note: Note, then: Then | None = None) -> None:
        """Write `note` soon, after everything put before it, and call `then` once it is durable.

        A note that can never be written is logged by the store, and `then` is called all the same:
        somebody waits for it.
        """
        self._waiting.append((note, then))
        if len(self._waiting) >= MAX_WAITING:
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._ride_at = loop.time() + self._delay_s
            self._timer = loop.call_later(2 * self._delay_s, self.flush)

    def ride(self) -> None:
        """A request is about to be written to the journal: what has waited its time goes along."""
        # Behind, each ride would try again what failed, and hold the new request up with it.
        if not self._waiting or self.is_behind:
            return
        if asyncio.get_running_loop().time() >= self._ride_at:
            self.flush()

    def flush(self) -> None:
        """Hand everything over now, what failed before first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # In the order of their ends: `Fetched` must not be written before the end it is about.
        notes = [*self._failed, *self._waiting]
        self._failed, self._waiting = [], []
        if not notes:
            return
        loop = asyncio.get_running_loop()

        def look(done: Future[list[BaseException | None]]) -> None:  # on the store's thread
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._look, notes, done)

        self._journal.note([note for note, _ in notes]).add_done_callback(look)

    async def caught_up(self) -> None:
        """Wait until the journal has answered for everything put before."""
        self.flush()
        await asyncio.wrap_future(self._journal.note(()))  # the store answers in order

    def _look(
        self, notes: list[tuple[Note, Then | None]], done: Future[list[BaseException | None]]
    ) -> None:
        # All fail alike when another server took the database over; else each has its own answer.
        failure = done.exception()
        errors = done.result() if failure is None else [failure] * len(notes)
        written = []
        for (note, then), error in zip(notes, errors, strict=True):
            if error is not None and disk.may_pass(error):
                self._failed.append((note, then))
                continue
            if error is None:
                written.append(note)
            if then is not None:
                then()
        if self._failed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._retry_s, self.flush)
        if self.on_written is not None:
            self.on_written(written)
