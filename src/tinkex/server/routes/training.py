"""Training: a route for each operation on a model, and what is asked about models beside them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tinkex.server import decode
from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import answer, read_body, read_json, service_of
from tinkex.server.off_loop import off_loop
from tinkex.server.operations.table import OPERATIONS

router = APIRouter(prefix="/api/v1", tags=["training"])


def _add_route(name: str, description: str | None) -> None:
    """A request of an operation becomes a promise: in the journal and in its model's lane."""

    @router.post(f"/{name}", name=name, description=description)
    async def accept(request: Request, user: CurrentUser) -> Response:
        service = service_of(request)
        raw = await read_body(request)
        content_type = request.headers.get("content-type", "")
        opened = await off_loop(len(raw), service.operations[name].open, raw, content_type)
        operation = service.operations[service.operations[name].kind_of(opened)]
        address = operation.peek(opened)
        if address.model_id is None:
            lane = await service.new_lane(operation, opened, user)
        else:
            lane = await service.lane(user, address.model_id)
        promise = await lane.inbox.accept(operation, opened, user, address.seq_id)
        return answer({"request_id": promise.request_id, "model_id": lane.model.model_id})


for _operation in OPERATIONS:
    _add_route(_operation.name, _operation.__doc__)


@router.post("/get_info")
async def get_info(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    model = await service.model(user, decode.text(body, "model_id"))
    info = await service.catalog.info(model.base_model, timeout_s=50)
    return answer(
        {
            "model_id": model.model_id,
            "model_data": {
                "arch": info.arch if info else None,
                "model_name": model.base_model,
                "tokenizer_id": info.tokenizer_id if info else model.base_model,
            },
            "optimizer_config": model.optimizer_config,
            "is_lora": True,
            "lora_rank": model.lora.get("rank"),
            "model_name": model.base_model,
            "type": "get_info",
        }
    )


@router.post("/unload_model")
async def unload_model(request: Request, user: CurrentUser) -> Response:
    """For clients up to 0.24: forget a model's state and free its memory."""
    service = service_of(request)
    body = await read_json(request)
    model_id = decode.text(body, "model_id")
    promise = await service.unload(user, model_id)
    return answer({"request_id": promise.request_id, "model_id": model_id})


@router.post("/create_custom_loss")
async def create_custom_loss(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    session = await service.sessions.owned(user, decode.text(body, "session_id"))
    promise = await service.create_custom_loss(user, session.session_id, body)
    return answer({"request_id": promise.request_id})
