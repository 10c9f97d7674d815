"""The local event bus: what the SDK is doing, told to whoever asks, in this process only.

`emit` says that something happened, `span` that something began and ended. Without a subscriber
both cost one truth test. A handler runs on the thread that emitted and its errors are logged, never
raised: watching a program must not break it. Nothing here knows HTTP, the reporter to the server
or who listens.

No credential and no prompt may pass: fields with such names are dropped, strings that look like
keys are masked and the query of a URL is cut off, so a careless call site cannot leak.

Event names are `noun.verb`; a span adds `.start`, `.stop` or `.exception`:

    http.request      method, path, attempt, status_code, duration_s
    http.retry        method, path, attempt, delay_s, reason
    future.*          request_id, request_type, duration_s
    queue.change      request_id, state, reason
    session.heartbeat session_id
    training.*        method, model_id, duration_s
    sampling.*        model_id, num_samples, duration_s
    regularizer.*     regularizer, weight, value, contribution, duration_s
    recovery.*        run_id, attempt, checkpoint, reason
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

logger = logging.getLogger("tinkex.events")

__all__ = ["Event", "Span", "emit", "redact", "span", "subscribe"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `fields` holds plain values, already free of secrets."""

    name: str
    time_s: float
    """Seconds since the epoch."""
    fields: Mapping[str, Any]


Handler = Callable[[Event], object]

_lock = threading.Lock()
# Replaced, never mutated: `emit` reads it without the lock.
_handlers: tuple[Handler, ...] = ()
_span_ids = count(1)


def subscribe(handler: Handler) -> Callable[[], None]:
    """Call `handler(event)` for every event from now on; the returned function ends that.

    The handler runs on the emitting thread, often the SDK's own event loop: return quickly.
    """
    global _handlers
    # A fresh object per call, so that one handler subscribed twice can be removed once.
    entry: Handler = lambda event: handler(event)  # noqa: E731
    with _lock:
        _handlers = (*_handlers, entry)

    def unsubscribe() -> None:
        global _handlers
        with _lock:
            _handlers = tuple(h for h in _handlers if h is not entry)

    return unsubscribe


def emit(name: str, /, **fields: Any) -> None:
    """Tell every subscriber that `name` happened. Never raises."""
    handlers = _handlers
    if not handlers:
        return
    event = Event(name, time.time(), redact(fields))
    for handler in handlers:
        try:
            handler(event)
        except Exception:
            logger.warning(
                "An event handler failed on %r; going on without it.", name, exc_info=True
            )


# ---------------------------------------------------------------------------------------- spans


class Span:
    """A running operation. `add` puts fields on the event that will end it."""

    __slots__ = ("_fields", "_name", "_otel", "_otel_scope", "_started_s", "id")

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self._name = name
        self._fields = fields
        self._otel: Any = None
        self._otel_scope: Any = None
        self._started_s = 0.0
        self.id = next(_span_ids)

    def add(self, **fields: Any) -> None:
        self._fields.update(fields)

    def __enter__(self) -> Span:
        self._started_s = time.perf_counter()
        emit(f"{self._name}.start", span_id=self.id, **self._fields)
        if (trace := sys.modules.get("opentelemetry.trace")) is not None:
            self._otel_scope = trace.get_tracer("tinkex").start_as_current_span(self._name)
            self._otel = self._otel_scope.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        duration_s = time.perf_counter() - self._started_s
        if self._otel is not None:
            for key, value in redact(self._fields).items():
                if isinstance(value, str | int | float | bool):
                    self._otel.set_attribute(f"tinkex.{key}", value)
            self._otel_scope.__exit__(kind, error, traceback)
        if error is None:
            emit(f"{self._name}.stop", span_id=self.id, duration_s=duration_s, **self._fields)
        else:
            emit(
                f"{self._name}.exception",
                span_id=self.id,
                duration_s=duration_s,
                error_type=type(error).__name__,
                **self._fields,
            )


class _SilentSpan(Span):
    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("", {})

    def add(self, **fields: Any) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_SILENT = _SilentSpan()


def span(name: str, /, **fields: Any) -> Span:
    """Wrap an operation: `with span("http.request", path=path) as s: ...; s.add(status_code=200)`.

    Also opens an OpenTelemetry span when the program has loaded OpenTelemetry's API: a program
    that has not cannot have set up a tracer, so nothing is imported on its behalf.
    """
    if not _handlers and "opentelemetry.trace" not in sys.modules:
        return _SILENT
    return Span(name, fields)


# ------------------------------------------------------------------------------------ redaction

_FORBIDDEN = frozenset(
    "api_key authorization body chunks completion cookie credential credentials data headers jwt "
    "messages password prompt prompts secret text token tokens".split()
)
_SECRET = re.compile(
    r"\b(?:tml-|sk-|hf_)[\w\-]{4,}|\beyJ[\w\-]+\.[\w\-]+\.[\w\-]*|(?i:bearer\s+\S+)"
)
_MAX_STRING = 500


def redact(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` without forbidden names and with every value made plain and harmless."""
    return {key: _plain(value) for key, value in fields.items() if key.lower() not in _FORBIDDEN}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return redact({str(key): item for key, item in value.items()})
    text = value if isinstance(value, str) else _describe(value)
    if "://" in text or text.startswith("/"):
        text = text.split("?", 1)[0]  # signatures travel in the query
    return _SECRET.sub("***", text)[:_MAX_STRING]


def _describe(value: Any) -> str:
    """Say what kind of thing an arbitrary object is; its contents may be a user's data."""
    return f"<{type(value).__name__}>"
