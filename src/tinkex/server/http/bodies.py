"""Bytes that requests hold, within limits: of one route, of one user, of the whole server.

A body is read once, decompressed with a bound and decoded off the event loop when it is large, so
that a heartbeat never waits behind a big batch. The door has asked before who sends it. An answer
is counted in the same budget until whoever asked has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from tinkex.server.guard.auth import USER_ID
from tinkex.server.guard.limits import BodyBudget, body_limit, too_large
from tinkex.server.http.dependencies import dependencies_of
from tinkex.server.process.off_loop import LARGE_BYTES, off_loop
from tinkex.server.process.problems import ApiError
from tinkex.wire import requests, sample_batch
from tinkex.wire.body import BodyTooLargeError, frame_size, unpack, unpacked_size
from tinkex.wire.budget import check_json, parsed_json_bytes, quick_json_cost
from tinkex.wire.generation import names_protobuf
from tinkex.wire.requests import Opened

T = TypeVar("T")
SMALL_BODY_BYTES = 16 * 1024
"""Bodies below this are not counted against the budget."""
RESERVE_BYTES = 1024 * 1024
"""Reserved at a time for a body that does not say its length."""
PAGE_BYTES = 8 * 1024 * 1024
"""Reserved for an answer of FastAPI's routes before it is made: one page of a listing."""
_KEPT = "tinkex.body"
_SIZE = "tinkex.size"
_HELD = "tinkex.held"
_EXCESS = "tinkex.excess"
_PARSED = "tinkex.parsed"
_HEADERS = "tinkex.headers"


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by their names in lower case, the first of each; made once."""
    headers: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return headers


def header(request: Request, name: bytes) -> str:
    """A header, empty when it was not sent. Starlette looks through all of them each time."""
    return headers_of(request.scope).get(name, b"").decode("latin-1")


def limited(scope: Scope, receive: Receive, max_body_bytes: int, max_upload_bytes: int) -> Receive:
    """`receive` that refuses a body beyond the limit of its route, before or while it is read.

    Raises:
        HTTPException: 413, the declared length is beyond it already, or is no length.
    """
    headers = headers_of(scope)
    kind = headers.get(b"content-type", b"").decode("latin-1")
    limit = body_limit(scope["path"], kind, max_body_bytes, max_upload_bytes)
    declared = headers.get(b"content-length", b"0")
    # No length has more than 19 digits, and int() raises a ValueError for more than 4300.
    if not declared.isdigit() or len(declared) > 19 or int(declared) > limit:
        raise too_large(limit)
    scope[_SIZE] = (int(declared), limit)
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    return bounded


def declared_bytes(request: Request) -> int:
    """How long the body says it is; 0 for one that does not say."""
    size: int = request.scope[_SIZE][0]
    return size


async def body_pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes, for a route that does not keep it in memory."""
    is_more = True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        yield message.get("body", b"")
        is_more = message.get("more_body", False)


async def receive_body(request: Request) -> bytes:
    """The body as it was sent, within the route's size; kept, so that it can be asked twice.

    Call it after the key was checked. Room for a large body is reserved before it is read, and
    given back by `let_go` when the request ends.

    Raises:
        HTTPException: 413 for too much.
        ApiError: 429, when the server holds too many bodies.
    """
    kept: bytes | None = request.scope.get(_KEPT)
    if kept is not None:
        return kept
    reserved, _ = request.scope[_SIZE]  # the declared length; 0 for a body that declares none
    if reserved >= SMALL_BODY_BYTES:
        await _reserve(request, reserved)
    parts: list[bytes] = []
    size = 0
    async for part in body_pieces(request):
        size += len(part)
        if size > reserved:
            await _reserve(request, RESERVE_BYTES)
            reserved += RESERVE_BYTES
        parts.append(part)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    request.scope[_KEPT] = body
    return body


async def _reserve(request: Request, num_bytes: int) -> None:
    if num_bytes < SMALL_BODY_BYTES:
        return
    user_id: str = request.scope[USER_ID]  # noted by whoever let the caller in
    budget = dependencies_of(request).bodies
    held: list[tuple[str, int]] = request.scope.setdefault(_HELD, [])
    await budget.reserve(user_id, num_bytes, own_bytes=sum(size for _, size in held))
    held.append((user_id, num_bytes))


async def reserve_parsed(request: Request, num_bytes: int) -> None:
    """Wait for room for the objects that a body becomes; once a request, before it is parsed.

    They have a budget of their own: whoever has read a body and waits for this one does not stand
    in the way of those who have it, so nobody waits for ever.
    """
    if num_bytes < SMALL_BODY_BYTES:
        return
    user_id: str = request.scope[USER_ID]
    budget = dependencies_of(request).parsed_bodies
    await budget.reserve(user_id, num_bytes)
    request.scope[_PARSED] = (budget, user_id, num_bytes)


