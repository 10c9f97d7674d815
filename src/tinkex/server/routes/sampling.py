"""Sampling: sessions, single samples, many samples in one call, and streams of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tinkex.engine.jobs import Event, Tokens
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server import decode, encode
from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import answer, read_json, service_of
from tinkex.server.problems import ApiError
from tinkex.server.service import Service
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.samples import Accepted
from tinkex.store import User

router = APIRouter(prefix="/api/v1", tags=["sampling"])
MAX_BATCH = 1024
BURST = 16


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    session = await service.sessions.owned(user, decode.text(body, "session_id"))
    service.sessions.touch(session.session_id)
    made = await service.samples.create_session(
        user,
        session.session_id,
        decode.integer(body, "sampling_session_seq_id", default=0),
        decode.optional_text(body, "base_model"),
        decode.optional_text(body, "model_path"),
    )
    return answer(
        {"sampling_session_id": made.sampling_session_id, "type": "create_sampling_session"}
    )


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    session = await service.samples.session(user, decode.text(body, "sampling_session_id"))
    number = await service.store.call(service.store.sampling.join, session.sampling_session_id)
    return answer({"client_counter": number, "type": "join_sampling_session"})


@router.post("/asample")
async def asample(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    body = await read_json(request)
    return answer(_promise(await service.samples.submit(user, body)))


def _promise(accepted: Accepted) -> dict[str, Any]:
    return {
        "request_id": accepted.promise.request_id,
        "sample_sequence_ids": list(accepted.sequence_ids),
    }


@router.post("/asample_batch")
async def asample_batch(request: Request, user: CurrentUser) -> Response:
    """Our own SDK's form: many asample bodies in one call, one promise or refusal for each."""
    service = service_of(request)
    body = await read_json(request)
    requests = body.get("requests")
    if not isinstance(requests, list) or len(requests) > MAX_BATCH:
        raise InvalidInputError(f"must be a list of at most {MAX_BATCH}", path="requests")
    promises = []
    for count, item in enumerate(requests):
        if count % BURST == BURST - 1:
            await asyncio.sleep(0)  # hundreds at once must not delay a heartbeat
        promises.append(await _one_of_many(service, user, item))
    return answer({"promises": promises})


async def _one_of_many(service: Service, user: User, item: Any) -> dict[str, Any]:
    try:
        if not isinstance(item, dict):
            raise InvalidInputError("must be an object", path="requests")
        return _promise(await service.samples.submit(user, item))
    except InvalidInputError as exc:
        return {"status": 400, "error": str(exc), "category": "user"}
    except ApiError as exc:
        refusal: dict[str, Any] = {"status": exc.status, "error": str(exc), "category": "user"}
        if exc.status == 429:
            refusal["retry_after_ms"] = int(1000 * float(exc.headers.get("Retry-After", "1")))
        return refusal


# ------------------------------------------------------------------------------------ streams


@router.post("/sample_stream")
async def sample_stream(request: Request, user: CurrentUser) -> Response:
    """Server-sent events: `tokens` while they are made, then `done` (or `error`) with the result.

    A client that goes away cancels the sample.
    """
    service = service_of(request)
    body = await read_json(request)
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if body.get(name):
            raise NotSupportedError("a stream does not carry it; use asample.", path=name)
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    promise, task, sequence_ids = await service.samples.stream(user, body, events.put_nowait)
    promise.on_settle = lambda _: events.put_nowait(None)
    return StreamingResponse(
        _events(promise, task, events, sequence_ids),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(
    promise: Promise,
    task: asyncio.Task[None],
    events: asyncio.Queue[Event | None],
    sequence_ids: tuple[str, ...],
) -> AsyncIterator[bytes]:
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, Tokens):
                yield _sse("tokens", _tokens(event, sequence_ids))
        assert promise.outcome is not None
        yield _last(promise.outcome, sequence_ids)
    finally:
        task.cancel()


def _tokens(event: Tokens, sequence_ids: tuple[str, ...]) -> bytes:
    return orjson.dumps(
        {
            "sample_index": event.sample_index,
            "sequence_id": sequence_ids[event.sample_index],
            "tokens": event.tokens.tolist(),
            "logprobs": event.logprobs.tolist(),
        }
    )


def _last(outcome: Outcome, sequence_ids: tuple[str, ...]) -> bytes:
    if outcome.ok:
        return _sse("done", encode.sample_json(outcome.payload, sequence_ids))
    category = outcome.category if outcome.category in ("user", "server") else "user"
    return _sse("error", orjson.dumps({"error": outcome.error, "category": category}))


def _sse(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
