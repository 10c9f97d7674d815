"""Read request bodies within limits and write small answers fast.

Hot routes take the raw request: bodies are read once, decompressed with a bound and decoded off the
event loop when they are large, so that a heartbeat never waits behind a big batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
import zstandard
from fastapi import Request, Response

from tinkex.server import decode
from tinkex.server.problems import ApiError
from tinkex.server.service import Service
from tinkex.wire.body import BodyTooLargeError, unpack

T = TypeVar("T")
LARGE_BYTES = 64 * 1024
_KEPT = "tinkex.body"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def receive_body(request: Request) -> bytes:
    """The body as it was sent, within the configured size; kept, so that it can be asked twice.

    Raises:
        ApiError: 413 for too much.
    """
    kept: bytes | None = request.scope.get(_KEPT)
    if kept is not None:
        return kept
    limit = service_of(request).config.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    request.scope[_KEPT] = body
    return body


async def read_body(request: Request) -> bytes:
    """The body, decompressed, within the configured size.

    Raises:
        ApiError: 413 for too much, 415 for a compression we do not know.
    """
    body = await receive_body(request)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return body
    if encoding != "zstd":
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported; use zstd.")
    limit = service_of(request).config.max_body_bytes
    return await off_loop(_size_unpacked(body), _decompress, body, limit)


def _size_unpacked(body: bytes) -> int:
    """As its header says; a frame that does not say may be of any size."""
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return len(body)
    return max(size, len(body)) if size >= 0 else LARGE_BYTES


def _decompress(body: bytes, limit: int) -> bytes:
    """Bounded: a small body that unpacks into gigabytes is refused while it unpacks."""
    try:
        return unpack(body, "zstd", max_bytes=limit)
    except BodyTooLargeError as exc:
        raise _too_large(limit) from exc


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body exceeds {limit} bytes; send fewer datums per request.")


async def read_json(request: Request) -> dict[str, Any]:
    body = await read_body(request)
    return await off_loop(len(body), decode.load_json, body)


async def off_loop(size_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work` here when it is small, on a thread when it would hold up others."""
    if size_bytes < LARGE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def answer(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
