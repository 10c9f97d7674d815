"""How answers of foreign APIs travel: whole, or as a stream of server-sent events.

The headers of either name the fields that did nothing (`fields.header_of`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse

from tinkex.server.compat import refusals
from tinkex.server.http.handlers import Answer
from tinkex.server.process import problems

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def whole(content: bytes | Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    response = Answer(content if isinstance(content, bytes) else orjson.dumps(content))
    response.headers.update(headers)
    return response


def event(body: Mapping[str, Any], kind: str = "") -> bytes:
    """A server-sent event; chats and completions give theirs no kind."""
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"


async def begun(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, of which the first is there: what is refused is refused here."""
    first = await anext(items)

    async def everything() -> AsyncIterator[T]:
        yield first
        async for one in items:
            yield one

    return everything()


async def streamed(
    lines: AsyncIterator[bytes],
    headers: Mapping[str, str],
    failed: Callable[[Response], dict[str, Any]] = refusals.openai_error,
) -> Response:
    """A stream that has begun; what is refused before is an answer of its own."""
    rest = await begun(lines)

    async def told() -> AsyncIterator[bytes]:
        try:
            async for one in rest:
                yield one
        except Exception as exc:  # the status is long out: the stream itself says what happened
            said = failed(problems.response_for(exc))
            yield event(said, said.get("type", ""))  # Anthropic's have a type, and are named by it

    return StreamingResponse(
        told(),
        media_type="text/event-stream",
        # Without the second, nginx in front of us collects events before it passes them on.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers},
    )
