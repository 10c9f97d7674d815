"""When to try again, and after how long: decisions, no network (contract 9).

From the inside out: `CallRetry` repeats one call, `PollRetry` spaces the polls for a promise,
`SampleRetry` repeats a sample, submit and wait, as a new request. `BillingPause` is asked by the
first two whenever a 402 may mean "wait". What lies around them, one try and the loss of a run, and
in which order all of it happens, is in `docs/client.md`.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from tinkex.client.session.background_loop import loop_time
from tinkex.errors import APIConnectionError, APIStatusError, RetryableException
from tinkex.types.service.request_error import is_retryable_status

logger = logging.getLogger("tinkex.retry")
T = TypeVar("T")

_MAX_SERVER_DELAY_S = 60.0


def parse_retry_after_s(
    headers: Mapping[str, str], *, now: Callable[[], float] = time.time
) -> float | None:
    """The wait a server asks for: `retry-after-ms`, seconds, or an HTTP date. None: no wish."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or not text:
        return seconds
    date = email.utils.parsedate_tz(text)
    return None if date is None else email.utils.mktime_tz(date) - now()


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and value == value and abs(value) != float("inf") else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and after how long a call is repeated: quick tries, then slower rounds of them."""

    max_retries: int = 10
    """Quick tries after the first (9.1)."""
    delay_base_s: float = 0.5
    delay_max_s: float = 10.0
    jitter: float = 0.25
    window_s: float = 300.0
    """How long rounds of quick tries go on (9.2)."""
    round_delay_max_s: float = 30.0
    uniform: Callable[[], float] = random.random
    now: Callable[[], float] = time.time

    def wants(self, status_code: int, headers: Mapping[str, str]) -> bool:
        """`x-should-retry` decides first; else the status."""
        decided = headers.get("x-should-retry")
        if decided in ("true", "false"):
            return decided == "true"
        return is_retryable_status(status_code)

    def delay_s(self, num_retries: int, headers: Mapping[str, str] | None = None) -> float:
        """Before the next quick try. A server's wish counts when it is at most a minute."""
        asked = parse_retry_after_s(headers, now=self.now) if headers else None
        if asked is not None and 0 < asked <= _MAX_SERVER_DELAY_S:
            return asked
        delay = min(self.delay_base_s * 2.0 ** min(num_retries, 30), self.delay_max_s)
        return delay * (1 - self.jitter * self.uniform())

    def round_delay_s(self, num_rounds: int, elapsed_s: float) -> float | None:
        """Before the next round; the last is cut to the end of the window. None: it is over."""
        left = self.window_s - elapsed_s
        if left <= 0:
            return None
        return min(2.0 ** min(num_rounds, 30), self.round_delay_max_s, left)


