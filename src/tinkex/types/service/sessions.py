"""Sessions: the life of one client process on the server."""

from __future__ import annotations

from typing import Annotated, Literal

from tinkex.types.fields.bounds import MAX_NAME, Id, Name, PlainMetadata, Tags, Text, text
from tinkex.types.fields.message import Listing, Request, Response, Texts
from tinkex.types.service.session_status import ClientSessionFinishReason


class CreateSessionRequest(Request):
    """Open a session."""

    tags: Tags
    user_metadata: PlainMetadata | None = None
    sdk_version: Name
    project_id: Name | None = None
    display_name: Name | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    """The session's id, and messages to log at their level."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Request):
    """Say that the client still lives."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    """The server knows."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSessionRequest(Request):
    """End a session; `detail` is sent even when it is None. The first reason given stands."""

    reason: ClientSessionFinishReason
    detail: Text | None = None


class AssignSessionProjectRequest(Request):
    """Move a session to another project."""

    project_id: Annotated[str, text(MAX_NAME, 1)]


class GetSessionResponse(Response):
    """The training runs and samplers a session made."""

    training_run_ids: Listing[str]
    sampler_ids: Listing[str]
    user_metadata: Texts | None = None
    display_name: str | None = None


class ListSessionsResponse(Response):
    """Session ids, newest first."""

    sessions: Listing[str]


class TraceExportResponse(Response):
    """The state of a trace export; `url` when ready, `error` when failed."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None
