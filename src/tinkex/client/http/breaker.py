"""A circuit breaker: after repeated failures of one host, stop asking it for a while (R24).

Closed: calls pass. Open: calls fail at once with CircuitOpenError. Half-open: after the pause one
trial call passes; a success closes the circuit, a failure opens it again. The breaker counts what
it is told and reads a clock it is given; the transport decides what a failure is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from tinkex.errors import CircuitOpenError, ConfigError


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failure_threshold < 1 or open_s <= 0:
            raise ConfigError(
                "A circuit breaker needs a failure_threshold of at least 1 and open_s above 0, got "
                f"{failure_threshold} and {open_s}."
            )
        self.host = host
        self._threshold = failure_threshold
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._is_tried = False

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
        if state is BreakerState.HALF_OPEN and not self._is_tried:
            self._is_tried = True
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
        self._is_tried = False

    def failed(self) -> None:
        self._failures += 1
        if self._opened_at is not None or self._failures >= self._threshold:
            self._opened_at = self._clock()
            self._is_tried = False

    def gave_no_answer(self) -> None:
        """The call was cancelled: neither good nor bad, and another may try."""
        self._is_tried = False