class CallRetry:
    """The repetitions of one call: everything that decides whether, and when, it is sent again.

    A 402 is a pause while there is patience for it, a status or a lost connection that may pass by
    itself a quick try; when those are used up, the call rests and begins another round, until its
    window ends. `waits_itself`: 402 and 429 are given back at once, for samples wait at their gate.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        billing: BillingPause,
        *,
        max_retries: int | None = None,
        window: bool = True,
        waits_itself: bool = False,
    ) -> None:
        self._policy = policy
        self._billing = billing
        self._most = policy.max_retries if max_retries is None else max_retries
        self._window = window
        self._waits_itself = waits_itself
        self._started = loop_time()
        self._num_rounds = 0
        self.attempt = 0
        """Tries before this one, in its round."""

    def delay_s(
        self, status_code: int | None, headers: Mapping[str, str] | None = None
    ) -> float | None:
        """After a try that failed, with a status or without an answer. None: give up."""
        if status_code in (402, 429) and self._waits_itself:
            return None
        if status_code == 402 and self._window:
            return self._billing.delay_s()
        quick = status_code is None or self._policy.wants(status_code, headers or {})
        if quick and self.attempt < self._most:
            self.attempt += 1
            return self._policy.delay_s(self.attempt - 1, headers)
        # By status alone: `x-should-retry: true` asks for quick tries, not for all of the window.
        if not self._window or not (status_code is None or is_retryable_status(status_code)):
            return None
        delay = self._policy.round_delay_s(self._num_rounds, loop_time() - self._started)
        self._num_rounds, self.attempt = self._num_rounds + 1, 0
        return delay


@dataclass(slots=True)
class BillingPause:
    """A 402 is a pause for a while, then an error (9.4). One per holder."""

    max_pause_s: float = 3600.0
    pause_s: float = 5.0
    clock: Callable[[], float] = loop_time
    _first: float | None = None
    _last: float = 0.0
    _logged: float = field(default=float("-inf"))

    def delay_s(self) -> float | None:
        """Called at each 402: how long to pause, or None when the patience is over."""
        now = self.clock()
        if self._first is None or now - self._last > 300:
            self._first = now  # nobody was turned away for a while: a trouble of its own
        self._last = now
        if now - self._first >= self.max_pause_s:
            return None
        if now - self._logged >= 60:
            self._logged = now
            logger.warning(
                "The server answered 402 (billing); pausing. Add credit to the account, or stop."
            )
        return self.pause_s


@dataclass(slots=True)
class Outage:
    """Says why a server is asked again and again, and when that ends: silence looks like a hang."""

    base_url: str
    clock: Callable[[], float] = loop_time
    after_s: float = 3.0
    every_s: float = 60.0
    _since: float | None = None
    _logged: float | None = None

    def failed(self, error: Exception) -> None:
        now = self.clock()
        if self._since is None:
            self._since = now
        last = self._logged if self._logged is not None else now - self.every_s
        if now - self._since >= self.after_s and now - last >= self.every_s:
            self._logged = now
            silent_s = now - self._since
            logger.warning("Still trying, for %.0f s now: %s", silent_s, error)

    def over(self) -> None:
        if self._since is not None and self._logged is not None:
            silent_s = self.clock() - self._since
            logger.warning("%s goes on, after %.0f s.", self.base_url, silent_s)
        self._since = self._logged = None


class PollRetry:
    """The pauses between polls for one promise, or for all of a sampler (4.2).

    A poll asks for nothing new, so it is repeated without end; only a server that refuses it as
    wrong, again and again, ends it.
    """

    _MAX_BAD_REQUESTS = 3
    _MAX_PAUSE_S = 30.0

    def __init__(self, billing: BillingPause) -> None:
        self._billing = billing
        self._in_a_row = 0
        self._bad_requests = 0

    def answered(self) -> None:
        """The server said something that is not a refusal."""
        self._in_a_row = self._bad_requests = 0

    def delay_s(self, status_code: int | None) -> float | None:
        """After a poll that was refused, or had no answer (None). None: give up."""
        if status_code is None or status_code == 429:
            self._in_a_row += 1
            return min(2.0 ** min(self._in_a_row - 1, 10), self._MAX_PAUSE_S)
        self._in_a_row = 0
        if status_code == 402:
            return self._billing.delay_s()
        if status_code == 400 and self._bad_requests < self._MAX_BAD_REQUESTS:
            self._bad_requests += 1
            return 0.0
        # No pause here: a server that fails at once is slowed down like one that answers at once.
        return 0.0 if status_code >= 500 else None


def _default_retryable() -> tuple[type[Exception], ...]:
    return (asyncio.TimeoutError, APIConnectionError, httpx.TimeoutException, RetryableException)


@dataclass(frozen=True)
class RetryConfig:
    """How a SamplingClient retries whole samples."""

    max_connections: int | None = 1000
    """As in the official SDK the server's number always wins; None, no bound, is taken too."""
    progress_timeout: float = 7200.0
    """Seconds without any finished sample after which the waiting ones fail."""
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = field(default_factory=_default_retryable)

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, got {self.max_connections}.")
        if not 0 <= self.jitter_factor <= 1:
            raise ValueError(f"jitter_factor must be in 0..1, got {self.jitter_factor}.")

    def wants(self, error: BaseException) -> bool:
        if not self.enable_retry_logic:
            return False
        if isinstance(error, APIStatusError):
            return is_retryable_status(error.status_code or 0)
        return isinstance(error, self.retryable_exceptions)

    def delay_s(self, attempt: int, uniform: Callable[[], float] = random.random) -> float:
        delay = min(self.retry_delay_base * 2.0 ** min(attempt, 30), self.retry_delay_max)
        swing = self.jitter_factor * delay * (2 * uniform() - 1)
        return min(max(delay + swing, 0.0), self.retry_delay_max)


class SampleRetry:
    """Run samples with a cap on concurrency, retries without end, and an eye on progress (9.3).

    Progress is common to all calls of the handler: as long as any of them finishes, none is stuck.
    """

    def __init__(
        self,
        config: RetryConfig,
        *,
        max_in_flight: int | None,
        stuck_detection: bool = True,
    ) -> None:
        self.config = config
        self._slots = asyncio.Semaphore(max_in_flight) if max_in_flight else None
        self._detect = stuck_detection and config.enable_stuck_detection
        self._running: set[asyncio.Task[Any]] = set()
        self._stuck: set[asyncio.Task[Any]] = set()
        self._last_progress = loop_time()
        self._watch: asyncio.TimerHandle | None = None

    def execute(self, call: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        return self._watched(call) if self._slots is None else self._in_turn(self._slots, call)

    async def _in_turn(self, slots: asyncio.Semaphore, call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await self._watched(call)

    async def _watched(self, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        if not self._running:  # an idle hour is not an hour without progress
            self._last_progress = loop_time()
        self._running.add(task)
        if self._detect and self._watch is None:
            self._watch_in(self.config.progress_timeout)
        try:
            result = await self._attempts(call)
            self._last_progress = loop_time()
            return result
        except asyncio.CancelledError:
            if task in self._stuck:
                raise APIConnectionError(
                    f"No sample finished for {self.config.progress_timeout:.0f} s; requests "
                    "seem stuck. Look at the server, or raise RetryConfig.progress_timeout."
                ) from None
            raise
        finally:
            self._stuck.discard(task)
            self._running.discard(task)
            if not self._running and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    async def _attempts(self, call: Callable[[], Awaitable[T]]) -> T:
        attempt = 0
        while True:
            try:
                return await call()
            except Exception as exc:
                if not self.config.wants(exc):
                    raise
                delay = self.config.delay_s(attempt)
                logger.debug("sample attempt %d failed (%s); again in %.2f s", attempt, exc, delay)
            attempt += 1
            await asyncio.sleep(delay)

    def _watch_in(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(max(delay_s, 0.01), self._look_at_progress)

    def _look_at_progress(self) -> None:
        left = self._last_progress + self.config.progress_timeout - loop_time()
        if left > 0:
            self._watch_in(left)
            return
        self._watch = None
        for task in tuple(self._running):
            self._stuck.add(task)
            task.cancel()
