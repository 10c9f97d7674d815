"""What a client tells a server about its own health. Never a credential, never a prompt."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from tinkex.types._models import Listing, Request, Response, member_of


class EventType(StrEnum):
    """The kinds of telemetry events, read in any case."""

    SESSION_START = "SESSION_START"
    SESSION_END = "SESSION_END"
    UNHANDLED_EXCEPTION = "UNHANDLED_EXCEPTION"
    GENERIC_EVENT = "GENERIC_EVENT"

    @classmethod
    def _missing_(cls, value: object) -> EventType | None:
        return cls.__members__.get(str(value).upper())


class Severity(StrEnum):
    """How much an event matters, read in any case."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"

    @classmethod
    def _missing_(cls, value: object) -> Severity | None:
        return cls.__members__.get(str(value).upper())


_Event: TypeAlias = Annotated[EventType, member_of(EventType)]
_Severity: TypeAlias = Annotated[Severity, member_of(Severity)]


class SessionStartEvent(Response):
    """A client started."""

    event: _Event = EventType.SESSION_START
    event_id: str
    event_session_index: int
    severity: _Severity
    timestamp: datetime


class SessionEndEvent(Response):
    """`duration` is text such as `0:00:12.5`."""

    duration: str
    event: _Event = EventType.SESSION_END
    event_id: str
    event_session_index: int
    severity: _Severity
    timestamp: datetime


class UnhandledExceptionEvent(Response):
    """An exception ended a call or the process."""

    error_message: str
    error_type: str
    event: _Event = EventType.UNHANDLED_EXCEPTION
    event_id: str
    event_session_index: int
    severity: _Severity
    timestamp: datetime
    traceback: str | None = None


class GenericEvent(Response):
    """Anything else, by name."""

    event: _Event = EventType.GENERIC_EVENT
    event_id: str
    event_name: str
    event_session_index: int
    severity: _Severity
    timestamp: datetime
    event_data: dict[str, Any] = {}


TelemetryEvent: TypeAlias = (
    SessionEndEvent | UnhandledExceptionEvent | GenericEvent | SessionStartEvent
)


class TelemetryBatch(Response):
    """Events of one session, as a server receives them."""

    events: Listing[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None


class TelemetrySendRequest(Request):
    """Events of one session, as a client sends them. SDK 0.4.1 has no `process_uuid`."""

    events: Listing[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str | None = None


class TelemetryResponse(Response):
    """The batch was taken."""

    status: Literal["accepted"]
