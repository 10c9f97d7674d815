"""Read request bodies within limits and write small answers fast.

Hot routes take the raw request: bodies are read once, decompressed with a bound and decoded off the
event loop when they are large, so that a heartbeat never waits behind a big batch.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.auth import CurrentAdmin, CurrentUser
from tinkex.server.guard.limits import BodyBudget, body_limit
from tinkex.server.process.off_loop import LARGE_BYTES, off_loop
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.store import User
from tinkex.wire import requests, results, sample_batch
from tinkex.wire.body import BodyTooLargeError, frame_size, unpack, unpacked_size
from tinkex.wire.budget import parsed_json_bytes
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.generation import JSON, names_protobuf
from tinkex.wire.requests import Opened

Handler = TypeVar("Handler", bound=Callable[..., Any])
T = TypeVar("T")
SMALL_BODY_BYTES = 16 * 1024
"""Bodies below this are not counted against the budget."""
READING_AT_ONCE = 2
"""Bodies of many parts that are parsed and checked at a time."""
RESERVE_BYTES = 1024 * 1024
"""Reserved at a time for a body that does not say its length."""
_KEPT = "tinkex.body"
_HELD = "tinkex.held"
_PARSED = "tinkex.parsed"
_HEADERS = "tinkex.headers"


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """A request's headers by their names in lower case, the first of each; made once."""
    found: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if found is None:
        found = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return found


def header(request: Request, name: bytes) -> str:
    """One header, empty when it was not sent. Starlette looks through all of them each time."""
    return headers_of(request.scope).get(name, b"").decode("latin-1")


def service_of(request: Request) -> Service:
    service: Service = request.scope["app"].state.service
    return service


async def receive_body(request: Request) -> bytes:
    """The body as it was sent, within the route's size; kept, so that it can be asked twice.

    Call it after the key was checked. Room for a large body is reserved before it is read, and
    given back by `let_go` when the request ends.

    Raises:
        ApiError: 413 for too much, 429 when the server holds too many bodies.
    """
    kept: bytes | None = request.scope.get(_KEPT)
    if kept is not None:
        return kept
    limit = limit_of(request)
    declared = headers_of(request.scope).get(b"content-length", b"")
    reserved = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    if reserved > limit:
        raise _too_large(limit)
    if reserved >= SMALL_BODY_BYTES:
        await _reserve(request, reserved)
    parts: list[bytes] = []
    size, is_more = 0, True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        part, is_more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if size > reserved:
            await _reserve(request, RESERVE_BYTES)
            reserved += RESERVE_BYTES
        parts.append(part)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    request.scope[_KEPT] = body
    return body


def limit_of(request: Request) -> int:
    """Most bytes the body of this request may have."""
    kind = header(request, b"content-type")
    return body_limit(request.scope["path"], kind, service_of(request).config.max_body_bytes)


async def _reserve(request: Request, num_bytes: int) -> None:
    if num_bytes < SMALL_BODY_BYTES:
        return
    user_id: str = request.scope["tinkex.user"]  # noted by whoever let the caller in
    budget: BodyBudget = request.app.state.bodies
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
    user_id: str = request.scope["tinkex.user"]
    budget: BodyBudget = request.app.state.parsed_bodies
    await budget.reserve(user_id, num_bytes)
    request.scope[_PARSED] = (budget, user_id, num_bytes)


def is_parsed_held(scope: Scope) -> bool:
    return _PARSED in scope


def let_go_parsed(scope: Scope) -> None:
    """The objects of a body are gone: others may use their room. At the latest with the request."""
    if (held := scope.pop(_PARSED, None)) is not None:
        budget, user_id, num_bytes = held
        budget.release(user_id, num_bytes)


def let_go(scope: Scope, budget: BodyBudget) -> None:
    """The request is answered: others may use the room of its body."""
    for user_id, num_bytes in scope.pop(_HELD, ()):
        budget.release(user_id, num_bytes)
    let_go_parsed(scope)


