"""Training: a route for each operation on a model, and what is asked about models beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import header, open_body
from tinkex.server.http.dependencies import service_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.operations.table import OPERATIONS
from tinkex.server.service.service import Service
from tinkex.server.work.futures import Promise
from tinkex.store import User
from tinkex.types.service.extensions import LogMetricsRequest, LogMetricsResponse

router = APIRouter(prefix="/api/v1", tags=["training"])


def _add_route(name: str, description: str | None) -> None:
    """A request of an operation becomes a promise: in the journal and in its model's lane."""

    @serve(router, name, name=name, description=description)
    async def accept(request: Request, user: CurrentUser) -> Response:
        service = service_of(request)
        opened = await open_body(request, name)
        operation = service.operations[opened.endpoint.name]
        # Before anything is judged: the number counts even when the rest is refused.
        address = operation.peek(opened)
        if address.model_id is None:
            inbox = await service.new_inbox(operation, opened, user)
        else:
            inbox = await service.inbox(user, address.model_id)
        key = header(request, b"x-idempotency-key") or None
        accepting = inbox.accept(operation, opened, user, address.seq_id, key)
        # A client that hangs up must not leave a place empty that later requests stand behind.
        promise = await (_whole(accepting) if operation.is_unnumbered else accepting)
        model_id = inbox.lane.model.model_id
        return answer(types.UntypedAPIFuture(request_id=promise.request_id, model_id=model_id))


async def _whole(work: Coroutine[Any, Any, Promise]) -> Promise:
    return await asyncio.shield(asyncio.create_task(work))


for _name, _operation in OPERATIONS.items():
    _add_route(_name, _operation.__doc__)


@serve(router, "get_info")
async def get_info(
    service: Service, user: User, asked: types.GetInfoRequest
) -> types.GetInfoResponse:
    model = await service.model(user, asked.model_id)
    info = await service.catalog.info(model.base_model, timeout_s=50)
    about = types.ModelData(
        arch=info.arch if info else None,
        model_name=model.base_model,
        tokenizer_id=info.tokenizer_id if info else model.base_model,
    )
    return types.GetInfoResponse(
        model_id=model.model_id,
        model_data=about,
        optimizer_config=types.OptimizerConfigBase(**model.optimizer_config),
        is_lora=True,
        lora_rank=model.lora.get("rank"),
        model_name=model.base_model,
        type="get_info",
    )


@serve(router, "log_metrics")
async def log_metrics(service: Service, user: User, asked: LogMetricsRequest) -> LogMetricsResponse:
    """Numbers that a client measures itself, drawn beside those of the server."""
    model = await service.model(user, asked.model_id)
    await service.curves.log(model.model_id, asked.metrics, asked.step)
    return LogMetricsResponse()


@serve(router, "unload_model")
async def unload_model(
    service: Service, user: User, asked: types.UnloadModelRequest
) -> types.UntypedAPIFuture:
    """For clients up to 0.24: forget a model's state and free its memory."""
    promise = await service.unload(user, asked.model_id)
    return types.UntypedAPIFuture(request_id=promise.request_id, model_id=asked.model_id)


@serve(router, "create_custom_loss")
async def create_custom_loss(
    service: Service, user: User, asked: types.CreateCustomLossRequest
) -> types.UntypedAPIFuture:
    await service.sessions.owned(user, asked.session_id)
    promise = await service.create_custom_loss(user, asked)
    return types.UntypedAPIFuture(request_id=promise.request_id)


@serve(router, "interpolate_checkpoints")
async def interpolate_checkpoints(
    service: Service, user: User, asked: types.InterpolateCheckpointsRequest
) -> types.UntypedAPIFuture:
    """MinT's call: a checkpoint for sampling between others. Answered when it is there."""
    promise = await service.interpolations.interpolate(user, asked)
    return types.UntypedAPIFuture(request_id=promise.request_id)
