"""Hand out results: one by one, by the batch, or cancelled.

A poll is held until the result is there, the hold time is over (408, with the reason in words) or
the server stops. Results travel as protobuf where the client accepts it and as JSON where it is
older; large ones announce their size first when the client asked to be told.
"""

from __future__ import annotations

import struct
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from tinkex.errors import InvalidInputError
from tinkex.server import decode, encode
from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import answer, read_json, service_of
from tinkex.server.off_loop import off_loop
from tinkex.server.problems import ApiError
from tinkex.server.service import Service
from tinkex.server.work.futures import Completion, Outcome, Promise

router = APIRouter(prefix="/api/v1", tags=["futures"])
FRAMES = "application/x-tinkex-frames"
MAX_INLINE_BYTES = 16_000_000
MAX_INLINE_ITEM_BYTES = 1_000_000
MAX_REASONS = 256
"""Samples of a poll that are told why they wait, the oldest first."""


@router.post("/retrieve_future")
async def retrieve_future(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    promise = await service.promise(user, decode.text(body, "request_id"))
    metadata_only = decode.boolean(body, "allow_metadata_only", default=False)
    outcome = await promise.wait(service.config.hold_s, service.stopping)
    if outcome is None:
        return _pending(promise)
    size = len(outcome.payload)
    if metadata_only and size > service.config.metadata_only_bytes:
        return answer({"status": "complete_metadata", "response_payload_size": size})
    response = await _result(promise, outcome, request.headers.get("accept", ""))
    service.fetched(promise)
    return response


def _pending(promise: Promise) -> Response:
    body = {"type": "try_again", "request_id": promise.request_id, **_queue_state(promise)}
    return answer(body, status=408)


def _queue_state(promise: Promise) -> dict[str, str]:
    reason = promise.reason()
    moving = reason in ("running", "sampling")
    state = "active" if moving else "paused_capacity"
    return {"queue_state": state, "queue_state_reason": reason}


async def _result(promise: Promise, outcome: Outcome, accept: str) -> Response:
    if outcome.category == "lost":
        raise ApiError(410, outcome.error)
    if not outcome.ok:
        category = outcome.category if outcome.category in ("user", "server") else "user"
        return answer({"error": outcome.error, "category": category})
    if outcome.kind == "json":
        return Response(outcome.payload, media_type=encode.JSON)
    if encode.PROTOBUF in accept:
        return Response(outcome.payload, media_type=encode.PROTOBUF)
    translate = encode.train_json if outcome.kind == "train" else encode.sample_json
    payload = await off_loop(len(outcome.payload), translate, outcome.payload)
    return Response(payload, media_type=encode.JSON)


@router.post("/cancel_future")
async def cancel_future(request: Request, user: CurrentUser) -> Response:
    """Stop a sample and free its place at once. A request that cannot be cancelled goes on."""
    service = service_of(request)
    body = await read_json(request)
    try:
        promise = await service.promise(user, decode.text(body, "request_id"))
    except ApiError as exc:
        if exc.status == 410:
            return answer({"status": "gone"})
        raise
    if promise.cancel is not None and promise.outcome is None:
        promise.cancel()
        return answer({"status": "cancelled"})
    return answer({"status": "finished" if promise.outcome is not None else "not_cancellable"})


# ------------------------------------------------------------------------------------ by the batch


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request, user: CurrentUser) -> Response:
    """Which samples of one (sampling session, clone) are ready since a cursor."""
    service = service_of(request)
    body = await read_json(request)
    target = decode.mapping(body, "target") or {}
    if target.get("type", "sampling_session") != "sampling_session":
        raise InvalidInputError(
            f"must be sampling_session, got {target.get('type')!r}", path="target.type"
        )
    session = await service.samples.session(user, decode.text(target, "sampling_session_id"))
    clone = decode.integer(target, "cloned_sampler_id", default=0)
    _acknowledge(service, user.user_id, body.get("retrieved_request_ids"))
    hold_s = service.config.hold_s
    hold_s = decode.number(body, "timeout", default=hold_s, low=0, high=1e9)
    log = service.samples.log(session.sampling_session_id, clone)
    cursor = decode.integer(body, "prev_cursor", default=0)
    found = log.after(cursor)
    if not found and not service.stopping.is_set():
        found = await log.wait_after(cursor, min(hold_s, service.config.hold_s))
    if decode.boolean(body, "inline_results", default=False):
        waiting = service.samples.waiting(session.sampling_session_id, clone, MAX_REASONS)
        return _frames(service, found, cursor, waiting)
    return answer(
        {
            "completions": [_completion(entry) for entry in found],
            "cursor": found[-1].cursor if found else cursor,
        }
    )


def _acknowledge(service: Service, user_id: str, request_ids: Any) -> None:
    """The client has these; their payloads may go."""
    if request_ids is None:
        return
    if not isinstance(request_ids, list) or not all(isinstance(item, str) for item in request_ids):
        raise InvalidInputError("must be a list of texts", path="retrieved_request_ids")
    own = [r for r in request_ids if (p := service.promises.get(r)) and p.user_id == user_id]
    service.samples.handed_out(own)
    service.promises.drop(own)


def _completion(entry: Completion) -> dict[str, Any]:
    body: dict[str, Any] = {"state": "finished", "request_id": entry.request_id}
    if entry.size_bytes:
        body["response_payload_uncompressed_size"] = entry.size_bytes
    return body


def _frames(
    service: Service, found: list[Completion], cursor: int, waiting: list[Promise]
) -> Response:
    """Our own SDK's form: the results themselves, joined behind one header.

    A poll that found nothing says why instead, for each sample that waits.
    """
    entries: list[dict[str, Any]] = []
    payloads: list[bytes] = []
    total = 0
    for entry in found:
        promise = service.promises.get(entry.request_id)
        outcome = promise.outcome if promise is not None else None
        if outcome is not None and not outcome.ok:
            category = "user" if outcome.category in ("user", "cancelled") else "server"
            entries.append(
                {
                    "state": "failed",
                    "request_id": entry.request_id,
                    "error": outcome.error,
                    "category": category,
                }
            )
        elif outcome is None or len(outcome.payload) > MAX_INLINE_ITEM_BYTES:
            entries.append({"state": "finished", "request_id": entry.request_id, "size": 0})
        else:
            if total + len(outcome.payload) > MAX_INLINE_BYTES:
                break
            total += len(outcome.payload)
            payloads.append(outcome.payload)
            size = len(outcome.payload)
            entries.append({"state": "finished", "request_id": entry.request_id, "size": size})
        cursor = entry.cursor
    about: dict[str, Any] = {"cursor": cursor, "completions": entries}
    if not found:
        about["waiting"] = [{"request_id": p.request_id, **_queue_state(p)} for p in waiting]
    header = orjson.dumps(about)
    content = b"".join([struct.pack("<I", len(header)), header, *payloads])
    return Response(content, media_type=FRAMES)
