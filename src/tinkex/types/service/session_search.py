"""Finding sessions by owner, name, status or metadata."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.contract.bounds import Between
from tinkex.contract.cost import SEARCH
from tinkex.types.fields.bounds import Id, Metadata, Names, listing, text
from tinkex.types.fields.message import AwareMoment, Listing, Request, Response, Texts
from tinkex.types.service.search_owner import OwnSearchOwner, SearchOwner
from tinkex.types.service.session_status import ClientSessionFinishReasonType, SessionStatus


class ActiveSessionStatusQuery(Request):
    """Sessions that are still open."""

    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request):
    """Sessions that were cancelled."""

    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request):
    """Sessions the server ended because of a failure."""

    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request):
    """Sessions their client finished, for any reason or one of `reasons`."""

    type: Literal["client_finished"] = "client_finished"
    reasons: Annotated[list[ClientSessionFinishReasonType], *listing(16, 1)] | None = None


SessionStatusQuery: TypeAlias = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(Response):
    """Where the next page starts."""

    last_created_at: AwareMoment
    last_session_id: Id


class SessionSearchRequest(Request):
    """`session_id` and `display_name` widen the search (either matches); all else narrows it."""

    session_id: Id | None = None
    project_ids: Names | None = None
    user_metadata: Metadata = {}
    display_name: Annotated[str, text(256, 1)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[SessionStatusQuery], *listing(16, 1)] | None = None
    limit: Annotated[int, Between(1, SEARCH.rows, becomes="rows")] = 50
    cursor: SessionSearchCursor | None = None


class SessionSummary(Response):
    """A session as a search shows it."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: Texts | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(Response):
    """A page of sessions; `next_cursor` is None on the last."""

    sessions: Listing[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
