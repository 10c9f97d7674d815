"""Head and body of an answer leave in one write, and its connection is kept for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tinkex.server.guard.connections import HOLD_HEAD, ConnectionLimits, guarded

SIZED = [(b"content-length", b"4")]
REQUEST = b"POST /%s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


class Wire:
    """The transport of a connection, which notes what is written at a time."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.writes.append(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

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


def connected(wire: Wire) -> Any:
    config = Config(
        app=app, log_config=None, lifespan="off", proxy_headers=False, timeout_keep_alive=75
    )
    config.load()
    protocol = cast(Any, guarded(ConnectionLimits()))(
        config=config, server_state=ServerState(), app_state={}
    )
    protocol.connection_made(wire)
    return protocol


async def answered(*paths: bytes) -> list[bytes]:
    wire = Wire()
    protocol = connected(wire)
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


@pytest.mark.parametrize("body", [b"", b"late"])
async def test_a_connection_is_kept_until_it_was_idle_for_its_time(body: bytes) -> None:
    """Whether the answer came after the whole request or before the last of it."""
    wire = Wire()
    protocol = connected(wire)
    protocol.data_received((REQUEST % b"whole").replace(b"length: 0", b"length: %d" % len(body)))
    await asyncio.gather(*protocol.tasks)
    protocol.data_received(body)
    now = time.monotonic()
    protocol.end_if_silent(now + 70)
    assert not wire.is_closed
    protocol.end_if_silent(now + 76)
    assert wire.is_closed


async def test_the_first_bytes_of_the_next_request_have_the_time_of_a_head() -> None:
    wire = Wire()
    protocol = connected(wire)
    protocol.data_received(REQUEST % b"whole")
    await asyncio.gather(*protocol.tasks)
    protocol.data_received(b"POST /")
    now = time.monotonic()
    protocol.end_if_silent(now + 15)
    assert not wire.is_closed
    protocol.end_if_silent(now + 21)
    assert wire.is_closed
    assert b" 408 " in wire.writes[-1]
