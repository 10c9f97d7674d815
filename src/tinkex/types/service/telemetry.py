"""What a client tells a server about its own health. Never a credential, never a prompt."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from tinkex.types.fields.bounds import Count, Id, Name, Plain, Text, listing
from tinkex.types.fields.message import Moment, Request, Response, member_of


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
    event_id: Id
    event_session_index: Count
    severity: _Severity
    timestamp: Moment


class SessionEndEvent(Response):
    """`duration` is text such as `0:00:12.5`."""

    duration: Name
    event: _Event = EventType.SESSION_END
    event_id: Id
    event_session_index: Count
    severity: _Severity
    timestamp: Moment


class UnhandledExceptionEvent(Response):
    """An exception ended a call or the process."""

    error_message: Text
    error_type: Name
    event: _Event = EventType.UNHANDLED_EXCEPTION
    event_id: Id
    event_session_index: Count
    severity: _Severity
    timestamp: Moment
    traceback: Text | None = None


class GenericEvent(Response):
    """Anything else, by name."""

    event: _Event = EventType.GENERIC_EVENT
    event_id: Id
    event_name: Name
    event_session_index: Count
    severity: _Severity
    timestamp: Moment
    event_data: Plain = {}


class OtherEvent(Response):
    """An event of a newer SDK: its kind is counted, the rest is not read."""

    event: Name
    severity: Name = "INFO"


TelemetryEvent: TypeAlias = (
    SessionEndEvent | UnhandledExceptionEvent | GenericEvent | SessionStartEvent | OtherEvent
)


class TelemetryBatch(Response):
    """Events of one session, as a server receives them."""

    events: Annotated[list[TelemetryEvent], *listing(1000)]
    platform: Name
    sdk_version: Name
    session_id: Id
    process_uuid: Name | None = None


class TelemetrySendRequest(Request):
    """Events of one session, as a client sends them. SDK 0.4.1 has no `process_uuid`."""

    events: Annotated[list[TelemetryEvent], *listing(1000)]
    platform: Name
    sdk_version: Name
    session_id: Id
    process_uuid: Name | None = None


class TelemetryResponse(Response):
    """The batch was taken."""

    status: Literal["accepted"]
