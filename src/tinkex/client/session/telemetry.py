"""Tell the server how its client fares: session start, failures, events a program logs itself.

One reporter per session. `log` may be called from any thread and only appends to a queue; a task
on the background loop sends it in batches (contract 10). Nothing here ever raises into user code,
and a server without the endpoint is left alone after its first 404. Unlike the official client it
sends no headers, no messages of foreign exceptions and no source lines: a credential or a prompt
could be in any of them.

Who turns it off is `config.py`: TINKER_TELEMETRY=0, TINKEX_TELEMETRY=0, or a local server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import platform
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex import events
from tinkex.client.http.call import Call
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.errors import APIStatusError, RequestFailedError, TinkerError
from tinkex.types.fields.bounds import storable
from tinkex.types.service.telemetry import (
    EventType,
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)

if TYPE_CHECKING:
    from tinkex.client.session.holder import Holder

logger = logging.getLogger("tinkex.telemetry")

# Of the local bus, what is worth a server's attention: operations that failed for good.
_FORWARDED = frozenset({"training.exception", "sampling.exception"})
_EVENTS: dict[EventType, Callable[..., TelemetryEvent]] = {
    EventType.SESSION_START: SessionStartEvent,
    EventType.SESSION_END: SessionEndEvent,
    EventType.UNHANDLED_EXCEPTION: UnhandledExceptionEvent,
    EventType.GENERIC_EVENT: GenericEvent,
}

Send = Callable[[TelemetrySendRequest], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReporterConfig:
    interval_s: float = 10.0
    """How long an event waits for company."""
    max_batch: int = 100
    max_queue: int = 10_000
    """Events past this are dropped; they are counted and the count is sent."""
    first_retry_s: float = 1.0
    max_retry_s: float = 60.0
    drain_timeout_s: float = 5.0
    """Longest that closing a client waits for the last batch."""


class Reporter:
    """The queue of one session's events, and the task that empties it."""

    def __init__(
        self, send: Send, session_id: str | None, config: ReporterConfig | None = None
    ) -> None:
        self.session_id = session_id or f"sessionless-{uuid.uuid4()}"
        self._send = send
        self._config = config or ReporterConfig()
        self._queue: deque[TelemetryEvent] = deque()
        self._lock = threading.Lock()
        self._sending = asyncio.Lock()
        self._index = 0
        self._num_dropped = 0
        self._started_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stopped = False
        self._unsubscribe: Callable[[], None] = lambda: None
        if session_id is not None:
            self._put(EventType.SESSION_START, "INFO")

    # -- for programs

    def log(
        self, event_name: str, event_data: dict[str, Any] | None = None, severity: str = "INFO"
    ) -> bool:
        """Queue an event of your own. False when the queue was full or the reporter has ended."""
        data = events.redact(event_data or {})
        return self._put(EventType.GENERIC_EVENT, severity, event_name=event_name, event_data=data)

    def log_exception(self, exception: BaseException, severity: str = "ERROR") -> bool:
        """Queue what kind of error happened and where, and send it at once.

        An error that the caller can fix is reported as `user_error`, a warning.
        """
        if (user_error := is_user_error(exception)) is not None:
            queued = self.log("user_error", _user_error_data(user_error), "WARNING")
        else:
            queued = self._put(
                EventType.UNHANDLED_EXCEPTION,
                severity,
                error_type=type(exception).__name__,
                error_message=_message(exception),
                traceback=_places(exception),
            )
        self._wake_up()
        return queued

    async def log_fatal_exception(
        self, exception: BaseException, severity: str = "CRITICAL"
    ) -> bool:
        """Queue an error that ends the program together with the end of the session, and wait."""
        queued = self.log_exception(exception, severity)
        if not self.session_id.startswith("sessionless-"):
            duration = str(timedelta(seconds=time.monotonic() - self._started_s))
            self._put(EventType.SESSION_END, "INFO", duration=duration)
        await self.flush()
        return queued

    # -- for the holder

    def start(self) -> None:
        """Begin to send; on the background loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self._unsubscribe = events.subscribe(self._forward)

    async def drain(self) -> None:
        """Send what is queued, waiting a few seconds at most, and end."""
        self._unsubscribe()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.flush(), self._config.drain_timeout_s)
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def flush(self) -> bool:
        """Send everything queued now; gives up at the first failure, and says so with False."""
        while self._queue and not self._stopped:
            if not await self._send_batch():
                return False
        return True

    # -- inside

    def _forward(self, event: events.Event) -> None:
        """Of the bus, only failures of this session: ids begin with the session's."""
        if event.name not in _FORWARDED or event.fields.get("error_type") == "CancelledError":
            return
        if str(event.fields.get("model_id", "")).startswith(self.session_id):
            self.log(event.name, dict(event.fields), "ERROR")
            self._wake_up()

    def _put(self, kind: EventType, severity: str, **fields: Any) -> bool:
        level = severity.upper()
        with self._lock:
            if self._stopped or len(self._queue) >= self._config.max_queue:
                self._num_dropped += 1
                return False
            try:
                event = _EVENTS[kind](
                    # Named, although it is the default: SDK 0.4.1 sends only what was set.
                    event=kind,
                    event_id=str(uuid.uuid4()),
                    event_session_index=self._index,
                    severity=level if level in Severity.__members__ else "INFO",
                    timestamp=datetime.now(UTC),
                    # A text that cannot be sent would hold up all that wait behind it.
                    **storable(fields),
                )
            except (ValueError, RecursionError):  # it could never be sent
                self._num_dropped += 1
                return False
            self._index += 1
            self._queue.append(event)
            is_full = len(self._queue) >= self._config.max_batch
        if is_full:
            self._wake_up()
        return True

    def _wake_up(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        config, retry_s = self._config, 0.0
        while not self._stopped:
            if retry_s:
                await asyncio.sleep(retry_s)  # nothing wakes it: the server is the one in trouble
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), config.interval_s)
                self._wake.clear()
            is_sent = await self.flush()
            longer_s = min(max(config.first_retry_s, retry_s * 2), config.max_retry_s)
            retry_s = 0.0 if is_sent else longer_s

    async def _send_batch(self) -> bool:
        """Send the oldest events; they leave the queue once the server has them."""
        async with self._sending:
            batch = list(itertools.islice(self._queue, self._config.max_batch))
            if not batch:
                return True
            try:
                await self._send(self._request(batch))
            except Exception as exc:
                self._on_failure(exc)
                return False
            for _ in batch:
                self._queue.popleft()
        if self._num_dropped:
            num, self._num_dropped = self._num_dropped, 0
            self.log("telemetry.dropped", {"num_events": num}, "WARNING")
        return True

    def _on_failure(self, error: Exception) -> None:
        logger.debug("Telemetry could not be sent: %s", type(error).__name__)
        if isinstance(error, APIStatusError) and error.status_code in (404, 405, 501):
            self._stopped = True  # This server takes none; asking again would only make noise.
            self._queue.clear()

    def _request(self, batch: list[TelemetryEvent]) -> TelemetrySendRequest:
        return TelemetrySendRequest(
            events=batch,
            platform=platform.system(),
            sdk_version=CONTRACT_VERSION,
            session_id=self.session_id,
            process_uuid=process_uuid(),
        )