async def read_body(request: Request) -> bytes:
    """The body, decompressed, within the route's size.

    Raises:
        ApiError: 413 for too much, 415 for a compression we do not know.
    """
    body = await receive_body(request)
    if b"content-encoding" not in headers_of(request.scope):
        return body
    encoding = header(request, b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd.")
    limit = limit_of(request)
    try:
        return await _decompress(request, body, limit)
    except BodyTooLargeError as exc:
        raise _too_large(limit) from exc


async def _decompress(request: Request, body: bytes, limit: int) -> bytes:
    """Bounded: a small body that unpacks into gigabytes is refused while it unpacks."""
    if (declared := frame_size(body)) is not None:
        if declared > limit:
            raise _too_large(limit)
        await _reserve(request, declared)
        with suppress(BodyTooLargeError):
            work = partial(unpack, body, "zstd", max_bytes=declared)
            return await off_loop(max(declared, len(body)), work)
    # A frame that does not say its size, or several of them: unpacked once to be counted.
    size = await off_loop(limit, partial(unpacked_size, body, max_bytes=limit))
    await _reserve(request, size)
    return await off_loop(size, partial(unpack, body, "zstd", max_bytes=size))


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body exceeds the {limit} bytes that this route takes; send less per request.",
        headers={"Connection": "close"},
    )


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
    """What `work` makes of the body, off the event loop unless it is small.

    A parser of JSON holds the interpreter's lock from end to end, so large JSON waits for room for
    what it becomes, then for one of a few places, fair between users: those of `/v1`, too.
    """
    raw, kind = await read_body(request), header(request, b"content-type")
    if len(raw) < LARGE_BYTES or names_protobuf(kind):
        return await off_loop(len(raw), work, name, raw, kind)
    await reserve_parsed(request, await asyncio.to_thread(parsed_json_bytes, raw))
    gate: FairGate = request.app.state.reading
    async with gate.place(request.scope["tinkex.user"], len(raw)):
        return await asyncio.to_thread(work, name, raw, kind)


class Answer(Response):
    """Bytes of a media type, ready to be sent. What it has it has from the start, so the front
    door sends it without asking Starlette."""

    def __init__(self, content: bytes, media_type: str = JSON, status_code: int = 200) -> None:
        self.body, self.status_code, self.background = content, status_code, None
        self.raw_headers = [
            (b"content-length", b"%d" % len(content)),
            (b"content-type", media_type.encode("latin-1")),
        ]


def answer(body: BaseModel | Mapping[str, Any], status: int = 200) -> Answer:
    """A declared result, or a small object, as JSON."""
    content = results.encode(body).content if isinstance(body, BaseModel) else orjson.dumps(body)
    return Answer(content, status_code=status)


_CALLERS = {"user": CurrentUser, "admin": CurrentAdmin}
_PARTS = frozenset(
    "auth metrics names administration presence service shelf store trajectories".split()
)
"""Of `app.state`, by the names that handlers ask for them."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def serve(router: APIRouter, name: str, /, **options: Any) -> Callable[[Handler], Handler]:
    """Make a function the handler of an endpoint, at the method and path of its row.

    A function that takes the `request` answers it by itself. Any other has a parameter for what it
    needs: `asked`, the judged body; `user` or, where an admin key is needed, `admin`; parts of the
    server, such as `store`; all else is in the path and the query. It gives the row's result, a
    small object, or None, which is a 204. A key is needed whether it asks for its user or not.
    """
    endpoint = ENDPOINTS[name]
    path = endpoint.path.removeprefix(router.prefix)

    def put(handler: Handler) -> Handler:
        declared = inspect.signature(handler, eval_str=True)
        route: Callable[..., Any] = handler
        if "request" not in declared.parameters:
            route = _route(handler, name, declared)
            options["status_code"] = 204 if declared.return_annotation is None else 200
        router.add_api_route(path, route, methods=[endpoint.method], **options)
        return handler

    return put


def _route(
    handler: Callable[..., Any], name: str, declared: inspect.Signature
) -> Callable[..., Any]:
    """What FastAPI and the front door call, both with the request and its caller."""
    needs = declared.parameters
    parts = sorted(_PARTS & needs.keys())
    caller = "admin" if "admin" in needs else "user"

    async def route(request: Request, user: User, **given: Any) -> Response:
        state = request.scope["app"].state
        for part in parts:
            given[part] = getattr(state, part)
        if caller in needs:
            given[caller] = user
        if "asked" in needs:
            given["asked"] = await read(request, name)
        made = await handler(**given)
        if made is None:
            return Response(status_code=204)
        return made if isinstance(made, Response) else answer(made)

    rest = [one for n, one in needs.items() if n not in {*parts, caller, "asked"}]
    fixed = {"request": Request, "user": _CALLERS[caller]}
    shown = [inspect.Parameter(n, _BY_NAME, annotation=kind) for n, kind in fixed.items()]
    shown += [one.replace(kind=_BY_NAME) for one in rest]
    route.__name__, route.__doc__ = handler.__name__, handler.__doc__
    route.__signature__ = inspect.Signature(shown, return_annotation=Response)  # type: ignore[attr-defined]
    return route
