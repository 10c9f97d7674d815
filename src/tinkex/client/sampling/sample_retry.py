"""Repeat whole samples, submit and wait, as new requests, and notice when none of them finishes.

Nothing here knows what a sample is: `SampleRetry` runs any call that may fail.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx

from tinkex.client.background_loop import loop_time
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    ConfigError,
    RequestFailedError,
    RetrieveError,
    RetryableException,
    TinkerError,
)

logger = logging.getLogger("tinkex.retry")
T = TypeVar("T")

# A request that the server took and could not fulfil may fail the same way for ever.
_MAX_FAILURES = 3


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
    max_retries: int | None = None
    """Most times that a sample is made anew. None: the client's `max_retries`, and where that is
    None, too, as long as any sample finishes; one that the server itself failed, three times."""

    def __post_init__(self) -> None:
        for name, least in (("max_connections", 1), ("max_retries", 0)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be a whole number, got {value!r}.")
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        if not 0 <= self.jitter_factor <= 1:
            raise ValueError(f"jitter_factor must be in 0..1, got {self.jitter_factor}.")

    def wants(self, error: BaseException) -> bool:
        """Whether a sample that ended so is made anew."""
        if not self.enable_retry_logic:
            return False
        if isinstance(error, TinkerError) and not error.retryable:
            return False
        from_server = isinstance(error, APIStatusError | RequestFailedError)
        return from_server or isinstance(error, self.retryable_exceptions)

    def delay_s(self, attempt: int, uniform: Callable[[], float] = random.random) -> float:
        """The pause before a sample is made anew, `attempt` of them before this one."""
        delay = min(self.retry_delay_base * 2.0 ** min(attempt, 30), self.retry_delay_max)
        swing = self.jitter_factor * delay * (2 * uniform() - 1)
        return min(max(delay + swing, 0.0), self.retry_delay_max)


class _Bounds(NamedTuple):
    """How often the requests of one sample are tried again, and it itself is made anew."""

    tries: int | None
    made_anew: int | None

    def are_spent(self, error: Exception) -> bool:
        """Whether the error is that of a request which was tried as often as may be."""
        is_request = isinstance(error, APIError) and not isinstance(error, RetrieveError)
        return self.tries is not None and is_request


class SampleRetry:
    """Run samples with a cap on concurrency, retries, and an eye on progress (9.3).

    Progress is common to all calls of the handler: as long as any of them finishes, none is stuck.
    """

    def __init__(
        self,
        config: RetryConfig,
        *,
        max_in_flight: int | None,
        stuck_detection: bool = True,
        max_retries: int | None = None,
    ) -> None:
        """`max_retries` is that of the client, where the config has none."""
        self.config = config
        self._tries = max_retries
        self._slots = asyncio.Semaphore(max_in_flight) if max_in_flight else None
        self._detect = stuck_detection and config.enable_stuck_detection
        self._running: set[asyncio.Task[Any]] = set()
        self._stuck: set[asyncio.Task[Any]] = set()
        self._last_progress = loop_time()
        self._watch: asyncio.TimerHandle | None = None

    def execute(
        self, call: Callable[[], Awaitable[T]], max_retries: int | None = None
    ) -> Coroutine[Any, Any, T]:
        """Run a sample; `max_retries` is that of this one alone."""
        tries, most = self._tries, self.config.max_retries
        if max_retries is not None:
            tries = most = max_retries
        bounds = _Bounds(tries, tries if most is None else most)
        if self._slots is None:
            return self._watched(call, bounds)
        return self._in_turn(self._slots, call, bounds)

    async def _in_turn(
        self, slots: asyncio.Semaphore, call: Callable[[], Awaitable[T]], bounds: _Bounds
    ) -> T:
        async with slots:
            return await self._watched(call, bounds)

    async def _watched(self, call: Callable[[], Awaitable[T]], bounds: _Bounds) -> T:
        task = asyncio.current_task()
        assert task is not None
        if not self._running:  # an idle hour is not an hour without progress
            self._last_progress = loop_time()
        self._running.add(task)
        if self._detect and self._watch is None:
            self._watch_in(self.config.progress_timeout)
        try:
            result = await self._attempts(call, bounds)
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

    async def _attempts(self, call: Callable[[], Awaitable[T]], bounds: _Bounds) -> T:
        attempt, num_failed, most = 0, 0, bounds.made_anew
        while True:
            try:
                return await call()
            except Exception as exc:
                num_failed += isinstance(exc, RequestFailedError)
                is_enough = num_failed > _MAX_FAILURES if most is None else attempt >= most
                if is_enough or bounds.are_spent(exc) or not self.config.wants(exc):
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
