"""`/trajectories` and `/checkpoint_names`: what endpoints of other APIs leave and understand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Response

from tinkex import types
from tinkex.errors import InvalidInputError
from tinkex.server.compat.dependencies import Names, Trajectories
from tinkex.server.compat.trajectories import check_id
from tinkex.server.http.handlers import Answer, serve
from tinkex.server.http.inputs import Text
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.store import Store, TrajectoryAnswer, User
from tinkex.types.account.checkpoints import check_name
from tinkex.types.service.extensions import (
    DeleteTrajectoryResponse,
    NameCheckpointRequest,
    RemoveNameResponse,
)

router = APIRouter(prefix="/api/v1", tags=["records"])


@serve(router, "get_trajectory")
async def get_trajectory(trajectories: Trajectories, user: User, trajectory_id: Text) -> Response:
    """Every answer of a recorded conversation: tokens, logprobs, and which answer it follows."""
    answers = await trajectories.answers(user, trajectory_id)
    if not answers:
        raise ApiError(404, f"No trajectory {trajectory_id[:200]!r} of yours.")
    return Answer(await asyncio.to_thread(_told, trajectory_id, answers))


@serve(router, "delete_trajectory")
async def delete_trajectory(
    store: Store, user: User, trajectory_id: Text
) -> DeleteTrajectoryResponse:
    removed = await store.call(store.trajectories.remove, user.user_id, check_id(trajectory_id))
    return DeleteTrajectoryResponse(trajectory_id=trajectory_id, num_answers=removed)


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


@serve(router, "list_checkpoint_names")
async def list_names(store: Store, user: User) -> types.CheckpointNamesResponse:
    rows = await store.call(store.names.of_user, user.user_id)
    names = [types.CheckpointName(name=one.name, path=one.path) for one in rows]
    return types.CheckpointNamesResponse(names=names)


@serve(router, "name_checkpoint")
async def give_name(
    service: Service, names: Names, user: User, asked: NameCheckpointRequest
) -> types.CheckpointName:
    """Name a checkpoint; a name that is in use moves."""
    check_name(asked.name)
    if asked.name in service.catalog.names:
        raise InvalidInputError(
            f"{asked.name!r} is a base model here; choose another name", path="name"
        )
    checkpoint = await service.shelf.readable(asked.path, user)
    await service.store.call(service.store.names.put, user.user_id, asked.name, checkpoint.path)
    names.forget(user, asked.name)
    return types.CheckpointName(name=asked.name, path=checkpoint.path)


@serve(router, "remove_checkpoint_name")
async def remove_name(store: Store, names: Names, user: User, name: Text) -> RemoveNameResponse:
    if not await store.call(store.names.remove, user.user_id, name):
        raise ApiError(404, f"No checkpoint of yours is named {name[:200]!r}.")
    names.forget(user, name)
    return RemoveNameResponse(name=name)
