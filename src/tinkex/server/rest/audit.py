"""`/audit` and `/billing`: what happened, and who used how much. Users see their own.

Costs are absent: compute on one's own machine has no price here. Counts are real (`store.usage`).
"""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from tinkex import types
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text, moment
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.views import audit_view, storage_view, texts, usage_view
from tinkex.server.service.service import Service
from tinkex.store import Store, User
from tinkex.types.fields.message import FIRST, LAST

router = APIRouter(prefix="/api/v1", tags=["admin"])
MAX_WINDOW = timedelta(days=14)
Hour = Annotated[AwareDatetime, Query(ge=FIRST, le=LAST)]
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@serve(router, "audit_log")
async def audit_log(
    store: Store,
    user: User,
    event_type: Annotated[EventType, Query()] = "all",
    day: Annotated[date | None, Query()] = None,
) -> types.AuditLogResponse:
    """The entries of one day, UTC; of today when none is named."""
    # Events are named by what they are about: checkpoint_saved, project_session_assigned.
    prefixes = None if event_type == "all" else [f"{event_type.removesuffix('s')}_"]
    chosen = day or datetime.now(UTC).date()
    start = datetime(chosen.year, chosen.month, chosen.day, tzinfo=UTC).timestamp()
    entries = await store.call(
        store.audit.entries,
        user.user_id,
        prefixes=prefixes,
        start=start,
        end=start + 86_400,
    )
    return types.AuditLogResponse(entries=[audit_view(entry) for entry in entries])


@serve(router, "billing_usage")
async def usage_events(
    service: Service, store: Store, user: User, starting_on: Hour, ending_before: Hour
) -> types.BillingUsageResponse:
    _check_window(starting_on, ending_before)
    service.ends.flush()  # a client may know the end of a request before the journal
    rows = await store.call(
        store.usage.events, user.user_id, starting_on.timestamp(), ending_before.timestamp()
    )
    session_ids = sorted({row.session_id for row in rows if row.session_id})
    sessions = [await store.call(store.sessions.get, session_id) for session_id in session_ids]
    about = {
        session.session_id: types.BillingUsageSession(user_metadata=texts(session.user_metadata))
        for session in sessions
        if session is not None
    }
    return types.BillingUsageResponse(
        data=[usage_view(row, user.name) for row in rows],
        sessions=about,
        cost_data_through=moment(min(ending_before.timestamp(), time.time())),
    )


@serve(router, "checkpoint_storage_usage")
async def storage_usage(
    store: Store, user: User, project_id: Annotated[Text | None, Query()] = None
) -> types.CurrentCheckpointStorageUsageResponse:
    totals = await store.call(store.checkpoints.storage_by_project, user.user_id)
    rows = [
        storage_view(user, project, *total)
        for project, total in totals.items()
        if project_id is None or project == project_id
    ]
    return types.CurrentCheckpointStorageUsageResponse(data=rows)


def _check_window(start: datetime, end: datetime) -> None:
    for name, at in (("starting_on", start), ("ending_before", end)):
        if at.minute or at.second or at.microsecond:
            raise ApiError(400, f"{name} must be a full hour, got {at}.", path=name)
    if not start < end <= start + MAX_WINDOW:
        raise ApiError(
            400,
            f"ending_before must lie after starting_on by at most 14 days, got {start} to {end}.",
            path="ending_before",
        )
