"""A circuit breaker: after repeated failures of one host, stop asking it for a while (R24).

Closed: calls pass. Open: calls fail at once with CircuitOpenError. Half-open: after the pause a few
trial calls pass; a success closes the circuit, a failure opens it again. The breaker counts what it
is told and reads a clock it is given; the transport decides what a failure is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from tinkex.errors import CircuitOpenError, ConfigError

__all__ = ["BreakerState", "CircuitBreaker"]


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    def __init__(
        self,
        host: str,
        *,
        failure_threshold: int = 5,
        open_s: float = 30.0,
        max_trials: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failure_threshold < 1 or max_trials < 1 or open_s <= 0:
            raise ConfigError(
                "A circuit breaker needs failure_threshold and max_trials of at least 1 and open_s "
                f"above 0, got {failure_threshold}, {max_trials} and {open_s}."
            )
        self.host = host
        self._threshold = failure_threshold
        self._open_s = open_s
        self._max_trials = max_trials
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._trials = 0

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        if self._clock() - self._opened_at < self._open_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def before_call(self) -> None:
        """Raise when the call must not be made. Every call that passes ends in one report below."""
        state = self.state
        if state is BreakerState.CLOSED:
            return
        if state is BreakerState.HALF_OPEN and self._trials < self._max_trials:
            self._trials += 1
            return
        assert self._opened_at is not None
        left = max(self._opened_at + self._open_s - self._clock(), 0.0)
        raise CircuitOpenError(
            f"{self.host} failed {self._failures} times in a row; not calling it for another "
            f"{left:.0f} s. Check that it is up, or turn circuit_breaker off."
        )

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = None
        self._trials = 0

    def failed(self) -> None:
        self._failures += 1
        if self._opened_at is not None or self._failures >= self._threshold:
            self._opened_at = self._clock()
            self._trials = 0

    def gave_no_answer(self) -> None:
        """The call was cancelled: neither good nor bad, but a trial slot is free again."""
        self._trials = max(self._trials - 1, 0)
