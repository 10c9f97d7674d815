"""`/trajectories` and `/checkpoint_names`: what endpoints of other APIs leave and understand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tinkex.errors import InvalidInputError
from tinkex.server.auth import CurrentUser
from tinkex.server.compat import fields
from tinkex.server.compat.model_names import ModelNames
from tinkex.server.compat.trajectories import TrajectoryRecorder, check_id
from tinkex.server.exchange import Answer, answer, service_of
from tinkex.server.files.checkpoints import check_name
from tinkex.server.problems import ApiError
from tinkex.store import TrajectoryAnswer

router = APIRouter(prefix="/api/v1", tags=["records"])


@router.get("/trajectories/{trajectory_id}")
async def get_trajectory(request: Request, user: CurrentUser, trajectory_id: str) -> Response:
    """Every answer of a recorded conversation: tokens, logprobs, and which answer it follows."""
    trajectories: TrajectoryRecorder = request.app.state.trajectories
    found = await trajectories.answers(user, trajectory_id)
    if not found:
        raise ApiError(404, f"No trajectory {trajectory_id[:200]!r} of yours.")
    return Answer(await asyncio.to_thread(_told, trajectory_id, found))


@router.delete("/trajectories/{trajectory_id}")
async def delete_trajectory(request: Request, user: CurrentUser, trajectory_id: str) -> Response:
    store = service_of(request).store
    removed = await store.call(store.trajectories.remove, user.user_id, check_id(trajectory_id))
    return answer({"trajectory_id": trajectory_id, "num_answers": removed})


def _told(trajectory_id: str, found: Sequence[TrajectoryAnswer]) -> bytes:
    """As JSON, written one by one: a long trajectory must not hold every other thread up."""
    answers = b",".join(orjson.dumps(_view(one)) for one in found)
    return b'{"trajectory_id":%b,"answers":[%b]}' % (orjson.dumps(trajectory_id), answers)


def _view(one: TrajectoryAnswer) -> dict[str, Any]:
    return {
        "answer_id": one.answer_id,
        "parent_id": one.parent_id,
        "prompt_tokens": np.frombuffer(one.prompt_tokens, "<i4").tolist(),
        "tokens": np.frombuffer(one.tokens, "<i4").tolist(),
        "logprobs": np.frombuffer(one.logprobs, "<f4").tolist(),
        "stop_reason": one.stop_reason,
        "model": one.model,
        "snapshot": one.snapshot,
        "created_at": one.created_at,
    }


# ------------------------------------------------------------------------------------ names


class NameRequest(fields.ForeignBody):
    """A short name for a checkpoint."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    path: fields.Name


@router.get("/checkpoint_names")
async def list_names(request: Request, user: CurrentUser) -> Response:
    store = service_of(request).store
    found = await store.call(store.names.of_user, user.user_id)
    return answer({"names": [{"name": one.name, "path": one.path} for one in found]})


@router.post("/checkpoint_names")
async def give_name(request: Request, user: CurrentUser) -> Response:
    """Name a checkpoint; a name that is in use moves."""
    service = service_of(request)
    body = await fields.read(request, NameRequest)
    body.ignored()
    check_name(body.name)
    if body.name in service.catalog.names:
        raise InvalidInputError(
            f"{body.name!r} is a base model here; choose another name", path="name"
        )
    found = await service.shelf.readable(body.path, user)
    await service.store.call(service.store.names.put, user.user_id, body.name, found.path)
    names: ModelNames = request.app.state.names
    names.forget(user, body.name)
    return answer({"name": body.name, "path": found.path})


@router.delete("/checkpoint_names/{name}")
async def remove_name(request: Request, user: CurrentUser, name: str) -> Response:
    store = service_of(request).store
    if not await store.call(store.names.remove, user.user_id, name):
        raise ApiError(404, f"No checkpoint of yours is named {name[:200]!r}.")
    names: ModelNames = request.app.state.names
    names.forget(user, name)
    return answer({"name": name})
