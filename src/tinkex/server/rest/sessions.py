"""`/sessions`: list, look at, search, move to a project, finish, and export a trace.

A session belongs to one user and is never shared, so `accessible` shows what `owned` shows.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.http.inputs import AccessScope, Limit, Offset, Text, moment
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.files import link
from tinkex.server.rest.search import Position, has_metadata, includes, matching_page
from tinkex.server.rest.views import session_summary, texts
from tinkex.server.service.service import Service
from tinkex.store import Session, SessionQuery, Store, User
from tinkex.types import SessionSearchRequest as Search

router = APIRouter(prefix="/api/v1/sessions", tags=["sessions"])


@serve(router, "list_sessions")
async def list_sessions(
    store: Store,
    user: User,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
) -> types.ListSessionsResponse:
    ids = await store.call(store.sessions.list_ids, user.user_id, limit, offset)
    return types.ListSessionsResponse(sessions=ids)


@serve(router, "search_sessions")
async def search(store: Store, user: User, asked: Search) -> types.SessionSearchResponse:
    found, last = await store.call(_search, store, user, asked)
    totals = await store.call(
        store.checkpoints.totals_of_sessions, [session.session_id for session in found]
    )
    summaries = [session_summary(s, *totals.get(s.session_id, (0, 0))) for s in found]
    next_cursor = None
    if last is not None:
        next_cursor = types.SessionSearchCursor(
            last_created_at=moment(last[0]), last_session_id=last[1]
        )
    return types.SessionSearchResponse(sessions=summaries, next_cursor=next_cursor)


@serve(router, "get_session")
async def get_session(
    store: Store, user: User, session_id: Text, access_scope: AccessScope = "owned"
) -> types.GetSessionResponse:
    session = await owned_session(store, session_id, user)
    models = await store.call(store.models.of_session, session_id)
    samplers = await store.call(store.sampling.of_session, session_id)
    return types.GetSessionResponse(
        training_run_ids=[model.model_id for model in models],
        sampler_ids=[sampler.sampling_session_id for sampler in samplers],
        user_metadata=texts(session.user_metadata),
        display_name=session.display_name,
    )


@serve(router, "assign_session_project")
async def set_project(
    store: Store, user: User, session_id: Text, asked: types.AssignSessionProjectRequest
) -> None:
    session = await owned_session(store, session_id, user)
    await store.call(store.sessions.set_project, session_id, asked.project_id)
    details = {"session_id": session_id, "from": session.project_id, "to": asked.project_id}
    store.audit.record(user.user_id, "project_session_assigned", details)


@serve(router, "finish_session")
async def finish(
    service: Service, store: Store, user: User, session_id: Text, asked: types.FinishSessionRequest
) -> None:
    """End a session. The first reason wins; repeating the call is harmless."""
    await owned_session(store, session_id, user)
    status = {"type": "client_finished", "reason": {"type": asked.reason.type}}
    if asked.detail is not None:
        status["detail"] = asked.detail
    if await store.call(store.sessions.finish, session_id, status):
        await service.finish_session(session_id)


@serve(router, "export_session_trace")
async def trace_export(request: Request, user: CurrentUser, session_id: Text) -> Response:
    store = dependencies_of(request).store
    await owned_session(store, session_id, user)
    url, _ = await link(request, {"trace": session_id}, f"{session_id}.pftrace")
    return answer(types.TraceExportResponse(status="ready", url=url))


async def owned_session(store: Store, session_id: str, user: User) -> Session:
    session = await store.call(store.sessions.get, session_id)
    if session is None or session.user_id != user.user_id:
        text = f"No session {session_id!r} of yours. List them with GET /sessions."
        raise ApiError(404, text, listing="sessions")
    return session


def _search(store: Store, user: User, asked: Search) -> tuple[list[Session], Position | None]:
    """A page of matches, and the position after which the next page starts."""
    if not includes(asked.owner, user):
        return [], None
    at = asked.cursor
    return matching_page(
        lambda before, limit: store.sessions.search(_query(user, asked, before), limit),
        lambda session: (session.created_at, session.session_id),
        lambda session: _matches(session, asked),
        before=None if at is None else (at.last_created_at.timestamp(), at.last_session_id),
        limit=asked.limit,
    )


def _query(user: User, asked: Search, before: Position | None) -> SessionQuery:
    return SessionQuery(
        user_ids=[user.user_id],
        session_id=asked.session_id,
        display_name=asked.display_name,
        project_ids=asked.project_ids,
        status_types=[status.type for status in asked.statuses] if asked.statuses else None,
        before=before,
    )


def _matches(session: Session, asked: Search) -> bool:
    """The conditions that the database does not check: metadata pairs and finish reasons."""
    if not has_metadata(session.user_metadata, asked.user_metadata):
        return False
    if asked.statuses is None:
        return True
    reason = session.status.get("reason", {}).get("type")
    return any(
        wanted.type == session.status["type"]
        and (
            not isinstance(wanted, types.ClientFinishedSessionStatusQuery)
            or not wanted.reasons
            or reason in wanted.reasons
        )
        for wanted in asked.statuses
    )
