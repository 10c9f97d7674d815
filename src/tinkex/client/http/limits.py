"""Holding back before a server has to: one rate limiter per account, and budgets in bytes.

The limiters live on the SDK's event loop. They know waiting and counting, not HTTP: a caller tells
them what a 429 said. `RateLimiter.of` gives one to all clients of the process with the same base
URL and key, because the limit it mirrors is the account's, not the client's (R14).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

from tinkex.client.background_loop import loop_time
from tinkex.client.http.retry import obeyed_s
from tinkex.client.http.waiting_line import WaitingLine

_GRACE_S = 10.0


class RateLimiter:
    """A moment before which nobody may send. A later, shorter wait never shortens a longer one."""

    _shared: ClassVar[dict[tuple[str, str], RateLimiter]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, clock: Callable[[], float] = loop_time) -> None:
        self._clock = clock
        self._until = float("-inf")

    @classmethod
    def of(cls, base_url: str, api_key: str | None) -> RateLimiter:
        """The limiter that all clients of this process share for one account at one service."""
        digest = hashlib.sha256((api_key or "").encode()).hexdigest()
        with cls._shared_lock:
            return cls._shared.setdefault((base_url, digest), cls())

    def hold(self, seconds: float) -> None:
        self._until = max(self._until, self._clock() + seconds)

    @property
    def delay_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    def in_recent_backoff(self) -> bool:
        """True from the first hold until some time after the last one ended."""
        return self._clock() < self._until + _GRACE_S

    async def wait(self) -> None:
        while (delay := self.delay_s) > 0:
            await asyncio.sleep(delay)


class ByteSemaphore:
    """Admits a request whenever the balance is not negative; one request may push it below zero.

    First come, first served: a large request is not overtaken for ever by small ones.
    """

    def __init__(self, size_bytes: int) -> None:
        self.balance = size_bytes
        self._line = WaitingLine()

    async def acquire(self, num_bytes: int) -> None:
        if self.balance >= 0 and not self._line:
            self.balance -= num_bytes
            return
        await self._line.wait(num_bytes, self.release)

    def release(self, num_bytes: int) -> None:
        self.balance += num_bytes
        while self.balance >= 0 and (wanted := self._line.wake()) is not None:
            self.balance -= wanted

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        await self.acquire(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)


class SampleGate:
    """The gate before a sample is submitted (6.3): slots, fewer after a 429, then bytes."""

    SLOTS = 400
    SLOTS_AFTER_BACKOFF = 10
    BACKOFF_WEIGHT = 20

    def __init__(self, limiter: RateLimiter, size_bytes: int) -> None:
        self.limiter = limiter
        self.slots = asyncio.Semaphore(self.SLOTS)
        self.few_slots = asyncio.Semaphore(self.SLOTS_AFTER_BACKOFF)
        self.bytes = ByteSemaphore(size_bytes)

    def admit(self, num_bytes: int) -> _Admission:
        return _Admission(self, num_bytes)

    def hold_back(self, num_bytes: int, asked_s: float | None) -> None:
        """A submit was refused for load: the whole account waits, a minute at most."""
        own_s = 1.0 if num_bytes <= 131_072 else 5.0
        self.limiter.hold(obeyed_s(asked_s) or own_s)


class _Admission:
    """`async with`: past the gate. A class: nested generators were a tenth of a sample's cost."""

    __slots__ = ("_gate", "_is_one_of_few", "_num_bytes")

    def __init__(self, gate: SampleGate, num_bytes: int) -> None:
        self._gate, self._num_bytes = gate, num_bytes
        self._is_one_of_few = False

    async def __aenter__(self) -> None:
        gate = self._gate
        await gate.slots.acquire()
        try:
            if gate.limiter.in_recent_backoff():
                await gate.few_slots.acquire()
                self._is_one_of_few = True
                self._num_bytes *= gate.BACKOFF_WEIGHT
            await gate.bytes.acquire(self._num_bytes)
        except BaseException:
            self._give_slots_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._gate.bytes.release(self._num_bytes)
        self._give_slots_back()

    def _give_slots_back(self) -> None:
        if self._is_one_of_few:
            self._gate.few_slots.release()
        self._gate.slots.release()


class Budgets:
    """Bounds on the bytes and samples under way at once, as the server's flags say."""

    def __init__(
        self, limiter: RateLimiter, *, sample_bytes: int, training_bytes: int, result_bytes: int
    ) -> None:
        self.samples = SampleGate(limiter, sample_bytes)
        self.training = ByteSemaphore(training_bytes)
        """Bodies of forward_backward being sent."""
        self.results = ByteSemaphore(result_bytes)
        """Payloads being fetched."""