async def reserve_answer(request: Request, num_bytes: int) -> None:
    """Wait for room for an answer of at most so many bytes, before it is made.

    The body of the request goes first, so nobody waits for an answer's room who holds a body's.
    More than a user's share is counted when it is there: it would wait for an idle server.
    """
    budget = dependencies_of(request).bodies
    let_go(request.scope, budget)
    await _reserve(request, min(num_bytes, budget.per_user_bytes))


def count_answer(scope: Scope, budget: BodyBudget, num_bytes: int) -> None:
    """Count by how much an answer is larger than what was reserved for it; it is there already."""
    more = num_bytes - sum(size for _, size in scope.get(_HELD, ()))
    if more > 0 and _EXCESS not in scope:
        scope[_EXCESS] = (scope.get(USER_ID, ""), more)
        budget.exceed(*scope[_EXCESS])


def is_parsed_held(scope: Scope) -> bool:
    return _PARSED in scope


def let_go_parsed(scope: Scope) -> None:
    """The objects of a body are gone: others may use their room. At the latest with the request."""
    if (held := scope.pop(_PARSED, None)) is not None:
        budget, user_id, num_bytes = held
        budget.release(user_id, num_bytes)


def let_go(scope: Scope, budget: BodyBudget) -> None:
    """The request is answered: its body goes, and others may use the room of it.

    The scope of a request lives on as long as its connection, which may stay open for minutes.
    """
    scope.pop(_KEPT, None)
    if (excess := scope.pop(_EXCESS, None)) is not None:
        budget.return_excess(*excess)
    for user_id, num_bytes in scope.pop(_HELD, ()):
        budget.release(user_id, num_bytes)
    let_go_parsed(scope)


async def read_body(request: Request) -> bytes:
    """The body, decompressed, within the route's size.

    Raises:
        HTTPException: 413 for too much.
        ApiError: 415 for a compression we do not know.
    """
    body = await receive_body(request)
    if b"content-encoding" not in headers_of(request.scope):
        return body
    encoding = header(request, b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd.")
    _, limit = request.scope[_SIZE]
    try:
        return await _decompress(request, body, limit)
    except BodyTooLargeError as exc:
        raise too_large(limit) from exc


async def _decompress(request: Request, body: bytes, limit: int) -> bytes:
    """Bounded: a small body that unpacks into gigabytes is refused while it unpacks."""
    if (declared := frame_size(body)) is not None:
        if declared > limit:
            raise too_large(limit)
        await _reserve(request, declared)
        with suppress(BodyTooLargeError):
            # The size in the frame is the sender's word, so it bounds the unpacking too.
            work = partial(unpack, body, "zstd", max_bytes=declared)
            return await off_loop(max(declared, len(body)), work)
    # A frame that does not say its size, or several of them: unpacked once to be counted.
    size = await off_loop(limit, partial(unpacked_size, body, max_bytes=limit))
    await _reserve(request, size)
    return await off_loop(size, partial(unpack, body, "zstd", max_bytes=size))


async def read(request: Request, name: str) -> Any:
    """The request in the body, judged by the declaration of its endpoint."""
    return await _in_turn(request, name, _judged)


def _judged(name: str, raw: bytes, content_type: str) -> Any:
    return requests.open_body(name, raw, content_type).read()


async def open_body(request: Request, name: str) -> Opened:
    """The body, parsed and not judged yet."""
    return await _in_turn(request, name, requests.open_body)


async def open_samples(request: Request) -> list[Opened]:
    """The samples of a batch, parsed and not judged yet."""
    return await _in_turn(request, "asample_batch", sample_batch.open_samples)


async def _in_turn(request: Request, name: str, work: Callable[[str, bytes, str], T]) -> T:
    """Run `work` on the body, off the event loop unless it is small.

    A parser of JSON holds the interpreter's lock from end to end, so large JSON waits for room for
    what it becomes, then for one of a few turns, fair between users: that of `/v1`, too.
    """
    raw, kind = await read_body(request), header(request, b"content-type")
    if len(raw) < LARGE_BYTES or names_protobuf(kind):
        return await off_loop(len(raw), work, name, raw, kind)
    await reserve_parsed(request, await asyncio.to_thread(_room_for, raw))
    return await parse_in_turn(request, len(raw), work, name, raw, kind)


def _room_for(raw: bytes) -> int:
    """Bytes that a body of JSON becomes; refuses one that is too much."""
    check_json(raw)
    return parsed_json_bytes(raw, quick_json_cost(raw))


async def parse_in_turn(request: Request, cost: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work` on a thread, in one of a few turns that are fair between users."""
    async with dependencies_of(request).reading.slot(request.scope[USER_ID], cost):
        return await asyncio.to_thread(work, *args)
