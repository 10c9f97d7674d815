"""`/training_runs`, `/weights_info`, `/samplers`: what a user has trained and can sample from.

`owned` shows a user's own runs; `accessible` also shows runs with a public checkpoint.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.http.inputs import AccessScope, Limit, Offset, Text, cursor, moment
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.files import link
from tinkex.server.rest.views import run_view, weights_view
from tinkex.server.runs.curves import Course
from tinkex.server.runs.descriptions import NEAR_AMONG, did_you_mean, name_of, tags_of
from tinkex.server.runs.progress import LISTED, progress_of
from tinkex.server.runs.segments import courses_of, last_checkpoints, segment_ids
from tinkex.server.runs.states import state_of
from tinkex.server.service.service import Service
from tinkex.server.workers.pool import Pool
from tinkex.store import Model, Session, Store, User

router = APIRouter(prefix="/api/v1", tags=["runs"])


@serve(router, "list_training_runs")
async def list_runs(
    service: Service,
    store: Store,
    user: User,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project_id: Text | None = None,
) -> types.TrainingRunsResponse:
    models, total = await store.call(
        store.models.page,
        user.user_id,
        limit,
        offset,
        project_id=project_id,
        with_public=access_scope == "accessible",
    )
    views = await _with_progress(service, models, user)
    return types.TrainingRunsResponse(training_runs=views, cursor=cursor(offset, limit, total))


@serve(router, "get_training_run")
async def get_run(
    service: Service, user: User, run_id: Text, access_scope: AccessScope = "owned"
) -> types.TrainingRun:
    with_public = access_scope == "accessible"
    model = await visible_run(service.store, run_id, user, with_public=with_public)
    return await whole_view(service, model, user)


@serve(router, "export_run_trace")
async def trace_export(request: Request, user: CurrentUser, run_id: Text) -> Response:
    store = dependencies_of(request).store
    model = await visible_run(store, run_id, user, with_public=False)
    # By its id: a name may be another run's when the link is opened.
    resource = {"trace": model.session_id, "run": model.model_id}
    url, _ = await link(request, resource, f"{model.model_id}.pftrace")
    return answer(types.TraceExportResponse(status="ready", url=url))


@serve(router, "weights_info")
async def weights_info(
    shelf: Shelf, user: User, asked: types.WeightsInfoRequest
) -> types.WeightsInfoResponse:
    return weights_view(await shelf.readable(asked.tinker_path, user))


@serve(router, "get_sampler")
async def get_sampler(store: Store, user: User, sampler_id: Text) -> types.GetSamplerResponse:
    sampler = await store.call(store.sampling.get, sampler_id)
    if sampler is None or sampler.user_id != user.user_id:
        raise ApiError(404, f"No sampler {sampler_id!r} of yours.")
    return types.GetSamplerResponse(
        sampler_id=sampler.sampling_session_id,
        base_model=sampler.base_model,
        model_path=sampler.model_path,
    )


async def visible_run(store: Store, run_id: str, user: User, *, with_public: bool) -> Model:
    """A run of the user's own, by id or name, or one with a public checkpoint if asked for."""
    model = await store.call(store.models.find, user.user_id, run_id)
    if model is None and with_public and await store.call(store.models.has_public, run_id):
        model = await store.call(store.models.get, run_id)
    if model is not None:
        return model
    hint = ""
    if ":train:" not in run_id:  # an id is copied, not typed
        names = await store.call(store.models.names, user.user_id, NEAR_AMONG)
        hint = await asyncio.to_thread(did_you_mean, run_id, names)
    text = f"No training run {run_id!r} of yours.{hint} List them with GET /training_runs."
    raise ApiError(404, text, listing="training_runs")


async def whole_view(service: Service, model: Model, user: User) -> types.TrainingRun:
    """A run with all that is said of one; of another user's only what is in lists."""
    [view] = await _with_progress(service, [model], user)
    if model.user_id != user.user_id:
        return view
    segments = await service.store.call(service.store.models.segments, model)
    own = {"settings": model.settings, **_where_it_runs(service.workers.pool, model.model_id)}
    if len(segments) > 1:
        own["segments"] = list(map(_segment, segments))
    return view.model_copy(update=own)


def _segment(model: Model) -> types.RunSegment:
    return types.RunSegment(
        run_id=model.model_id, step=model.continues_step or 0, time=moment(model.created_at)
    )


async def _with_progress(
    service: Service, models: list[Model], user: User
) -> list[types.TrainingRun]:
    """Runs as the contract has them, with what a person wants to know about each."""
    store = service.store
    views = await store.call(_with_checkpoints, store, models)
    sessions = await store.call(store.sessions.by_id, {model.session_id for model in models})
    curves = await courses_of(store, service.curves, models, LISTED)
    shown = [
        view.model_copy(update=_progress(service, model, sessions.get(model.session_id), curves))
        for view, model in zip(views, models, strict=True)
    ]
    # What an owner wrote for themselves is not part of the checkpoint that they published.
    private = {"note": None, "tags": None, "project_id": None}
    return [
        view if model.user_id == user.user_id else view.model_copy(update=private)
        for view, model in zip(shown, models, strict=True)
    ]


def _where_it_runs(pool: Pool, model_id: str) -> dict[str, Any]:
    """The workers that have a run in memory, and where the time of its steps goes."""
    workers = [
        types.RunWorker(
            name=member.name,
            utilisation=round(member.utilisation, 3),
            kv_bytes=member.held_bytes.get("kv", 0),
            adapter_bytes=member.held_bytes.get("adapters", 0),
        )
        for member in pool.members_of(model_id)
    ]
    return {"workers": workers, "step_seconds": dict(pool.times_of(model_id)) or None}


def _progress(
    service: Service,
    model: Model,
    session: Session | None,
    curves: dict[tuple[str, str], Course],
) -> dict[str, Any]:
    state, _ = state_of(model, session, service.doing(model.model_id))
    known: dict[str, Any] = {
        "name": name_of(model, session),
        "tags": tags_of(model, session),
        "project_id": session.project_id if session else None,
        "state": state,
    }
    progress = progress_of(model, curves)
    return {**known, **progress.last, "num_steps": progress.num_steps}


def _with_checkpoints(store: Store, models: list[Model]) -> list[types.TrainingRun]:
    """Runs with the last checkpoints of all their segments."""
    ids = segment_ids(store, models)
    last = last_checkpoints(store, ids, "weights")
    last_sampler = last_checkpoints(store, ids, "sampler_weights")
    return [run_view(m, last.get(m.model_id), last_sampler.get(m.model_id)) for m in models]
