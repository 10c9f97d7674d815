"""Hand out results: one by one, by the batch, or cancelled.

A poll is held until the result is there, the hold time is over (408, with the reason in words) or
the server stops. Results travel as protobuf where the client accepts it and as JSON where it is
older; large ones announce their size first when the client asked to be told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex import types
from tinkex.server.fairness.pauses import Pauses
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import header, read, reserve_answer
from tinkex.server.http.dependencies import service_of
from tinkex.server.http.handlers import Answer, answer, serve
from tinkex.server.jobs import encode
from tinkex.server.process.off_loop import off_loop
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.server.work.finished_logs import FinishedSample
from tinkex.server.work.futures import Outcome, Promise
from tinkex.store import User
from tinkex.types.service.extensions import CancelFutureResponse
from tinkex.wire import frames

router = APIRouter(prefix="/api/v1", tags=["futures"])
GATHER_S = 0.002
"""How long a result waits for others of its poller that are under way."""
MAX_REASONS = 256
"""Samples of a poll that are told why they wait, the oldest first."""


JSON_GROWTH = 6
"""How many times the bytes of a result in protobuf its JSON may have, with both of them held."""


@serve(router, "retrieve_future")
async def retrieve_future(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    asked: types.FutureRetrieveRequest = await read(request, "retrieve_future")
    promise = await service.promise(user, asked.request_id)
    outcome = await promise.wait(service.config.hold_s, service.stopping)
    if outcome is None:
        return _pending(promise, service.open_work.pauses)
    size = outcome.size_bytes
    if asked.allow_metadata_only and size > service.config.metadata_only_bytes:
        return answer(types.CompleteMetadataResponse(response_payload_size=size))
    accept = header(request, b"accept")
    await reserve_answer(request, size * (1 if encode.PROTOBUF in accept else JSON_GROWTH))
    response = await _result(promise, outcome, accept)
    service.fetched(promise)
    return response


def _pending(promise: Promise, pauses: Pauses) -> Response:
    body = {"type": "try_again", "request_id": promise.request_id, **_queue_state(promise)}
    response = answer(body, status=408)
    if body["queue_state"] != "active":
        response.headers.update(pauses.retry_after(promise.user_id))
    return response


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
    content = await _content(outcome)
    if outcome.kind == "json":
        return Answer(content, encode.JSON)
    if encode.PROTOBUF in accept:
        return Answer(content, encode.PROTOBUF)
    translate = encode.train_json if outcome.kind == "train" else encode.sample_json
    payload = await off_loop(len(content), translate, content)
    return Answer(payload, encode.JSON)


async def _content(outcome: Outcome) -> bytes:
    return outcome.payload if outcome.load is None else await asyncio.to_thread(outcome.content)


@serve(router, "cancel_future")
async def cancel_future(
    service: Service, user: User, asked: types.CancelFutureRequest
) -> CancelFutureResponse:
    """Stop a sample and free its place at once. A request that cannot be cancelled goes on."""
    try:
        promise = await service.promise(user, asked.request_id)
    except ApiError as exc:
        if exc.status == 410:
            return CancelFutureResponse(status="gone")
        raise
    if promise.outcome is not None:
        return CancelFutureResponse(status="finished")
    if promise.cancel is None:
        return CancelFutureResponse(status="not_cancellable")
    promise.cancel()
    return CancelFutureResponse(status="cancelled")


# ------------------------------------------------------------------------------------ by the batch


@serve(router, "retrieve_futures")
async def retrieve_futures(request: Request, user: CurrentUser) -> Response:
    """Which samples of one (sampling session, clone) are ready since a cursor."""
    service = service_of(request)
    asked: types.FuturesRetrieveRequest = await read(request, "retrieve_futures")
    target, cursor = asked.target, asked.prev_cursor
    session = await service.sampling_sessions.get(user, target.sampling_session_id)
    _acknowledge(service, user.user_id, asked.retrieved_request_ids)
    hold_s = service.config.hold_s if asked.timeout is None else asked.timeout
    poller = session.sampling_session_id, target.cloned_sampler_id
    log = service.finished_logs.log(*poller)
    finished = log.after(cursor)
    if not finished and not service.stopping.is_set():
        finished = await log.wait_after(cursor, min(hold_s, service.config.hold_s))
        if finished and log.unfinished(1):
            await asyncio.sleep(GATHER_S)  # samples of a batch end together: one answer for many
            finished = log.after(cursor)
    service.finished_logs.leave(*poller)
    if asked.inline_results:
        sizes = (entry.size_bytes for entry in finished)
        inline_bytes = sum(size for size in sizes if size <= frames.MAX_ITEM_BYTES)
        await reserve_answer(request, min(inline_bytes, frames.MAX_BYTES))
        return await _frames(service, finished, cursor, log.unfinished(MAX_REASONS))
    return answer(
        {
            "completions": [_completion(entry) for entry in finished],
            "cursor": finished[-1].cursor if finished else cursor,
        }
    )


def _acknowledge(service: Service, user_id: str, request_ids: Sequence[str]) -> None:
    """The client has these; their payloads may go."""
    own = [r for r in request_ids if (p := service.promises.get(r)) and p.user_id == user_id]
    service.finished_logs.handed_out(own)
    service.promises.drop(own)


def _completion(entry: FinishedSample) -> dict[str, Any]:
    body: dict[str, Any] = {"state": "finished", "request_id": entry.request_id}
    if entry.size_bytes:
        body["response_payload_uncompressed_size"] = entry.size_bytes
    return body


async def _frames(
    service: Service, finished: list[FinishedSample], cursor: int, unfinished: list[Promise]
) -> Response:
    """Our own SDK's form: the results themselves, joined behind one header.

    A poll that found nothing says why instead, for each sample that waits.
    """
    writer = frames.Writer()
    for entry in finished:
        promise = service.promises.get(entry.request_id)
        outcome = promise.outcome if promise is not None else None
        if outcome is not None and not outcome.ok:
            category = "user" if outcome.category in ("user", "cancelled") else "server"
            writer.add_failure(entry.request_id, outcome.error, category)
        elif not writer.add(entry.request_id, await _content(outcome) if outcome else b""):
            break
        cursor = entry.cursor
    reasons = (
        [] if finished else [{"request_id": p.request_id, **_queue_state(p)} for p in unfinished]
    )
    return Answer(writer.content(cursor, reasons), frames.FRAMES)