def start_reporter(holder: Holder) -> Reporter:
    """A running reporter for a ready holder; called on the background loop."""

    async def send(request: TelemetrySendRequest) -> object:
        call = Call.to(
            "telemetry",
            request,
            holder.flags.generation,
            pool="telemetry",
            timeout_s=5.0,
            quick_retries=0,
            window=False,
        )
        return await holder.transport.call(call)

    reporter = Reporter(send, holder.session_id)
    reporter.start()
    return reporter


_process: tuple[int, str] = (0, "")


def process_uuid() -> str:
    """The id of this process; a forked child gets its own."""
    global _process
    if _process[0] != os.getpid():
        _process = (os.getpid(), str(uuid.uuid4()))
    return _process[1]


# ------------------------------------------------------------------------------------ what is told


def is_user_error(exception: BaseException | None) -> TinkerError | None:
    """The error on the chain of causes that the caller can fix, if there is one."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        if isinstance(exception, RequestFailedError) and exception.category == "user":
            return exception
        if isinstance(exception, APIStatusError):
            status = exception.status_code or 0
            if 400 <= status < 500 and status != 408:
                return exception
        exception = exception.__cause__ or exception.__context__
    return None


def _user_error_data(error: TinkerError) -> dict[str, Any]:
    data: dict[str, Any] = {"error_type": type(error).__name__}
    if (status := getattr(error, "status_code", None)) is not None:
        data["status_code"] = status
    return data


def _message(exception: BaseException) -> str:
    """Our own words, masked. A foreign message may hold anything, so it stays here."""
    if not isinstance(exception, TinkerError) or isinstance(exception, ValueError):
        return ""
    return str(events.redact({"message": str(exception)})["message"])


def _places(exception: BaseException) -> str:
    """Where it happened, without source lines: `client.py:12 in call`."""
    frames = traceback.extract_tb(exception.__traceback__)
    return "\n".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames[-30:])
