"""Sampling: sessions, single samples, many samples in one call, and streams of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tinkex import types
from tinkex.engine.jobs import Event, Progress, Tokens
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import open_body, open_samples
from tinkex.server.http.dependencies import service_of
from tinkex.server.http.handlers import answer, serve
from tinkex.server.jobs import encode
from tinkex.server.process.off_loop import off_loop
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.sample_queue import AcceptedSample
from tinkex.store import User
from tinkex.wire.requests import Opened

router = APIRouter(prefix="/api/v1", tags=["sampling"])
BURST = 16


@serve(router, "create_sampling_session")
async def create_sampling_session(
    service: Service, user: User, asked: types.CreateSamplingSessionRequest
) -> types.CreateSamplingSessionResponse:
    session = await service.sessions.owned(user, asked.session_id)
    service.sessions.touch(session.session_id)
    number, path = asked.sampling_session_seq_id, asked.model_path
    opened = await service.sampling_sessions.create(
        user, session.session_id, number, asked.base_model, path
    )
    return types.CreateSamplingSessionResponse(sampling_session_id=opened.sampling_session_id)


@serve(router, "join_sampling_session")
async def join_sampling_session(
    service: Service, user: User, asked: types.JoinSamplingSessionRequest
) -> types.JoinSamplingSessionResponse:
    session = await service.sampling_sessions.get(user, asked.sampling_session_id)
    number = await service.store.call(service.store.sampling.join, session.sampling_session_id)
    return types.JoinSamplingSessionResponse(client_counter=number)


@serve(router, "asample")
async def asample(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    opened = await open_body(request, "asample")
    # Judged off the loop when it is large: a long prompt is checked token by token.
    asked = await off_loop(len(opened.content), opened.read)
    return answer(_promise(await service.samples.submit(user, asked, opened.content)))


def _promise(accepted: AcceptedSample) -> dict[str, Any]:
    return {
        "request_id": accepted.promise.request_id,
        "sample_sequence_ids": list(accepted.sequence_ids),
    }


@serve(router, "asample_batch")
async def asample_batch(request: Request, user: CurrentUser) -> Response:
    """Our own SDK's form: many asample bodies in one call, one promise or refusal for each."""
    service = service_of(request)
    promises = []
    for count, opened in enumerate(await open_samples(request)):
        if count % BURST == BURST - 1:
            await asyncio.sleep(0)  # hundreds at once must not delay a heartbeat
        promises.append(await _one_of_many(service, user, opened))
    return answer({"promises": promises})


async def _one_of_many(service: Service, user: User, opened: Opened) -> dict[str, Any]:
    try:
        if not isinstance(opened.body, dict):
            raise InvalidInputError("must be an object", path="requests")
        accepted = await service.samples.submit(user, opened.read(), opened.content)
        return _promise(accepted) | {"snapshot": accepted.snapshot}
    except InvalidInputError as exc:
        return {"status": 400, "error": str(exc), "category": "user"}
    except ApiError as exc:
        refusal: dict[str, Any] = {"status": exc.status, "error": str(exc), "category": "user"}
        if exc.status == 429:
            refusal["retry_after_ms"] = int(1000 * float(exc.headers.get("Retry-After", "1")))
        return refusal


# ------------------------------------------------------------------------------------ streams


@serve(router, "sample_stream")
async def sample_stream(service: Service, user: User, asked: types.SampleRequest) -> Response:
    """Server-sent events: `tokens` while they are made, then `done` (or `error`) with the result.

    A client that goes away cancels the sample.
    """
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "routed_experts"):
        if getattr(asked, name):
            raise NotSupportedError("a stream does not carry it; use asample.", path=name)
    sessions = service.sampling_sessions
    snapshot = await sessions.origins.of(await sessions.of_request(user, asked))
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    promise, task, sequence_ids = await service.samples.stream(user, asked, events.put_nowait)
    promise.on_settle = lambda _: events.put_nowait(None)
    return StreamingResponse(
        _events(promise, task, events, sequence_ids, snapshot),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(
    promise: Promise,
    task: asyncio.Task[None],
    events: asyncio.Queue[Event | None],
    sequence_ids: tuple[str, ...],
    snapshot: dict[str, Any],
) -> AsyncIterator[bytes]:
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, Tokens):
                yield _sse("tokens", _tokens(event, sequence_ids))
            elif isinstance(event, Progress):
                yield _sse("progress", orjson.dumps({"reason": event.text}))
        assert promise.outcome is not None
        yield _last(promise.outcome, sequence_ids, snapshot)
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


def _last(outcome: Outcome, sequence_ids: tuple[str, ...], snapshot: dict[str, Any]) -> bytes:
    if outcome.ok:
        whole = encode.sample_json(outcome.payload, sequence_ids)
        return _sse("done", whole[:-1] + b',"snapshot":' + orjson.dumps(snapshot) + b"}")
    category = outcome.category if outcome.category in ("user", "server") else "user"
    return _sse("error", orjson.dumps({"error": outcome.error, "category": category}))


def _sse(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
