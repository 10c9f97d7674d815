"""`/sessions`: list, look at, search, move to a project, finish, and export a trace.

A session belongs to one user and is never shared, so `accessible` shows what `owned` shows.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, Field

from tinkex.server.auth import CurrentUser, user_id_of_urn
from tinkex.server.problems import ApiError
from tinkex.server.rest.files import link
from tinkex.server.rest.inputs import AccessScope, Body, Limit, Offset, Text, rfc3339
from tinkex.server.rest.views import session_summary, texts
from tinkex.store import Session, SessionQuery, Store, User

router = APIRouter(prefix="/api/v1/sessions", tags=["sessions"])
SCAN_PAGE = 200
MAX_SCANNED = 5000
"""Most sessions one search looks at; a cursor then lets the caller go on."""
FinishType = Literal["success", "errored", "interrupted"]


class Project(Body):
    project_id: Text


class FinishReason(Body):
    type: FinishType


class Finish(Body):
    reason: FinishReason
    detail: Text | None = None


class Owner(Body):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] = []


class WantedStatus(Body):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[FinishType] | None = None


class Cursor(Body):
    last_created_at: AwareDatetime
    last_session_id: Text


class Search(Body):
    session_id: Text | None = None
    project_ids: list[Text] | None = None
    user_metadata: dict[Text, Text] = {}
    display_name: Annotated[Text, Field(min_length=1)] | None = None
    owner: Owner = Owner()
    statuses: Annotated[list[WantedStatus], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


@router.get("")
async def list_sessions(
    request: Request,
    user: CurrentUser,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
) -> dict[str, list[str]]:
    store: Store = request.app.state.store
    return {"sessions": await store.call(store.sessions.list_ids, user.user_id, limit, offset)}


@router.post("/search")
async def search(request: Request, user: CurrentUser, body: Search) -> dict[str, Any]:
    store: Store = request.app.state.store
    found, last = await store.call(_search, store, user, body)
    totals = await store.call(
        store.checkpoints.totals_of_sessions, [session.session_id for session in found]
    )
    summaries = [session_summary(s, *totals.get(s.session_id, (0, 0))) for s in found]
    next_cursor = None
    if last is not None:
        next_cursor = {
            "last_created_at": rfc3339(last.created_at),
            "last_session_id": last.session_id,
        }
    return {"sessions": summaries, "next_cursor": next_cursor}


@router.get("/{session_id}")
async def get_session(
    request: Request, user: CurrentUser, session_id: Text, access_scope: AccessScope = "owned"
) -> dict[str, Any]:
    store: Store = request.app.state.store
    session = await owned_session(store, session_id, user)
    models = await store.call(store.models.of_session, session_id)
    samplers = await store.call(store.sampling.of_session, session_id)
    return {
        "training_run_ids": [model.model_id for model in models],
        "sampler_ids": [sampler.sampling_session_id for sampler in samplers],
        "user_metadata": texts(session.user_metadata),
        "display_name": session.display_name,
    }


@router.put("/{session_id}/project", status_code=204)
async def set_project(
    request: Request, user: CurrentUser, session_id: Text, body: Project
) -> Response:
    store: Store = request.app.state.store
    session = await owned_session(store, session_id, user)
    if not body.project_id:
        raise ApiError(400, "project_id must not be empty.", path="project_id")
    await store.call(store.sessions.set_project, session_id, body.project_id)
    details = {"session_id": session_id, "from": session.project_id, "to": body.project_id}
    store.audit.record(user.user_id, "project_session_assigned", details)
    return Response(status_code=204)


@router.post("/{session_id}/finish", status_code=204)
async def finish(request: Request, user: CurrentUser, session_id: Text, body: Finish) -> Response:
    """End a session. The first reason wins; repeating the call is harmless."""
    store: Store = request.app.state.store
    await owned_session(store, session_id, user)
    status = {"type": "client_finished", "reason": {"type": body.reason.type}}
    if body.detail is not None:
        status["detail"] = body.detail
    if await store.call(store.sessions.finish, session_id, status):
        ended = request.app.state.on_session_finished
        if ended is not None:
            await ended(session_id)
    return Response(status_code=204)


@router.get("/{session_id}/trace_export")
async def trace_export(request: Request, user: CurrentUser, session_id: Text) -> dict[str, Any]:
    store: Store = request.app.state.store
    await owned_session(store, session_id, user)
    url, _ = link(request, {"trace": session_id}, f"{session_id}.json")
    return {"status": "ready", "url": url}


async def owned_session(store: Store, session_id: str, user: User) -> Session:
    session = await store.call(store.sessions.get, session_id)
    if session is None or session.user_id != user.user_id:
        raise ApiError(404, f"No session {session_id!r} of yours. List them with GET /sessions.")
    return session


def _search(store: Store, user: User, body: Search) -> tuple[list[Session], Session | None]:
    """A page of matches, and the session after which the next page starts."""
    if body.owner.type == "user" and user.user_id not in map(user_id_of_urn, body.owner.owner_urns):
        return [], None
    before = _position(body.cursor)
    found: list[Session] = []
    for _ in range(MAX_SCANNED // SCAN_PAGE):
        page = store.sessions.search(_query(user, body, before), SCAN_PAGE)
        for session in page:
            if _matches(session, body):
                found.append(session)
            if len(found) == body.limit:
                return found, session
        if len(page) < SCAN_PAGE:
            return found, None
        before = (page[-1].created_at, page[-1].session_id)
    return found, page[-1]


def _query(user: User, body: Search, before: tuple[float, str] | None) -> SessionQuery:
    return SessionQuery(
        user_ids=[user.user_id],
        session_id=body.session_id,
        display_name=body.display_name,
        project_ids=body.project_ids,
        status_types=[status.type for status in body.statuses] if body.statuses else None,
        before=before,
    )


def _matches(session: Session, body: Search) -> bool:
    """The conditions that the database does not check: metadata pairs and finish reasons."""
    stored = texts(session.user_metadata) or {}
    if any(stored.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is None:
        return True
    reason = session.status.get("reason", {}).get("type")
    return any(
        status.type == session.status["type"] and (not status.reasons or reason in status.reasons)
        for status in body.statuses
    )


def _position(cursor: Cursor | None) -> tuple[float, str] | None:
    if cursor is None:
        return None
    return _seconds(cursor.last_created_at), cursor.last_session_id


def _seconds(moment: datetime) -> float:
    return moment.timestamp()
