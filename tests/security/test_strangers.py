"""What somebody without a key can cost the server: bytes, seconds, connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import zstandard
from patience import soon, until
from server_process import ServerProcess

from tinkex.server.guard import connections
from tinkex.server.guard.connections import ConnectionLimits, guarded
from tinkex.server.guard.limits import BodyBudget, body_limit
from tinkex.server.process.problems import ApiError

KEY = {"x-api-key": "tml-ann"}
SETTINGS = """
head_timeout_s = 3.0
body_pause_s = 1.0
max_connections_per_address = 20
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("strangers")
    file = folder / "settings.toml"
    file.write_text(SETTINGS)
    flags = ("--engine", "toy", "--api-key", "tml-ann=ann", "--config", str(file))
    with ServerProcess(folder, *flags) as started:
        yield started


def _open(server: ServerProcess, text: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.sendall(text.encode())
    return sock


def _head(path: str, *lines: str) -> str:
    return "\r\n".join([f"POST /api/v1/{path} HTTP/1.1", "host: localhost", *lines, "", ""])


def _status(sock: socket.socket) -> int:
    """The status of the answer; 0 when the connection ends without one."""
    with sock:
        try:
            data = sock.recv(200)
        except ConnectionResetError:
            return 0
    return int(data.split()[1]) if data else 0


@pytest.mark.parametrize("path", ["sessions/search", "checkpoints/import", "forward_backward"])
def test_the_key_is_checked_before_a_byte_of_the_body_is_read(
    server: ServerProcess, path: str
) -> None:
    head = _head(path, "content-type: text/plain", "content-length: 100000000")
    assert _status(_open(server, head)) == 401


def test_a_key_of_any_length_is_refused_not_kept(server: ServerProcess) -> None:
    answer = httpx.post(
        f"{server.base_url}/api/v1/create_session", headers={"x-api-key": "tml-" + "x" * 50_000}
    )
    assert answer.status_code == 401


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/octet-stream"])
def test_a_small_route_takes_a_small_body_whatever_its_type(
    server: ServerProcess, kind: str
) -> None:
    body = b"[" + b"[]," * 700_000 + b"[]]"
    for send in (body, iter([body])):  # with a length, and in chunks
        answer = httpx.post(
            f"{server.base_url}/api/v1/sessions/search",
            content=send,
            headers=KEY | {"content-type": kind},
        )
        assert answer.status_code == 413, answer.text
        assert "1048576" in answer.json()["detail"]


def test_a_body_is_measured_after_it_is_unpacked_too(server: ServerProcess) -> None:
    body = zstandard.compress(json.dumps({"events": [{}] * 700_000}).encode())
    assert len(body) < 10_000
    headers = KEY | {"content-encoding": "zstd", "content-type": "application/json"}
    answer = httpx.post(f"{server.base_url}/api/v1/telemetry", content=body, headers=headers)
    assert answer.status_code == 413


def test_json_is_allowed_less_than_protobuf() -> None:
    limit = 256 * 1024 * 1024
    assert body_limit("/api/v1/forward_backward", "application/x-protobuf", limit) == limit
    assert body_limit("/api/v1/forward_backward", "application/json", limit) == limit // 4
    assert body_limit("/api/v1/session_heartbeat", "application/x-protobuf", limit) == 1024 * 1024


def test_a_head_has_an_end(server: ServerProcess) -> None:
    many = [f"x-{n}: y" for n in range(300)]
    for lines in (many, ["x: " + "y" * 200_000]):
        assert _status(_open(server, _head("healthz", *lines))) == 431
    assert _status(_open(server, "GET /" + "a" * 200_000)) in (431, 400)


@pytest.mark.parametrize("text", ["", "GET /healthz HTTP/1.1\r\nhost: "])
def test_a_connection_that_does_not_say_what_it_wants_is_closed(
    server: ServerProcess, text: str
) -> None:
    started = time.monotonic()
    assert _status(_open(server, text)) in (0, 408)
    assert time.monotonic() - started < 15


def test_a_body_that_does_not_come_ends_the_connection(server: ServerProcess) -> None:
    head = _head("session_heartbeat", "x-api-key: tml-ann", "content-length: 100")
    started = time.monotonic()
    assert _status(_open(server, head + "{")) == 0
    assert time.monotonic() - started < 15


def test_one_address_has_so_many_connections_and_the_next_are_closed() -> None:
    limits = ConnectionLimits(max_per_address=20)
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with _listening(limits, size_bytes=1) as (port, _):
        socks = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(40)]
        for sock in socks:
            with suppress(OSError):  # closed already
                sock.sendall(head)
        answers = [_status_kept(sock) for sock in socks]
        for sock in socks:
            sock.close()
        assert (answers.count(200), answers.count(0)) == (20, 20)
        until(lambda: limits.num_open == 0)
        assert httpx.get(f"http://127.0.0.1:{port}").status_code == 200


