"""One hostile key beside one polite key, and strangers without a key: what the polite one notices.

The hostile key floods the queue with long samples that it never fetches, sends large telemetry,
searches and training bodies, all at once; then it sends bodies to `/v1` that are small on the wire
and huge once parsed, over 170 connections; then strangers without a key open connections, send
headers without end and bodies that are not read. Meanwhile the polite key sends heartbeats and
samples eight tokens, again and again, against the toy engine.

    python benchmarks/abuse.py [--no-bar] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import report
import zstandard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "server"))
sys.path.insert(0, str(ROOT / "tests" / "security"))
from fuzz import talking_toy  # noqa: E402
from raw_http import Connection  # noqa: E402
from server_process import ServerProcess  # noqa: E402

HOSTILE, POLITE = "tml-hostile", "tml-polite"
GIB = 1024**3


def memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


class Watched:
    """Latencies and failures of the polite key, and the most memory the API process took."""

    def __init__(self) -> None:
        self.heartbeats_s: list[float] = []
        self.samples_s: list[float] = []
        self.errors: list[str] = []
        self.memory_bytes = 0


async def post(connection: Connection, path: str, body: Any) -> dict[str, Any]:
    status, content = await connection.post(path, body)
    if status not in (200, 408):
        raise RuntimeError(f"{path}: {status} {content[:200]!r}")
    return dict(orjson.loads(content)) if status == 200 else {}


async def open_sampler(connection: Connection) -> tuple[str, str]:
    made = await post(connection, "create_session", {"tags": [], "sdk_version": "abuse"})
    session = str(made["session_id"])
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = await post(connection, "create_sampling_session", asked)
    return session, str(sampler["sampling_session_id"])


def sample_body(sampler: str, seq_id: int, *, num_samples: int, max_tokens: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens, "stop": []},
        "num_samples": num_samples,
    }


async def be_polite(port: int, watched: Watched, until: float) -> None:
    beats, samples = Connection(port, POLITE), Connection(port, POLITE)
    session, sampler = await open_sampler(samples)

    async def beat() -> None:
        while time.monotonic() < until:
            started = time.perf_counter()
            await post(beats, "session_heartbeat", {"session_id": session})
            watched.heartbeats_s.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)

    async def sample() -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            started = time.perf_counter()
            body = sample_body(sampler, number, num_samples=1, max_tokens=8)
            promise = await post(samples, "asample", body)
            while not await post(samples, "retrieve_future", promise):
                pass
            watched.samples_s.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)

    for done in await asyncio.gather(beat(), sample(), return_exceptions=True):
        if isinstance(done, Exception):
            watched.errors.append(repr(done))


async def repeat(until: float, work: Callable[[], Awaitable[Any]]) -> None:
    """Whatever the answer, again."""
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            await work()
        await asyncio.sleep(0)


async def be_hostile(port: int, until: float) -> None:
    _, sampler = await open_sampler(Connection(port, HOSTILE))
    number = 0

    async def flood(connection: Connection) -> None:
        nonlocal number
        number += 1
        body = sample_body(sampler, number, num_samples=64, max_tokens=400)
        status, _ = await connection.post("asample", body)
        if status == 429:
            await asyncio.sleep(0.2)

    telemetry = zstandard.compress(orjson.dumps({"events": [{}] * 200_000, "session_id": "x"}))
    words = orjson.dumps({"display_name": " ".join(f"w{n}" for n in range(30_000))})
    lists = b'{"model_id": [' + b"[]," * 2_000_000 + b"[]]}"
    tasks = [repeat(until, partial(flood, Connection(port, HOSTILE))) for _ in range(16)]
    for path, body in (
        ("telemetry", telemetry),
        ("sessions/search", words),
        ("forward_backward", lists),
        ("create_session", orjson.dumps({"display_name": "x" * 900_000})),
    ):
        for _ in range(2):
            tasks.append(repeat(until, partial(_fresh, Connection(port, HOSTILE), path, body)))
    await asyncio.gather(*tasks)


def foreign_bodies() -> list[tuple[str, int, bytes]]:
    """Paths of `/v1`, how many connections send to each, and what: beyond the bounds and below."""
    toy, user = {"model": "toy"}, {"role": "user", "content": "hi"}
    calling = user | {"tool_calls": [{"function": {"name": "f"}}] * 990}
    keys = {f"k{n}": 0 for n in range(490_000)}
    chat, wide = "/v1/chat/completions", "x" * 15_000_000 + "\U0001f600"
    options = {"reasoning_effort": [0] * 1_000_000}
    bodies: list[tuple[str, int, dict[str, Any]]] = [
        (chat, 60, toy | {"messages": [calling] * 121}),
        (chat, 40, toy | {"messages": [calling] * 10}),
        (chat, 8, toy | {"messages": [user] * 9000}),
        (chat, 8, toy | {"messages": [user], "chat_template_kwargs": options}),
        (chat, 4, toy | {"messages": [user | {"content": wide}]}),
        (chat, 8, toy | {"messages": [user], **keys}),
        ("/v1/completions", 8, toy | {"prompt": ["a"] * 480_000}),
        ("/v1/completions", 8, toy | {"prompt": [5] * 1_400_000}),
        ("/v1/responses", 6, toy | {"input": [{"type": "function_call", "name": "f"}] * 10_000}),
        ("/v1/completions", 4, toy | {"prompt": ["hi"] * 1024, "max_tokens": 1}),
        (
            chat,
            4,
            toy | {"messages": [user], "logit_bias": dict.fromkeys(map(str, range(140_000)))},
        ),
        ("/api/v1/asample", 8, {"prompt": {"chunks": [{"type": "x", "tokens": [1]}] * 120_000}}),
    ]
    packed = [(path, n, zstandard.compress(orjson.dumps(body))) for path, n, body in bodies]
    rest = b'"messages": [{"role": "user", "content": "' + b"x" * 15_000_000 + b'"}]}'
    frames = zstandard.compress(b'{"model": "toy", ') + zstandard.compress(rest)
    return [*packed, (chat, 8, frames)]


async def be_foreign(port: int, until: float) -> None:
    work = [
        repeat(until, partial(_fresh, Connection(port, HOSTILE), path, body, encoding="zstd"))
        for path, num_connections, body in foreign_bodies()
        for _ in range(num_connections)
    ]
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.sleep(max(until - time.monotonic(), 0))
    for task in tasks:  # some wait for an answer longer than this lasts
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _fresh(connection: Connection, path: str, body: bytes, **how: str) -> None:
    try:
        await connection.post(path, body, **how)
    except Exception:
        connection._writer = None  # the server closed it; open another
        raise


async def be_a_stranger(port: int, until: float) -> None:
    async def head_without_end() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 1_000_000)
            await writer.drain()
            await asyncio.wait_for(reader.read(100), 2)
        finally:
            writer.close()

    async def body_without_key() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                b"POST /api/v1/sessions/search HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: text/plain\r\ncontent-length: 2500000000\r\n\r\n"
            )
            for _ in range(50):
                writer.write(b"z" * 1_000_000)
                await writer.drain()
            await asyncio.wait_for(reader.read(100), 2)
        finally:
            writer.close()

    async def idle() -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        await asyncio.sleep(1)
        for _, writer in pairs:
            writer.close()

    works = (head_without_end, body_without_key, idle) * 2
    await asyncio.gather(*(repeat(until, work) for work in works))


async def watch_memory(pid: int, watched: Watched, until: float) -> None:
    while time.monotonic() < until:
        watched.memory_bytes = max(watched.memory_bytes, memory_bytes(pid))
        await asyncio.sleep(0.1)


async def abuse(server: ServerProcess, seconds: float) -> Watched:
    watched, started = Watched(), time.monotonic()
    third, end = seconds / 3, started + seconds
    polite = asyncio.create_task(be_polite(server.port, watched, end))
    memory = asyncio.create_task(watch_memory(server.pid, watched, end))
    await be_hostile(server.port, started + third)
    await be_foreign(server.port, started + 2 * third)
    await be_a_stranger(server.port, end)
    await asyncio.gather(polite, memory)
    return watched


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 2 else max(values, default=99)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    flags, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = ("--api-key", f"{HOSTILE}=hostile", "--api-key", f"{POLITE}=polite")
        toy = talking_toy(Path(folder, "model"))
        model = ("--model", toy["models"][0], "--alias", f"toy={toy['models'][0]}")
        with ServerProcess(Path(folder), "--engine", toy["engine"], *model, *keys) as server:
            watched = asyncio.run(abuse(server, flags.seconds))
    for error in watched.errors:
        print(error, file=sys.stderr)
    count = f"{len(watched.heartbeats_s)} heartbeats, {len(watched.samples_s)} samples"
    figures = [
        report.Figure(
            name="polite_heartbeat_p99", ours=p99(watched.heartbeats_s), unit="s", bar=0.5
        ),
        report.Figure(
            name="polite_sample_p99", ours=p99(watched.samples_s), unit="s", bar=5.0, note=count
        ),
        report.Figure(name="api_memory", ours=watched.memory_bytes / GIB, unit="GiB", bar=1.0),
        report.Figure(name="polite_errors", ours=len(watched.errors), unit="errors", bar=0),
    ]
    return report.finish("abuse", figures, rest)


if __name__ == "__main__":
    sys.exit(main())
