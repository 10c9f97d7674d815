"""Promises: what a client polls until its request is done.

A `Promise` is settled once, wakes every poll that waits for it, and says in words why it is not
settled yet. The table keeps a settled promise until it was fetched (plus a grace, in case the
answer was lost on the way) or until its time to live ends. Nobody polls a table: waiting is an
asyncio event, and expiry a look at what is left in memory. Encoding a result for HTTP is the work
of the routes; what survives a restart is the store's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PayloadKind = Literal["json", "train", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: a payload, or an error with its category."""

    kind: PayloadKind = "json"
    """`json`: payload is JSON. `train`, `sample`: payload is the protobuf of the contract."""
    payload: bytes = b""
    error: str = ""
    category: str = ""
    """Empty for a success, else `user`, `server`, `cancelled` or `lost`."""
    load: Callable[[], bytes] | None = None
    """Reads the payload where it has left the memory. Blocks."""
    stored_bytes: int = 0
    """How much `load` reads."""
    file: Path | None = None
    """The file of its own in which it lies then, if it does."""

    @property
    def size_bytes(self) -> int:
        return len(self.payload) if self.load is None else self.stored_bytes

    def content(self) -> bytes:
        """The payload, wherever it is. Blocks when it has left the memory."""
        return self.payload if self.load is None else self.load()

    @property
    def ok(self) -> bool:
        return not self.category


class Polls(list[asyncio.Future[None]]):
    """The polls that are held for one promise to be settled, or one log to have something new."""

    __slots__ = ()

    async def wait(self, timeout_s: float) -> None:
        """Until `wake`, or until the time is up."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self.append(waiter)
        # A timer that resolves the waiter, not `wait_for`: a time-out is an answer here, and the
        # hundreds of polls that are held must not each cost a task and an exception.
        handle = loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:  # a client that hung up cancels this, and must leave nothing behind
            handle.cancel()
            if waiter in self:
                self.remove(waiter)

    def wake(self) -> None:
        for waiter in self:
            _wake(waiter)
        self.clear()


@dataclass(slots=True, eq=False)
class Promise:
    request_id: str
    user_id: str
    request_type: str
    reason: Callable[[], str] = field(default=lambda: "waiting")
    """Says why the promise is not settled; asked only when a poll gives up."""
    cancel: Callable[[], None] | None = None
    outcome: Outcome | None = None
    is_fetched: bool = False
    expires_at: float = math.inf
    on_settle: Callable[[Promise], None] | None = None
    on_drop: Callable[[Promise], None] | None = None
    """Told when nobody can fetch the result any more."""
    polls: Polls = field(default_factory=Polls)
    digest: bytes = b""
    """The hash of a sample's body, by which a repeat is known; empty for other requests."""

    def settle(self, outcome: Outcome) -> bool:
        """Set the outcome; the first one stays. Returns whether this was the first."""
        if self.outcome is not None:
            return False
        self.outcome = outcome  # before the polls wake: they look at it
        # Nobody asks any more, and these hold the whole request in memory.
        self.reason, self.cancel = _settled, None
        self.polls.wake()
        if self.on_settle is not None:
            self.on_settle(self)
        return True

    async def wait(self, timeout_s: float, stopping: asyncio.Event) -> Outcome | None:
        """The outcome, or None when the time is up or the server stops."""
        if self.outcome is None and not stopping.is_set():
            await self.polls.wait(timeout_s)
        return self.outcome


def is_loading(progress: str) -> bool:
    """Whether a request waits for its base model, which may take minutes."""
    return progress.startswith("loading ")


def request_type(name: str) -> str:
    """The name of an operation as answers say it: `ForwardBackward` of forward_backward."""
    return "".join(word.capitalize() for word in name.split("_"))


def _settled() -> str:
    return "done"


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class PromiseTable:
    """Promises by request id. `forget_expired` is called by the clock, not by a request."""

    def __init__(
        self, *, ttl_s: float, grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._promises: dict[str, Promise] = {}
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._clock = clock

    def __len__(self) -> int:
        return len(self._promises)

    def add(self, promise: Promise) -> Promise:
        self._promises[promise.request_id] = promise
        return promise

    def get(self, request_id: str) -> Promise | None:
        return self._promises.get(request_id)

    def settled(self, promise: Promise) -> None:
        # The nearer of the two: the journal may have it already (`soon`).
        promise.expires_at = min(promise.expires_at, self._clock() + self._ttl_s)

    def fetched(self, promise: Promise) -> bool:
        """Its result was handed out: start the grace. False when it was handed out before."""
        if promise.is_fetched:
            return False
        promise.is_fetched = True
        promise.expires_at = self._clock() + self._grace_s
        return True

    def soon(self, request_ids: Iterable[str]) -> None:
        """These can be found elsewhere: after the grace they need not be here."""
        for request_id in request_ids:
            if (promise := self._promises.get(request_id)) is not None:
                promise.expires_at = min(promise.expires_at, self._clock() + self._grace_s)

    def drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            promise = self._promises.get(request_id)
            # One that is not settled belongs to its lane, which will settle this very object.
            if promise is not None and promise.outcome is not None:
                del self._promises[request_id]
                if promise.on_drop is not None:
                    promise.on_drop(promise)

    def forget_expired(self) -> int:
        """Drop what was fetched long enough ago or waited too long; returns how many."""
        now = self._clock()
        expired = [key for key, promise in self._promises.items() if promise.expires_at <= now]
        self.drop(expired)
        return len(expired)

    def wake_all(self) -> None:
        for promise in list(self._promises.values()):
            promise.polls.wake()
