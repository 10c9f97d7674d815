"""Watch a training run and say when it is gone.

A run is lost when the server says so: it is unknown, was unloaded, its session is over, or its
state is marked as corrupted. A server that does not answer proves nothing, so that is a state of
its own. The monitor asks; what to do about a loss is for `recovering_client.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tinkex import types
from tinkex.client import events
from tinkex.client.futures import Waiting
from tinkex.errors import APIConnectionError, APIStatusError, InternalServerError, TinkerError

if TYPE_CHECKING:
    from tinkex.client.training_client import TrainingClient

__all__ = ["RunHealth", "RunMonitor"]

logger = logging.getLogger("tinkex.recovery")


@dataclass(frozen=True, slots=True)
class RunHealth:
    """How a run fares. `unreachable` says nothing about the run itself."""

    state: Literal["ok", "lost", "unreachable"]
    reason: str = ""


class RunMonitor:
    """Asks the server about one run every `interval_s` seconds, on a thread of its own.

    `on_lost(client, reason)` is called once per watched client, from that thread. Watching another
    client replaces the first: a recovered run is watched like the one it replaces.
    """

    def __init__(
        self,
        on_lost: Callable[[TrainingClient, str], object] | None = None,
        *,
        interval_s: float = 30.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._client: TrainingClient | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def watch(self, client: TrainingClient) -> None:
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

    def check(self, client: TrainingClient) -> RunHealth:
        """Ask once, now. Waits at most the monitor's timeout; never raises."""
        try:
            client.holder.spawn(lambda waiting: _ask(client, waiting)).result(self._timeout_s)
        except _Corrupted as exc:
            return RunHealth("lost", str(exc))
        except InternalServerError as exc:
            return RunHealth("unreachable", str(exc))
        except APIStatusError as exc:
            if exc.status_code in (400, 404, 410):
                return RunHealth("lost", str(exc))
            return RunHealth("unreachable", str(exc))
        except (APIConnectionError, TimeoutError, TinkerError) as exc:
            return RunHealth("unreachable", str(exc) or type(exc).__name__)
        return RunHealth("ok")

    def _run(self) -> None:
        told: TrainingClient | None = None
        while not self._stop.wait(self._interval_s):
            client = self._client
            if client is None or client is told:
                continue
            health = self.check(client)
            if health.state == "lost":
                told = client
                events.emit("recovery.lost", run_id=client.model_id, reason=health.reason)
                logger.warning("Run %s is lost: %s", client.model_id, health.reason)
                if self._on_lost is not None:
                    self._on_lost(client, health.reason)


class _Corrupted(TinkerError):
    """The server keeps the run but says that its state is broken."""


async def _ask(client: TrainingClient, waiting: Waiting) -> None:
    holder = client.holder
    request = types.GetInfoRequest(model_id=client.model_id)
    await holder.post(
        "get_info", request, types.GetInfoResponse, window=False, max_retries=0, waiting=waiting
    )
    from tinkex.client.transport import Call

    call = Call(
        method="GET",
        path=f"training_runs/{client.model_id}",
        query={"access_scope": "owned"},
        max_retries=0,
    )
    reply = await holder.execute(call, window=False)
    if (reply.json() or {}).get("corrupted"):
        raise _Corrupted(f"The server says that the state of {client.model_id} is corrupted.")