def test_the_number_of_connections_is_a_setting(server: ServerProcess) -> None:
    """They end by themselves here after three seconds, so they are opened until one is refused."""
    head, socks = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", []
    while len(socks) < 1000:
        socks.append(_open(server, head))
        if (answer := _status_kept(socks[-1])) == 0:
            break
    for sock in socks:
        sock.close()
    assert (answer, len(socks) > 20) == (0, True)


def _status_kept(sock: socket.socket) -> int:
    try:
        data = sock.recv(200)
    except (ConnectionResetError, BrokenPipeError):
        return 0
    return int(data.split()[1]) if data else 0


def test_the_server_raises_its_file_limit(server: ServerProcess) -> None:
    lines = Path(f"/proc/{server.pid}/limits").read_text().splitlines()
    soft, hard = next(line for line in lines if line.startswith("Max open files")).split()[3:5]
    assert int(soft) == min(int(hard), max(65_536, int(soft)))


async def test_bodies_in_memory_are_bounded_and_shared() -> None:
    budget = BodyBudget(100)
    await budget.reserve("ann", 50)
    late = asyncio.create_task(budget.reserve("ann", 10))  # beyond her half
    await budget.reserve("bob", 50)
    await asyncio.sleep(0)
    assert not late.done()
    budget.release("ann", 50)
    await asyncio.wait_for(late, 60)
    assert budget.held_bytes == 60


async def test_a_body_that_finds_no_room_is_asked_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tinkex.server.guard.limits.WAIT_S", 0.05)
    budget = BodyBudget(100)
    await budget.reserve("ann", 500)  # one alone always fits
    with pytest.raises(ApiError) as refused:
        await budget.reserve("bob", 1)
    assert refused.value.status == 429


async def test_only_those_who_have_room_now_are_woken() -> None:
    """Six hundred that look again at every release would hold up the event loop."""
    budget, num_looks = BodyBudget(100), 0
    await budget.reserve("ann", 100)

    async def wait(size: int) -> None:
        nonlocal num_looks
        await budget.reserve("bob", size)
        num_looks += 1

    waiting = [asyncio.create_task(wait(size)) for size in (30, 40, 20, 5)]
    await asyncio.sleep(0)
    gone = asyncio.create_task(budget.reserve("bob", 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    budget.release("ann", 100)
    await soon(lambda: [task.done() for task in waiting] == [True, False, True, False])
    assert (budget.held_bytes, num_looks) == (50, 2)
    budget.release("bob", 30)
    await soon(lambda: [task.done() for task in waiting] == [True, False, True, True])
    budget.release("bob", 25)
    await asyncio.wait_for(waiting[1], 60)
    assert budget.held_bytes == 40


@contextmanager
def _listening(
    limits: ConnectionLimits, size_bytes: int = 10**6
) -> Iterator[tuple[int, threading.Event]]:
    """A program that takes whole bodies and answers with 50 times `size_bytes`, guarded.

    Gives its port, and what is set when it was called.
    """
    is_called = threading.Event()

    async def program(scope: Any, receive: Any, send: Any) -> None:
        is_called.set()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x" * size_bytes, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(program, http=guarded(limits), lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield sock.getsockname()[1], is_called
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)


def test_an_answer_that_nobody_reads_ends_the_connection() -> None:
    limits = ConnectionLimits(write_pause_s=0.5)
    with _listening(limits) as (port, is_called):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert is_called.wait(60)
            until(lambda: limits.num_open == 0)


def test_an_answer_that_is_read_too_slowly_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the room in memory that it takes is never given back."""
    monkeypatch.setattr(connections, "PIECE_BYTES", connections.SLOWEST // 10)
    num_bytes = 0
    with _listening(ConnectionLimits(write_pause_s=1.0)) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with suppress(ConnectionResetError):
                while piece := sock.recv(300_000):  # a megabyte in a third of a second
                    num_bytes += len(piece)
                    time.sleep(0.1)
    assert 10**6 < num_bytes < 40 * 10**6  # of 50


def test_a_body_that_comes_byte_by_byte_has_an_end() -> None:
    """Else room in memory that was reserved for it is never given back."""
    limits = ConnectionLimits(body_timeout_s=1.0)
    with _listening(limits) as (port, is_called):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
            assert is_called.wait(60)

            def dripped() -> bool:
                with suppress(OSError):
                    sock.sendall(b"x")
                time.sleep(0.1)
                return limits.num_open == 0

            until(dripped)


def test_a_body_that_comes_slowly_and_steadily_is_taken() -> None:
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n"
    with _listening(ConnectionLimits(body_timeout_s=0.5)) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            for n in range(30):  # 180 s may pass, at the slowest that is allowed
                sock.sendall((b"" if n else head) + b"x" * 100_000)
                time.sleep(0.1)
            assert sock.recv(12) == b"HTTP/1.1 200"
