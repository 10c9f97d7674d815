"""Watch a training run and say when it is gone.

A run is lost when the server says so: it is unknown, was unloaded, its session is over, or its
state is marked as corrupted. A server that does not answer proves nothing, so that is a state of
its own. The monitor asks; what to do about a loss is for `recovering_client.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinkex import events, types
from tinkex.client.futures import Waiting
from tinkex.client.http.call import Call
from tinkex.errors import APIStatusError, RetryableException, TinkerError

if TYPE_CHECKING:
    from tinkex.client.session.holder import Holder

logger = logging.getLogger("tinkex.recovery")

SLICE_S = 0.5
"""How long a wait goes before it looks around again."""


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
    client replaces the first: a recovered run is watched like the one it replaces.
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
        asked = client.holder.spawn(lambda waiting: _ask(client, waiting))
        try:
            return asked.result(self._timeout_s)
        except (TimeoutError, TinkerError) as exc:
            # Only an answer that is about the run proves a loss. A 5xx, a refused key or silence
            # is about the server, which may come back and have the run.
            is_gone = isinstance(exc, APIStatusError) and exc.status_code in (400, 404, 410)
            state: Literal["lost", "unreachable"] = "lost" if is_gone else "unreachable"
            return RunHealth(state, str(exc) or type(exc).__name__)
        finally:
            asked.cancel()  # no effect once it ended

    def _run(self) -> None:
        told: WatchedRun | None = None
        while not self._stop.wait(self._interval_s):
            client = self._client
            if client is None or client is told:  # lost once is lost: asking on would tell it twice
                continue
            health = self.check(client)
            if health.state == "lost":
                told = client
                events.emit("recovery.lost", run_id=client.model_id, reason=health.reason)
                logger.warning("Run %s is lost: %s", client.model_id, health.reason)
                if self._on_lost is not None:
                    self._on_lost(client, health.reason)


async def _ask(client: WatchedRun, waiting: Waiting) -> RunHealth:
    holder = client.holder
    request = types.GetInfoRequest(model_id=client.model_id)
    await holder.post(
        "get_info", request, types.GetInfoResponse, window=False, max_retries=0, waiting=waiting
    )
    call = Call.to(
        "get_training_run",
        ids={"run_id": client.model_id},
        query={"access_scope": "owned"},
        max_retries=0,
        window=False,
    )
    reply = await holder.transport.call(call)
    if (reply.json() or {}).get("corrupted"):
        reason = f"The server says that the state of {client.model_id} is corrupted."
        return RunHealth("lost", reason)
    return RunHealth("ok")


def check_service(holder: Holder, timeout_s: float = 10.0) -> RunHealth:
    """Ask a server once whether it is there; `ok` or `unreachable`."""
    call = Call.to("get_server_capabilities", max_retries=0, window=False)
    asked = holder.spawn(lambda waiting: holder.transport.call(call))
    try:
        asked.result(timeout_s)
    except TinkerError as exc:
        return RunHealth("unreachable", str(exc))
    finally:
        asked.cancel()
    return RunHealth("ok")


class Lookout:
    """Looks after something while someone waits: every few seconds, patient with silence."""

    def __init__(self, check: Callable[[], RunHealth], patience_s: float) -> None:
        self._check, self._patience_s = check, patience_s
        self._every_s = min(5.0, patience_s / 4)  # a short patience still sees a few answers
        self._next_s = time.monotonic() + self._every_s
        self._silent_since_s: float | None = None

    def look(self) -> str | None:
        """Why it is lost, or None while it is not."""
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

    @contextmanager
    def during(self, give_up: Callable[[str], object]) -> Iterator[None]:
        """Look from another thread while the block waits; `give_up(reason)` has to end the wait.

        Raises:
            RetryableException: In place of whatever the block raised once it was given up.
        """
        done, lock = threading.Event(), threading.Lock()
        reasons: list[str] = []

        def look_after() -> None:
            while not done.wait(SLICE_S):
                if (reason := self.look()) is None:
                    continue
                # Under the lock: a block that has just ended must not be given up any more.
                with lock:
                    if not done.is_set():
                        reasons.append(reason)
                        give_up(reason)
                return

        threading.Thread(target=look_after, name="tinkex-lookout", daemon=True).start()
        error: TinkerError | None = None
        try:
            yield
        except TinkerError as exc:
            error = exc
        finally:
            with lock:
                done.set()
        if reasons:  # even when the block got its answer: what it waited on was given up
            raise RetryableException(reasons[0]) from error
        if error is not None:
            raise error
