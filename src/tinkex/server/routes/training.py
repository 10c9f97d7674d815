"""Training: create, forward_backward, optim_step, load and save, in both generations of the wire.

Each route reads, checks who calls, builds the journal body and hands over to `Service.submit`. A
request whose number can be read is numbered even when the rest is refused, so that the stream of a
client goes on after its mistake.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex.errors import InvalidInputError
from tinkex.server import decode, validation
from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import answer, off_loop, read_body, read_json, service_of
from tinkex.server.files.checkpoints import check_name, expiry_of
from tinkex.server.files.encryption import check_recipients
from tinkex.server.problems import ApiError
from tinkex.server.service import Service, canonical, new_model, new_seed
from tinkex.server.work.futures import Promise
from tinkex.server.work.lanes import Lane
from tinkex.server.work.operations import JSON_BODY, PROTO_BODY, SAVES
from tinkex.store import Checkpoint, User
from tinkex.wire import proto_requests

router = APIRouter(prefix="/api/v1", tags=["training"])


def _promise(promise: Promise, lane: Lane | None = None) -> Response:
    body: dict[str, Any] = {"request_id": promise.request_id}
    if lane is not None:
        body["model_id"] = lane.model_id
    return answer(body)


# ------------------------------------------------------------------------------------ compute


@router.post("/forward_backward")
async def forward_backward(request: Request, user: CurrentUser) -> Response:
    return await _train(request, user, is_forward=False)


@router.post("/forward")
async def forward(request: Request, user: CurrentUser) -> Response:
    """Forward only, for clients up to 0.24; newer ones set a flag on forward_backward."""
    return await _train(request, user, is_forward=True)


async def _train(request: Request, user: User, *, is_forward: bool) -> Response:
    service = service_of(request)
    raw = await read_body(request)
    if "protobuf" in request.headers.get("content-type", ""):
        return await _train_proto(service, user, raw, is_forward=is_forward)
    body = await off_loop(len(raw), decode.load_json, raw)
    lane = await service.lane(user, decode.text(body, "model_id"))
    seq_id = decode.optional_int(body, "seq_id", low=1)
    kind = "forward" if is_forward else "forward_backward"

    async def check() -> decode.TrainRequest:
        parsed = await off_loop(
            len(raw), partial(decode.train_from_json, forward_only=is_forward), body
        )
        return await _check_train(service, user, lane, parsed, len(raw))

    promise = await service.submit(lane, seq_id, kind, JSON_BODY + raw, check=check, cost=len(raw))
    return _promise(promise, lane)


async def _train_proto(service: Service, user: User, raw: bytes, *, is_forward: bool) -> Response:
    message = await off_loop(len(raw), proto_requests.parse, raw)
    lane = await service.lane(user, message.model_id)
    kind = "forward" if is_forward or message.forward_only else "forward_backward"

    async def check() -> decode.TrainRequest:
        parsed = await off_loop(len(raw), decode.train_from_proto, message)
        return await _check_train(service, user, lane, parsed, len(raw))

    promise = await service.submit(
        lane, message.seq_id or None, kind, PROTO_BODY + raw, check=check, cost=len(raw)
    )
    return _promise(promise, lane)


async def _check_train(
    service: Service, user: User, lane: Lane, parsed: decode.TrainRequest, size_bytes: int
) -> decode.TrainRequest:
    info = await service.catalog.info(lane.base_model)
    await off_loop(size_bytes, validation.check_train, parsed, info)
    if parsed.loss_fn == "custom":
        loss_id = str(parsed.loss_fn_config["loss_id"])
        loss = await service.store.call(service.store.sampling.get_loss, loss_id)
        if loss is None or loss.user_id != user.user_id:
            raise InvalidInputError(
                f"no custom loss {loss_id!r}; create it with create_custom_loss first",
                path="loss_fn_config.loss_id",
            )
    return parsed


@router.post("/optim_step")
async def optim_step(request: Request, user: CurrentUser) -> Response:
    service, body, lane = await _start(request, user)
    model = await service.model(user, lane.model_id)
    given = {name: body.get(name) for name in ("adam_params", "optimizer_params")}

    async def check() -> None:
        validation.optimizer_params(body, str(model.optimizer_config.get("type", "adamw")))

    seq_id = decode.optional_int(body, "seq_id", low=1)
    promise = await service.submit(lane, seq_id, "optim_step", canonical(given), check=check)
    return _promise(promise, lane)


async def _start(request: Request, user: User) -> tuple[Service, dict[str, Any], Lane]:
    service = service_of(request)
    body = await read_json(request)
    return service, body, await service.lane(user, decode.text(body, "model_id"))


# ------------------------------------------------------------------------------------ models


@router.post("/create_model")
async def create_model(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    session = await service.sessions.owned(user, decode.text(body, "session_id"))
    base_model = decode.text(body, "base_model")
    service.catalog.resolve(base_model)
    model = new_model(
        user=user,
        session_id=session.session_id,
        model_seq_id=decode.integer(body, "model_seq_id", default=0, high=2**31 - 1),
        base_model=base_model,
        lora=validation.lora_spec(body, new_seed()),
        optimizer_config=validation.optimizer_config(body),
        user_metadata=decode.mapping(body, "user_metadata"),
    )
    promise = await service.create_model(model, "create_model", canonical(body))
    return answer({"request_id": promise.request_id, "model_id": model.model_id})


@router.post("/load_weights")
async def load_weights(request: Request, user: CurrentUser) -> Response:
    """Load into an existing model, or create one from a checkpoint (0.24 and later)."""
    service = service_of(request)
    body = await read_json(request)
    if body.get("model_id") is None:
        return await _create_via_load(request, service, user, body, decode.text(body, "path"))
    lane = await service.lane(user, decode.text(body, "model_id"))
    asked = {"path": body.get("path"), "optimizer": body.get("optimizer") is True}

    async def check() -> None:
        path = decode.text(body, "path")
        optimizer = decode.boolean(body, "optimizer", default=False)
        model = await service.model(user, lane.model_id)
        found = await _readable(request, user, body, path)
        _check_fit(service, found, model.base_model, optimizer)

    seq_id = decode.optional_int(body, "seq_id", low=1)
    promise = await service.submit(lane, seq_id, "load_weights", canonical(asked), check=check)
    return _promise(promise, lane)


async def _create_via_load(
    request: Request, service: Service, user: User, body: dict[str, Any], path: str
) -> Response:
    session = await service.sessions.owned(user, decode.text(body, "session_id"))
    found = await _readable(request, user, body, path)
    base_model = decode.optional_text(body, "base_model") or found.base_model
    optimizer = decode.boolean(body, "optimizer", default=False)
    _check_fit(service, found, base_model, optimizer)
    config = (
        validation.optimizer_config(body)
        if body.get("optimizer_config") is not None
        else dict(found.optimizer_config)
    )
    model = new_model(
        user=user,
        session_id=session.session_id,
        model_seq_id=decode.integer(body, "model_seq_id", default=0, high=2**31 - 1),
        base_model=base_model,
        lora=found.lora,
        optimizer_config=config,
        user_metadata=decode.mapping(body, "user_metadata"),
    )
    asked = {"path": path, "optimizer": optimizer}
    promise = await service.create_model(model, "load_weights", canonical(asked))
    return answer({"request_id": promise.request_id, "model_id": model.model_id})


async def _readable(request: Request, user: User, body: dict[str, Any], path: str) -> Checkpoint:
    service = service_of(request)
    token = decode.optional_text(body, "weights_access_token")
    try:
        token_user = await request.app.state.auth.user_of(token) if token else None
        return await service.shelf.readable(path, user, token_user=token_user)
    except ApiError as exc:
        raise InvalidInputError(str(exc), path="path") from exc


def _check_fit(service: Service, found: Checkpoint, base_model: str, optimizer: bool) -> None:
    if service.catalog.resolve(found.base_model) != service.catalog.resolve(base_model):
        raise InvalidInputError(
            f"{found.path} was trained on {found.base_model!r}, the model is {base_model!r}",
            path="path",
        )
    if found.kind == "external_weights":
        raise InvalidInputError(
            f"{found.path} is an export; load from weights/ or sampler_weights/", path="path"
        )
    if optimizer and not found.has_optimizer:
        raise InvalidInputError(
            f"{found.path} holds no optimizer state; load it without, or save with save_state.",
            path="optimizer",
        )


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


# ------------------------------------------------------------------------------------ saves


@router.post("/save_weights")
async def save_weights(request: Request, user: CurrentUser) -> Response:
    return await _save(request, user, "save_weights")


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, user: CurrentUser) -> Response:
    return await _save(request, user, "save_weights_for_sampler")


@router.post("/save_weights_external")
async def save_weights_external(request: Request, user: CurrentUser) -> Response:
    return await _save(request, user, "save_weights_external")


async def _save(request: Request, user: User, kind: str) -> Response:
    service, body, lane = await _start(request, user)
    seq_id = decode.optional_int(body, "seq_id", low=1)
    asked: dict[str, Any] = {
        "name": body.get("path"),
        "overwrite": body.get("overwrite", False),
        "ttl_seconds": body.get("ttl_seconds"),
        "user_metadata": body.get("user_metadata"),
        "age_encryption_recipients": body.get("age_encryption_recipients"),
    }
    identity = canonical(asked)
    number = body.get("sampling_session_seq_id")
    if kind == "save_weights_for_sampler" and asked["name"] is None and number is not None:
        asked["sampling_session_seq_id"] = number
        asked["sampling_session_id"] = f"{lane.session_id}:sample:{number}"
    elif asked["name"] is None:
        asked["name"] = f"{seq_id if seq_id is not None else lane.next_seq:06d}"
    if asked["name"] is not None:
        asked["path"] = f"tinker://{lane.model_id}/{SAVES[kind]}/{asked['name']}"

    async def check() -> None:
        _check_save(body, asked, kind)

    promise = await service.submit(
        lane, seq_id, kind, canonical(asked), check=check, identity=identity
    )
    return _promise(promise, lane)


def _check_save(body: dict[str, Any], asked: dict[str, Any], kind: str) -> None:
    if asked["name"] is None:
        decode.integer(body, "sampling_session_seq_id")
    elif not isinstance(asked["name"], str):
        raise InvalidInputError(f"must be a text, got {asked['name']!r}", path="path")
    else:
        check_name(asked["name"])
    decode.boolean(body, "overwrite", default=False)
    expiry_of(decode.optional_int(body, "ttl_seconds"))
    metadata = decode.mapping(body, "user_metadata") or {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise InvalidInputError(f"must be a text, got {value!r}", path=f"user_metadata.{key}")
    recipients = body.get("age_encryption_recipients")
    if recipients is not None:
        if kind != "save_weights_external":
            raise InvalidInputError(
                "only exports are encrypted; use save_weights_external",
                path="age_encryption_recipients",
            )
        if not isinstance(recipients, list) or not all(isinstance(r, str) for r in recipients):
            raise InvalidInputError("must be a list of texts", path="age_encryption_recipients")
        check_recipients(recipients)
