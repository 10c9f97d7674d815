"""`/audit` and `/billing`: what happened, and who used how much. Users see their own.

Costs are absent: compute on one's own machine has no price here. Counts are real (see the ledger).
"""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import AwareDatetime

from tinkex.server.auth import CurrentUser
from tinkex.server.problems import ApiError
from tinkex.server.rest.inputs import Text, rfc3339
from tinkex.server.rest.views import audit_view, storage_view, texts, usage_view
from tinkex.store import Store

router = APIRouter(prefix="/api/v1", tags=["admin"])
MAX_WINDOW = timedelta(days=14)
_PREFIXES = {
    "all": None,
    "checkpoints": ["checkpoint_"],
    "projects": ["project_"],
    "teams": ["team_"],
    "organizations": ["organization_"],
}
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit")
async def audit_log(
    request: Request,
    user: CurrentUser,
    event_type: Annotated[EventType, Query()] = "all",
    day: Annotated[date | None, Query()] = None,
) -> dict[str, Any]:
    """The entries of one day, UTC; of today when none is named."""
    store: Store = request.app.state.store
    chosen = day or datetime.now(UTC).date()
    start = datetime(chosen.year, chosen.month, chosen.day, tzinfo=UTC).timestamp()
    entries = await store.call(
        store.audit.entries,
        user.user_id,
        prefixes=_PREFIXES[event_type],
        start=start,
        end=start + 86_400,
    )
    return {"entries": [audit_view(entry) for entry in entries]}


@router.get("/billing/usage/events")
async def usage_events(
    request: Request,
    user: CurrentUser,
    starting_on: Annotated[AwareDatetime, Query()],
    ending_before: Annotated[AwareDatetime, Query()],
) -> dict[str, Any]:
    store: Store = request.app.state.store
    _check_window(starting_on, ending_before)
    rows = await store.call(
        store.usage.events, user.user_id, starting_on.timestamp(), ending_before.timestamp()
    )
    session_ids = sorted({row.session_id for row in rows if row.session_id})
    sessions = [await store.call(store.sessions.get, session_id) for session_id in session_ids]
    return {
        "data": [usage_view(row, user.name) for row in rows],
        "sessions": {
            session.session_id: {"user_metadata": texts(session.user_metadata)}
            for session in sessions
            if session is not None
        },
        "cost_data_through": rfc3339(min(ending_before.timestamp(), time.time())),
    }


@router.get("/billing/usage/checkpoints/current")
async def storage_usage(
    request: Request, user: CurrentUser, project_id: Annotated[Text | None, Query()] = None
) -> dict[str, Any]:
    store: Store = request.app.state.store
    totals = await store.call(store.checkpoints.storage_by_project, user.user_id)
    rows = [
        storage_view(user.user_id, user.name, user.email, project, *total)
        for project, total in totals.items()
        if project_id is None or project == project_id
    ]
    return {"data": rows}


def _check_window(start: datetime, end: datetime) -> None:
    for name, moment in (("starting_on", start), ("ending_before", end)):
        if moment.minute or moment.second or moment.microsecond:
            raise ApiError(400, f"{name} must be a full hour, got {moment}.", path=name)
    if not start < end <= start + MAX_WINDOW:
        raise ApiError(
            400,
            f"ending_before must lie after starting_on by at most 14 days, got {start} to {end}.",
            path="ending_before",
        )
