"""`/training_runs`, `/weights_info`, `/samplers`: what a user has trained and can sample from.

`owned` shows a user's own runs; `accessible` also shows runs with a public checkpoint.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from tinkex import types
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import AccessScope, Limit, Offset, Text, cursor
from tinkex.server.process.problems import ApiError
from tinkex.server.rest.views import run_view, weights_view
from tinkex.server.runs.curves import Course
from tinkex.server.service.service import Service
from tinkex.server.workers.pool import Pool
from tinkex.store import Model, Store, User

router = APIRouter(prefix="/api/v1", tags=["runs"])
_TOLD = ("loss", "loss_per_token", "reward")
"""What a recipe logs comes before what the server measures: its loss may have weights."""


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
    views = await _with_progress(service, models)
    return types.TrainingRunsResponse(training_runs=views, cursor=cursor(offset, limit, total))


@serve(router, "get_training_run")
async def get_run(
    service: Service, user: User, run_id: Text, access_scope: AccessScope = "owned"
) -> types.TrainingRun:
    with_public = access_scope == "accessible"
    model = await visible_run(service.store, run_id, user, with_public=with_public)
    [view] = await _with_progress(service, [model])
    if model.user_id == user.user_id:
        view = view.model_copy(update=_where_it_runs(service.workers.pool, model.model_id))
    return view


@serve(router, "weights_info")
async def weights_info(
    shelf: Shelf, user: User, asked: types.WeightsInfoRequest
) -> types.WeightsInfoResponse:
    return weights_view(await shelf.readable(asked.tinker_path, user))


@serve(router, "get_sampler")
async def get_sampler(store: Store, user: User, sampler_id: Text) -> types.GetSamplerResponse:
    found = await store.call(store.sampling.get, sampler_id)
    if found is None or found.user_id != user.user_id:
        raise ApiError(404, f"No sampler {sampler_id!r} of yours.")
    return types.GetSamplerResponse(
        sampler_id=found.sampling_session_id,
        base_model=found.base_model,
        model_path=found.model_path,
    )


async def visible_run(store: Store, run_id: str, user: User, *, with_public: bool) -> Model:
    """A run of the user's own, or one with a public checkpoint where that is asked for."""
    model = await store.call(store.models.get, run_id)
    if model is not None and model.user_id == user.user_id:
        return model
    if model is not None and with_public and await store.call(store.models.has_public, run_id):
        return model
    text = f"No training run {run_id!r} of yours. List them with GET /training_runs."
    raise ApiError(404, text, listing="training_runs")


async def _with_progress(service: Service, models: list[Model]) -> list[types.TrainingRun]:
    """Runs as the contract has them, with what a person wants to know about each."""
    store = service.store
    views = await store.call(_with_checkpoints, store, models)
    called = await store.call(store.sessions.called, {model.session_id for model in models})
    curves = await service.curves.of_runs([model.model_id for model in models], _TOLD)
    busy = set(service.busy_models())
    return [
        view.model_copy(update=_progress(model, called, curves, busy))
        for view, model in zip(views, models, strict=True)
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
    model: Model,
    called: dict[str, tuple[str | None, bool]],
    curves: dict[tuple[str, str], Course],
    busy: set[str],
) -> dict[str, Any]:
    name, is_active = called.get(model.session_id, (None, False))
    state = "idle" if is_active and not model.unloaded else "finished"
    if model.corrupted:
        state = "lost"
    elif model.model_id in busy:
        state = "running"
    known: dict[str, Any] = {"name": name, "state": state}
    told, measured, reward = (curves.get((model.model_id, name)) for name in _TOLD)
    if measured is not None:
        known |= {
            "num_steps": int(measured.last_step),
            "loss": (told or measured).last_value,
        }
    if reward is not None:
        known["reward"] = reward.last_value
    return known


def _with_checkpoints(store: Store, models: list[Model]) -> list[types.TrainingRun]:
    ids = [model.model_id for model in models]
    last = store.checkpoints.last_of_runs(ids, "weights")
    last_sampler = store.checkpoints.last_of_runs(ids, "sampler_weights")
    return [run_view(m, last.get(m.model_id), last_sampler.get(m.model_id)) for m in models]
