"""Bytes that requests hold are counted while they are held, and gone with their answers."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import hostile_tar
import httpx
import orjson
import pytest
from raw_http import Connection
from server_process import ServerProcess

from tinkex.server.guard.connections import MAX_PIPELINED
from tinkex.server.guard.limits import MAX_WAITING, BodyBudget
from tinkex.server.process.problems import ApiError

KEY = {"x-api-key": "tml-ann"}
NUM_TOKENS = 3000
TOKENS = [n % 200 for n in range(NUM_TOKENS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("held")
    with ServerProcess(folder, "--engine", "toy", "--api-key", "tml-ann=ann") as started:
        yield started


def memory_mib(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024


def cpu_s(server: ServerProcess) -> float:
    """Seconds of a CPU that the server took so far: they are few also where it waits for one."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connected(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_the_body_of_a_refused_import_is_gone_though_its_connection_stays(
    server: ServerProcess,
) -> None:
    """The scope of a request lives as long as its connection."""
    body = hostile_tar.digits(5_000_000)
    with ExitStack() as stack:
        sizes_mib = []
        for _ in range(60):
            client = stack.enter_context(httpx.Client(base_url=server.base_url, headers=KEY))
            response = client.post("/api/v1/checkpoints/import", content=body)
            assert response.status_code == 400
            sizes_mib.append(memory_mib(server))
        assert sizes_mib[-1] - sizes_mib[9] < 60  # 250 without


async def large_result(port: int) -> str:
    """The id of a request whose result has 2 MB, or 10 MB in JSON."""
    connection = Connection(port, "tml-ann")
    session = await connection.ok("create_session", {"tags": [], "sdk_version": "test"})
    asked = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": "toy",
        "lora_config": {"rank": 4},
    }
    made = await connection.settled(await connection.ok("create_model", asked))
    model_id = orjson.loads(made)["model_id"]
    tensor = {"dtype": "float32", "shape": [NUM_TOKENS]}
    inputs = {
        "target_tokens": tensor | {"data": TOKENS, "dtype": "int64"},
        "weights": tensor | {"data": [1.0] * NUM_TOKENS},
    }
    chunks = [{"type": "encoded_text", "tokens": TOKENS}]
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
    given = {"data": [datum] * 160, "loss_fn": "cross_entropy"}
    body = {"model_id": model_id, "seq_id": 1, "forward_input": given}
    promise = await connection.ok("forward", body)
    assert len(await connection.settled(promise)) > 8_000_000
    connection.close()
    return str(promise["request_id"])


def test_answers_that_nobody_reads_are_counted(server: ServerProcess) -> None:
    """A connection keeps what it is given: a hundred of ten megabytes were a gigabyte."""
    body = orjson.dumps({"request_id": asyncio.run(large_result(server.port))})
    head = (
        "POST /api/v1/retrieve_future HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-ann\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    before = memory_mib(server)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connected(server)).sendall(head.encode() + body)
        time.sleep(3)
        assert memory_mib(server) - before < 500  # 1,000 without
        assert httpx.get(f"{server.base_url}/api/v1/healthz").status_code == 200


def test_requests_that_wait_behind_another_have_a_limit(server: ServerProcess) -> None:
    """Heads of 24 bytes become kilobytes each, and were made on the event loop: 84 s of it."""
    before_s = cpu_s(server)
    with ExitStack() as stack:
        socks = []
        for _ in range(40):
            socks.append(stack.enter_context(connected(server)))
            with suppress(ConnectionError):  # it may have ended this one before all was sent
                socks[-1].sendall(b"GET / HTTP/1.1\r\na: b\r\n\r\n" * 10_000)
        httpx.get(f"{server.base_url}/api/v1/healthz", timeout=60).raise_for_status()
        assert cpu_s(server) - before_s < 20
        for sock in socks:
            with suppress(ConnectionError):
                while sock.recv(65_536):  # until the server ends it, after a few answers
                    pass


def test_a_few_requests_behind_another_are_answered_in_turn(server: ServerProcess) -> None:
    one = b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(one * MAX_PIPELINED)
        told = b""
        while told.count(b"HTTP/1.1 200") < MAX_PIPELINED:
            assert (piece := sock.recv(65_536))
            told += piece


async def test_so_many_requests_of_a_user_wait_for_room_and_the_next_is_refused() -> None:
    budget = BodyBudget(100)
    await budget.reserve("ann", 100)
    waiting = [asyncio.create_task(budget.reserve("bob", 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="fewer large requests"):
        await budget.reserve("bob", 1)
    budget.release("ann", 100)
    await asyncio.gather(*waiting[:50])
