"""When to send a call again, and after how long: decisions, no network (contract 9).

`CallRetry` repeats one call; `BillingPause` is asked by calls and polls whenever a 402 may mean
"wait". Polls are spaced by `session/polling.py: PollRetry` and whole samples repeated by
`sampling/sample_retry.py: SampleRetry`. In which order all of it happens is in `docs/client.md`.
"""

from __future__ import annotations

import email.utils
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tinkex.client.background_loop import loop_time
from tinkex.errors import APIConnectionError, APIStatusError, is_retryable, wish_to_retry

logger = logging.getLogger("tinkex.retry")

_MAX_SERVER_DELAY_S = 60.0
_LONGEST_WISH_S = 366 * 24 * 3600.0


def parse_retry_after_s(
    headers: Mapping[str, str], *, now: Callable[[], float] = time.time
) -> float | None:
    """The wait a server asks for: `retry-after-ms`, seconds, or an HTTP date. None: no wish.

    A moment that is over is a wait of 0, and none is longer than a year.
    """
    milliseconds, text = _number(headers.get("retry-after-ms")), headers.get("retry-after")
    if milliseconds is not None:
        asked_s: float | None = milliseconds / 1000
    elif (asked_s := _number(text)) is None and text:
        asked_s = _until(text, now())
    return None if asked_s is None else min(max(asked_s, 0.0), _LONGEST_WISH_S)


def _until(text: str, now: float) -> float | None:
    """The seconds from now to an HTTP date; None where it is none."""
    try:
        date = email.utils.parsedate_tz(text)
        return None if date is None else email.utils.mktime_tz(date) - now
    except (ValueError, OverflowError):  # a year or a zone that no clock has
        return None


def obeyed_s(asked: float | None) -> float | None:
    """The wait that a server is given which asked for this one: a minute at most."""
    return min(asked, _MAX_SERVER_DELAY_S) if asked is not None and asked > 0 else None


def is_final(error: APIStatusError | APIConnectionError) -> bool:
    """Whether the server said that asking again is of no use, whatever the status."""
    return isinstance(error, APIStatusError) and says_no_retry(error.headers)


def says_no_retry(headers: Mapping[str, str]) -> bool:
    """Whether an answer says that asking again is of no use."""
    return wish_to_retry(headers) is False


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and value == value and abs(value) != float("inf") else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and after how long a call is repeated: quick tries, then slower rounds of them."""

    max_retries: int | None = None
    """Most tries after the first, of all kinds; None: as many as the window holds."""
    quick_retries: int = 10
    """Quick tries of a round, after its first (9.1)."""
    delay_base_s: float = 0.5
    delay_max_s: float = 10.0
    jitter: float = 0.25
    window_s: float = 300.0
    """How long a call is tried again: quick tries, and rounds of them (9.2)."""
    round_delay_max_s: float = 30.0
    uniform: Callable[[], float] = random.random
    now: Callable[[], float] = time.time

    def asked_s(self, headers: Mapping[str, str] | None) -> float | None:
        """The wait a server asks for, a minute at most; None: it asks for none."""
        asked = parse_retry_after_s(headers, now=self.now) if headers else None
        return obeyed_s(asked)

    def delay_s(self, num_retries: int, headers: Mapping[str, str] | None = None) -> float:
        """Before the next quick try: as the server asks, else longer each time."""
        if (asked := self.asked_s(headers)) is not None:
            return asked
        delay = min(self.delay_base_s * 2.0 ** min(num_retries, 30), self.delay_max_s)
        return delay * (1 - self.jitter * self.uniform())

    def round_delay_s(self, num_rounds: int) -> float:
        """Before the next round."""
        return min(2.0 ** min(num_rounds, 30), self.round_delay_max_s)


class CallRetry:
    """The repetitions of one call: everything that decides whether, and when, it is sent again.

    A 402 is a pause while there is patience for it, a status or a lost connection that may pass by
    itself a quick try; when those are used up, the call rests and begins another round, until its
    window ends. `max_retries` ends all of it earlier. `waits_itself`: 402 and 429 are given back at
    once, for samples wait at their gate.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        billing: BillingPause,
        *,
        max_retries: int | None = None,
        quick_retries: int | None = None,
        window: bool = True,
        waits_itself: bool = False,
    ) -> None:
        self._policy = policy
        self._billing = billing
        self._most = policy.max_retries if max_retries is None else max_retries
        self._quick = policy.quick_retries if quick_retries is None else quick_retries
        self._window = window
        self._waits_itself = waits_itself
        self._started = loop_time()
        self._num_rounds = self._num_retries = 0
        self.attempt = 0
        """Tries before this one, in its round."""

    def delay_s(
        self, error: APIStatusError | APIConnectionError, *, within_s: float = math.inf
    ) -> float | None:
        """After a try that failed. None: give up, at the latest `within_s` after the first try.

        The last pause is cut to the end of the window, so that there is a try at its end.
        """
        if error.status_code in (402, 429) and self._waits_itself:
            return None
        if self._most is not None and self._num_retries >= self._most:
            return None
        self._num_retries += 1
        if error.status_code == 402 and self._window and not is_final(error):
            return self._billing.delay_s()
        delay_s = self._next_s(error) if error.retryable else None
        left_s = min(self._policy.window_s, within_s) - (loop_time() - self._started)
        return None if delay_s is None or left_s <= 0 else min(delay_s, left_s)

    def _next_s(self, error: APIStatusError | APIConnectionError) -> float | None:
        headers = error.headers if isinstance(error, APIStatusError) else None
        if self.attempt < self._quick:
            self.attempt += 1
            return self._policy.delay_s(self.attempt - 1, headers)
        # By the table alone: `x-should-retry: true` asks for quick tries, not for all of a window.
        if not self._window or not is_retryable(error.category, error.status_code):
            return None
        delay = self._policy.asked_s(headers) or self._policy.round_delay_s(self._num_rounds)
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
