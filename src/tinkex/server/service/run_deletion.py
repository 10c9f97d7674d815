"""A run deleted for good: its segments, checkpoints, curves, rollouts, state and journal.

Its state goes first, which leaves a run that was unloaded, then its journal in small pieces, then
everything else in one transaction. A crash in between leaves a run that is still listed with all
its checkpoints and can be deleted again; a crash after it leaves folders that the sweeper removes.
Bills and audit lines stay. Runs that were made from its checkpoints have a state of their own.
"""

from __future__ import annotations

import time
from typing import Any

from tinkex.server.process.problems import ApiError
from tinkex.server.runs.states import SILENT_S
from tinkex.server.service.service import Service
from tinkex.store import DeletedRun, Model


async def delete_run(service: Service, model: Model, details: dict[str, Any]) -> DeletedRun:
    """Delete the run that a model is a segment of; `details` go into the line of the audit log.

    Raises:
        ApiError: 400 while it trains.
        InvalidInputError: It has a published checkpoint.
    """
    store = service.store
    segments = await store.call(store.runs.check_deletable, model)
    for segment in segments:
        await _check_idle(service, segment)
    for segment in segments:
        if not await service.forget_state(segment.model_id):
            raise _trains(segment, "it has requests queued or running")
        await store.call(store.journal.drop_run, segment.model_id)
    ids = [segment.model_id for segment in segments]
    async with service.curves.dropping(ids):
        deleted = await store.call(store.runs.delete, model, segments)
    for model_id in ids:
        await store.call(store.journal.drop_run, model_id)  # what came in the last moment
        service.rollouts.drop_run(model_id)
        await service.budgets.forget_run(model_id)
    service.timelines.drop_runs(model.user_id, ids)
    service.sampling_sessions.forget_runs(ids)
    details |= {
        "run_id": model.model_id,
        "name": segments[-1].name,
        "segments": ids,
        "num_checkpoints": deleted.num_checkpoints,
        "size_bytes": deleted.freed_bytes,
    }
    store.audit.record(model.user_id, "run_deleted", details)
    await service.shelf.remove_deleted()
    return deleted


async def _check_idle(service: Service, model: Model) -> None:
    if service.doing(model.model_id):
        raise _trains(model, "it has requests queued or running")
    store = service.store
    session = await store.call(store.sessions.get, model.session_id)
    silent_s = time.time() - model.last_request_time
    is_open = session is not None and session.status["type"] == "active" and not model.unloaded
    if is_open and silent_s < SILENT_S:
        raise _trains(model, f"its program sent a request {silent_s:.0f} s ago")


def _trains(model: Model, why: str) -> ApiError:
    return ApiError(
        400,
        f"The run {model.name or model.model_id!r} trains ({why}). Stop it first with `tinkex run "
        f"stop {model.model_id}`, or end its program; then delete it.",
    )
