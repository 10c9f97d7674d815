"""Our own HTTP/1.1 against real sockets that behave badly."""

from __future__ import annotations

import asyncio
import errno
import gzip
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zstandard

from tinkex.client.http.http1 import Http1Pool, ProtocolError, Reply

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(talk: Talk, **options: Any) -> Any:
    """A pool connected to a server whose every connection runs `talk`."""
    tasks = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Http1Pool(f"http://127.0.0.1:{port}", **options)
    try:
        yield pool
    finally:
        await pool.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        (
            int(x.split(":")[1])
            for x in head.split("\r\n")
            if x.lower().startswith("content-length")
        ),
        0,
    )
    return head, await reader.readexactly(length)


def answering(*chunks: bytes, pause_s: float = 0.0) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(pause_s)

    return talk


async def ask(pool: Http1Pool, body: bytes | None = b"x", timeout_s: float = 60.0) -> Reply:
    return await pool.send("POST", f"{pool._origin}/p?q=1", {"A": "b"}, body, timeout_s)


async def test_the_request_is_well_formed_and_the_connection_is_kept() -> None:
    seen: list[str] = []
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            head, body = await read_request(reader)
            seen.append(head)
            writer.write(b"HTTP/1.1 200 OK\r\nX-One: 1\r\nContent-Length: 2\r\n\r\n" + body)

    async with serving(talk) as pool:
        for _ in range(3):
            assert await ask(pool, b"hi") == Reply(
                200, {"x-one": "1", "content-length": "2"}, b"hi"
            )
    assert connections == 1
    assert seen[0].startswith("POST /p?q=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nA: b\r\nContent-Length: 2\r\n\r\n" in seen[0]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_chunked_answers_arrive_whole_however_they_are_cut(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = head + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n"
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    async with serving(answering(*pieces)) as pool:
        for _ in range(2):
            assert (await ask(pool)).content == b"hello world"


async def test_chunked_trailers_are_skipped() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-T: 1\r\n\r\n"
    async with serving(answering(raw)) as pool:
        assert (await ask(pool)).content == b"ok"
        assert (await ask(pool)).content == b"ok"


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("zstd", lambda b: zstandard.ZstdCompressor().compress(b))],
)
async def test_compressed_answers_are_unpacked(encoding: str, pack: Any) -> None:
    body = pack(b"payload" * 100)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(answering(head.encode() + body)) as pool:
        assert (await ask(pool)).content == b"payload" * 100


async def test_an_answer_may_end_with_the_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        await writer.drain()

    async with serving(talk) as pool:
        assert (await ask(pool)).content == b"until the end"
        assert (await ask(pool)).content == b"until the end"


async def test_an_interim_answer_is_skipped_and_204_has_no_body() -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"
    async with serving(answering(raw)) as pool:
        assert (await ask(pool)).status == 204
        assert (await ask(pool)).status == 204


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf a bo",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhalf",
    ],
)
async def test_a_half_answer_is_an_error_never_a_short_result(raw: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw)
        await writer.drain()

    async with serving(talk) as pool:
        with pytest.raises(ProtocolError, match="closed the connection"):
            await ask(pool)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nmore than one",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\nabc",
        b"X: " + b"y" * 70_000,
    ],
)
async def test_bytes_that_are_not_http_are_an_error(raw: bytes) -> None:
    async with serving(answering(raw)) as pool:
        with pytest.raises(ProtocolError, match="not valid HTTP"):
            await ask(pool)


async def test_a_stalled_answer_times_out_and_its_connection_is_not_used_again() -> None:
    slow = [True]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            if slow.pop() if slow else False:
                await asyncio.sleep(600)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(talk) as pool:
        with pytest.raises(TimeoutError):
            await ask(pool, timeout_s=0.1)
        slow.clear()  # it may not have got as far
        assert (await ask(pool)).content == b"ok"


async def test_a_kept_connection_that_the_server_closed_is_replaced_silently() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await read_request(reader)  # the second request is read and never answered

    async with serving(talk) as pool:
        for _ in range(4):
            assert (await ask(pool)).content == b"ok"


async def test_no_more_connections_than_allowed_and_nobody_starves() -> None:
    running = most = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        while True:
            await read_request(reader)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with serving(talk, max_connections=3) as pool:
        answers = await asyncio.gather(*(ask(pool) for _ in range(30)))
        assert {answer.content for answer in answers} == {b"ok"}
    assert most == 3


async def test_a_cancelled_request_frees_its_place() -> None:
    is_asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        if body == b"slow":
            is_asked.set()
            await asyncio.sleep(600)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    async with serving(talk, max_connections=1) as pool:
        lost = asyncio.ensure_future(ask(pool, b"slow"))
        await asyncio.wait_for(is_asked.wait(), 60)
        lost.cancel()
        assert (await asyncio.wait_for(ask(pool), 60)).content == b"ok"


async def test_a_refused_connection_is_an_os_error() -> None:
    pool = Http1Pool("http://127.0.0.1:1")
    with pytest.raises(OSError, match="refused|Connect"):
        await ask(pool)


async def test_closing_the_pool_ends_waiting_requests() -> None:
    is_asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        is_asked.set()
        await asyncio.sleep(600)

    async with serving(talk) as pool:
        waiting = asyncio.ensure_future(ask(pool))
        await asyncio.wait_for(is_asked.wait(), 60)
        await pool.close()
        with pytest.raises(OSError, match="closed"):
            await waiting
        with pytest.raises(ProtocolError, match="the pool is closed"):
            await ask(pool)


@pytest.mark.parametrize("name", ["A\r\nX", "A\nX", "A\rX"])
async def test_a_header_cannot_smuggle_another_line(name: str) -> None:
    pool = Http1Pool("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="line break"):
        await pool.send("GET", "/", {"H": name}, None, 1.0)


async def test_when_no_more_files_may_be_opened_the_present_connections_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    loop = asyncio.get_running_loop()
    connect, opened = loop.create_connection, 0

    async def limited(*args: Any, **options: Any) -> Any:
        nonlocal opened
        if opened == 4:
            raise OSError(errno.EMFILE, "too many open files")
        opened += 1
        return await connect(*args, **options)

    async with serving(answering(raw, pause_s=0.01)) as pool:
        monkeypatch.setattr(loop, "create_connection", limited)
        answers = await asyncio.gather(*(ask(pool) for _ in range(40)))
        assert {answer.content for answer in answers} == {b"ok"}
