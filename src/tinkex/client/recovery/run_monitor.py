"""Watch a training run and say when it is gone.

A run is lost when the server says so: it is unknown, was unloaded, its session is over, or its
state is marked as corrupted. A server that does not answer proves nothing, so that is a state of
its own, and `Patience` decides how long it may last. What to do about a loss is for
`recovering_client.py`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from tinkex import events, types
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.call import Call
from tinkex.client.session.holder import Holder
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    LocalServerError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)

logger = logging.getLogger("tinkex.recovery")
T = TypeVar("T")

SLICE_S = 0.5
"""The longest wait before the health of what is waited for is looked at again."""
_ENDS_A_RUN = (APIConnectionError, RetryableException, LocalServerError)
"""Errors that mean the loss of a run, whatever the server says about it."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """How a run fares. `unreachable` says nothing about the run itself."""

    state: Literal["ok", "lost", "unreachable"]
    reason: str = ""


class WatchedRun(Protocol):
    """A `TrainingClient`, as far as its health is concerned."""

    @property
    def holder(self) -> Holder: ...

    @property
    def model_id(self) -> str: ...


class RunMonitor:
    """Asks the server about one run every `interval_s` seconds, on a thread of its own.

    `on_lost(client, reason)` is called once per watched client, from that thread. Watching another
    client replaces the first.
    """

    def __init__(
        self,
        on_lost: Callable[[Any, str], object] | None = None,
        *,
        interval_s: float = 30.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._client: WatchedRun | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def watch(self, client: WatchedRun) -> None:
        """Watch this client's run from now on."""
        with self._lock:
            self._client = client
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tinkex-run-monitor", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Stop watching; returns at once."""
        self._stop.set()

    def check(self, client: WatchedRun) -> RunHealth:
        """Ask once, now. Waits at most the monitor's timeout; never raises."""
        return check_run(client, self._timeout_s)

    def _run(self) -> None:
        lost: WatchedRun | None = None
        while not self._stop.wait(self._interval_s):
            client = self._client
            if client is None or client is lost:  # a loss is reported once
                continue
            health = self.check(client)
            if health.state == "lost":
                lost = client
                report_loss(client, health.reason)
                if self._on_lost is not None:
                    self._on_lost(client, health.reason)


def report_loss(client: WatchedRun, reason: str) -> None:
    """Tell subscribers and the log of a loss that was found while nobody waited for the run."""
    events.emit("recovery.lost", run_id=client.model_id, reason=reason)
    logger.warning("Run %s is lost: %s", client.model_id, reason)


def check_run(client: WatchedRun, timeout_s: float) -> RunHealth:
    """Ask the server about a run once; never raises."""
    answer = client.holder.spawn(lambda waiting: _ask(client, waiting))
    try:
        return answer.result(timeout_s)
    except (TimeoutError, TinkerError) as exc:
        # Only an answer that is about the run proves a loss. A 5xx, a refused key or silence
        # is about the server, which may come back and have the run.
        is_gone = isinstance(exc, APIStatusError) and exc.status_code in (400, 404, 410)
        return RunHealth("lost" if is_gone else "unreachable", str(exc) or type(exc).__name__)
    finally:
        answer.cancel()  # no effect once it ended


async def _ask(client: WatchedRun, waiting: Waiting) -> RunHealth:
    holder = client.holder
    request = types.GetInfoRequest(model_id=client.model_id)
    await holder.post(
        "get_info", request, types.GetInfoResponse, window=False, quick_retries=0, waiting=waiting
    )
    # A run that is loaded can still be corrupted, which get_info does not say (contract 2.3).
    call = Call.to(
        "get_training_run",
        ids={"run_id": client.model_id},
        query={"access_scope": "owned"},
        quick_retries=0,
        window=False,
    )
    reply = await holder.transport.call(call)
    if (reply.json() or {}).get("corrupted"):
        reason = f"The server says that the state of {client.model_id} is corrupted."
        return RunHealth("lost", reason)
    return RunHealth("ok")


def check_service(holder: Holder, timeout_s: float = 10.0) -> RunHealth:
    """Ask a server once whether it is there; `ok` or `unreachable`."""
    call = Call.to("get_server_capabilities", quick_retries=0, window=False)
    answer = holder.spawn(lambda waiting: holder.transport.call(call))
    try:
        answer.result(timeout_s)
    except TinkerError as exc:
        return RunHealth("unreachable", str(exc))
    finally:
        answer.cancel()
    return RunHealth("ok")


class Patience:
    """How long a run, or a server, may stay silent while somebody waits for it.

    `check` asks for its health; it is called every few seconds, by whoever calls `look`.
    """

    def __init__(self, check: Callable[[], RunHealth], patience_s: float) -> None:
        self._check, self._patience_s = check, patience_s
        self._every_s = min(5.0, patience_s / 4)  # a short patience still sees a few answers
        self._next_s = time.monotonic() + self._every_s
        self._silent_since_s: float | None = None

    def look(self) -> str | None:
        """Check the health if it is time to: why it is lost, or None while it is not."""
        now = time.monotonic()
        if now < self._next_s:
            return None
        health = self._check()
        self._next_s = time.monotonic() + self._every_s
        if health.state == "lost":
            return health.reason
        if health.state == "ok":
            self._silent_since_s = None
            return None
        self._silent_since_s = self._silent_since_s or now
        silent_s = time.monotonic() - self._silent_since_s
        return f"no answer for {silent_s:.0f} s" if silent_s >= self._patience_s else None

    def decide(self) -> str | None:
        """Look until there is an answer, or patience ends: why it is lost, or None if it is not."""
        while True:
            self._next_s = time.monotonic()
            reason = self.look()
            if reason is not None or self._silent_since_s is None:
                return reason
            time.sleep(min(SLICE_S, self._every_s))

    def is_loss(self, error: BaseException) -> bool:
        """True when the error means that the run cannot go on."""
        if isinstance(error, _ENDS_A_RUN):
            return True
        if isinstance(error, APIStatusError) and error.category == "server":
            return True
        if isinstance(error, APIStatusError) and error.status_code == 410:
            return True
        if isinstance(error, APIStatusError | RequestFailedError):
            # The request may be wrong, or the run may be gone: the server knows which. It may be
            # gone itself by now; then the request is made again where there is one.
            return self.decide() is not None
        return False

    def wait(self, future: APIFuture[T]) -> T:
        """The result of `future`, which depends on what is looked at.

        Raises:
            RetryableException: It was lost before the result came.
        """
        while not concurrent.futures.wait([future], SLICE_S).done:
            if (reason := self.look()) is not None:
                raise RetryableException(reason)
        return future.result()
