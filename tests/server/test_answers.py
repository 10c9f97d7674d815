"""Head and body of an answer leave in one write; what streams leaves as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from uvicorn import Config
from uvicorn.server import ServerState

from tinkex.server.guard.connections import HOLD_HEAD, ConnectionLimits, guarded

SIZED = [(b"content-length", b"4")]
REQUEST = b"POST /%s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


class Wire:
    """The transport of a connection, which notes what is written at a time."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.writes.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/whole":
        scope[HOLD_HEAD]()
        await send({"type": "http.response.start", "status": 200, "headers": SIZED})
        await send({"type": "http.response.body", "body": b"body"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for more in (True, False):
        await send({"type": "http.response.body", "body": b"piece", "more_body": more})


async def answered(*paths: bytes) -> list[bytes]:
    config = Config(app=app, log_config=None, lifespan="off", proxy_headers=False)
    config.load()
    protocol = cast(Any, guarded(ConnectionLimits()))(
        config=config, server_state=ServerState(), app_state={}
    )
    wire = Wire()
    protocol.connection_made(wire)
    for path in paths:
        protocol.data_received(REQUEST % path)
        await asyncio.gather(*protocol.tasks)
    protocol.connection_lost(None)
    return wire.writes


async def test_an_answer_that_is_there_is_one_write() -> None:
    writes = await answered(b"whole", b"whole")
    assert [(w[:12], w[-8:]) for w in writes] == [(b"HTTP/1.1 200", b"\r\n\r\nbody")] * 2


async def test_a_stream_keeps_no_head_back() -> None:
    head, *pieces = await answered(b"stream")
    assert head.startswith(b"HTTP/1.1 200")
    assert head.endswith(b"\r\n\r\n")
    assert [b"piece" in piece for piece in pieces] == [True, True]
