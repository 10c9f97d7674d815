"""`/tinkex/v1/runs`: what a user says of a run of theirs, and does with it."""

from __future__ import annotations

from fastapi import APIRouter

from tinkex import types
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text
from tinkex.server.rest.runs import visible_run, whole_view
from tinkex.server.rest.views import deletion_view
from tinkex.server.runs.descriptions import describe
from tinkex.server.service.run_deletion import delete_run as delete_for_good
from tinkex.server.service.service import Service
from tinkex.server.work.futures import Outcome
from tinkex.store import User
from tinkex.types.account.administration import (
    DeleteRunResponse,
    StopWorkRequest,
    StopWorkResponse,
)
from tinkex.types.service.extensions import DescribeRunRequest

router = APIRouter(prefix="/tinkex/v1", tags=["runs"])


@serve(router, "describe_run")
async def describe_run(
    service: Service, user: User, run_id: Text, asked: DescribeRunRequest
) -> types.TrainingRun:
    """Name a run, note and tag it, keep what its program was started with."""
    model = await visible_run(service.store, run_id, user, with_public=False)
    before, model = model, await describe(service.store, service.curves, model, asked)
    if model.first_run_id is not None and before.first_run_id is None:
        service.ends.flush()  # what it has used so far counts
        await service.budgets.join(model.model_id, model.first_run_id)
    return await whole_view(service, model, user)


@serve(router, "stop_run")
async def stop_run(
    service: Service, user: User, run_id: Text, asked: StopWorkRequest
) -> StopWorkResponse:
    """End what a run has queued and running, and its session with it, where no other run has one.

    Its program hears that it was stopped, by what was queued or by what it asks next; its
    checkpoints stay, and it can be resumed from them.
    """
    store = service.store
    model = await visible_run(store, run_id, user, with_public=False)
    error = "The run was stopped by its owner" + (f": {asked.reason}." if asked.reason else ".")
    lane = service.find_lane(model.model_id)
    num_ended = lane.stop(Outcome(error=error, category="user")) if lane else 0
    siblings = await store.call(store.models.of_session, model.session_id)
    if all(other.model_id == model.model_id or other.continued_by for other in siblings):
        status = {"type": "cancelled", "detail": error}
        if await store.call(store.sessions.finish, model.session_id, status):
            await service.finish_session(model.session_id)
    details = {"run_id": model.model_id, "reason": asked.reason, "num_ended": num_ended}
    store.audit.record(user.user_id, "run_stopped", details)
    return StopWorkResponse(num_ended=num_ended)


@serve(router, "delete_run")
async def delete_run(service: Service, user: User, run_id: Text) -> DeleteRunResponse:
    """Delete a run of the caller's own for good, all segments and checkpoints of it."""
    model = await visible_run(service.store, run_id, user, with_public=False)
    return deletion_view(await delete_for_good(service, model, {}))
