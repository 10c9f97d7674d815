"""What `client/http/http1.py` is worth: CPU time beside the HTTP clients that could replace it.

    python -m venv /tmp/http-peers
    /tmp/http-peers/bin/pip install . aiohttp h11 httpx httpx2 pyqwest
    /tmp/http-peers/bin/python benchmarks/http_clients.py [--no-bar] [--write] [--rounds 5]

Each client runs in a child process of its own, in turns, against one small server on loopback, over
plain HTTP/1.1 with kept connections: POSTs of a few hundred bytes as samples and polls are, 64 at a
time; bodies of 8 MiB as training data is, two at a time; answers of 8 MiB. The figures are seconds
of CPU, of all threads of the client, the best of all rounds. A peer that is not installed is named
and left out. h11 is a parser, not a client: `_H11Pool` below is the least that makes it one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

PEERS = ("aiohttp", "pyqwest", "h11", "httpx", "httpx2")
MIB = 1024 * 1024
# (bytes sent, bytes answered, requests, at a time)
TASKS = {
    "small": (300, 200, 3000, 64),
    "large_body": (8 * MIB, 200, 24, 2),
    "large_answer": (300, 8 * MIB, 24, 2),
}
HEADERS = {
    "Accept": "application/json",
    "Content-Type": "application/json",
    "User-Agent": "AsyncTinker/Python 0.36.0",
    "X-API-Key": "tml-bench",
    "X-Idempotency-Key": "stainless-python-retry-00000000-0000-0000-0000-000000000000",
    "X-Stainless-Package-Version": "0.36.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "x-stainless-retry-count": "0",
}
Send = Callable[[str, bytes], Awaitable[bytes]]

# ------------------------------------------------------------------- the server


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read a POST to `/N` and answer it with N bytes, for as long as the connection is kept."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            await reader.readexactly(size)
            length = int(head.split(b" ", 2)[1].strip(b"/"))
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % length
            )
            writer.write(b"x" * length)
            await writer.drain()
    writer.close()


async def serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=16 * MIB)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ------------------------------------------------------------------- the clients


@contextlib.asynccontextmanager
async def _http1(url: str) -> AsyncIterator[Send]:
    from tinkex.client.http.http1 import Http1Pool

    pool = Http1Pool(url)

    async def send(path: str, body: bytes) -> bytes:
        return (await pool.send("POST", url + path, HEADERS, body, 60.0)).content

    yield send
    await pool.close()


@contextlib.asynccontextmanager
async def _aiohttp(url: str) -> AsyncIterator[Send]:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1000)) as session:

        async def send(path: str, body: bytes) -> bytes:
            async with session.post(url + path, data=body, headers=HEADERS) as answer:
                return await answer.read()

        yield send


@contextlib.asynccontextmanager
async def _pyqwest(url: str) -> AsyncIterator[Send]:
    import pyqwest

    # As lean as it can be set: no tracing, no redirects.
    transport = pyqwest.HTTPTransport(enable_otel=False, follow_redirects=False)
    client = pyqwest.Client(transport)

    async def send(path: str, body: bytes) -> bytes:
        return bytes((await client.post(url + path, HEADERS, body)).content)

    yield send


@contextlib.asynccontextmanager
async def _httpx(url: str, module: str = "httpx") -> AsyncIterator[Send]:
    httpx = importlib.import_module(module)
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=200)
    async with httpx.AsyncClient(limits=limits, timeout=60.0, verify=False) as client:

        async def send(path: str, body: bytes) -> bytes:
            answer = await client.post(url + path, content=body, headers=HEADERS)
            content: bytes = answer.content
            return content

        yield send


def _httpx2(url: str) -> contextlib.AbstractAsyncContextManager[Send]:
    return _httpx(url, "httpx2")


class _H11Pool:
    """Kept connections with h11 as the parser: no timeouts, no retries, no encodings."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, path: str, body: bytes) -> bytes:
        import h11

        if self._idle:
            state, reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            state = h11.Connection(h11.CLIENT)
        headers = [*HEADERS.items(), ("Host", "127.0.0.1"), ("Content-Length", str(len(body)))]
        request = h11.Request(method="POST", target=path, headers=headers)
        writer.write(state.send(request))
        writer.write(state.send(h11.Data(data=body)) + state.send(h11.EndOfMessage()))
        await writer.drain()
        parts = []
        while not isinstance(event := state.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                state.receive_data(await reader.read(65_536))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
        state.start_next_cycle()
        self._idle.append((state, reader, writer))
        return b"".join(parts)


@contextlib.asynccontextmanager
async def _h11(url: str) -> AsyncIterator[Send]:
    pool = _H11Pool(int(url.rpartition(":")[2]))
    yield pool.send
    for _, _, writer in pool._idle:
        writer.close()


CLIENTS: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Send]]] = {
    "http1": _http1,
    "aiohttp": _aiohttp,
    "pyqwest": _pyqwest,
    "h11": _h11,
    "httpx": _httpx,
    "httpx2": _httpx2,
}


async def work(client: str, task: str, url: str) -> float:
    """Milliseconds of CPU per request."""
    sent, answered, count, at_once = TASKS[task]
    body, path = b"y" * sent, f"/{answered}"
    async with CLIENTS[client](url) as send:
        room = asyncio.Semaphore(at_once)

        async def once() -> None:
            async with room:
                assert len(await send(path, body)) == answered

        await asyncio.gather(*(once() for _ in range(at_once)))
        started = time.process_time()
        await asyncio.gather(*(once() for _ in range(count)))
        return 1000 * (time.process_time() - started) / count


# ------------------------------------------------------------------- the comparison


def measure(client: str, task: str, url: str) -> float:
    command = [sys.executable, __file__, "--work", f"{client}:{task}", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{client} failed at {task} ({done.returncode}): {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def compare(rounds: int) -> list[Any]:
    import report

    missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}", file=sys.stderr)
    names = ["http1", *(name for name in PEERS if name not in missing)]
    best: dict[tuple[str, str], float] = {}
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for _ in range(rounds):
                for task in TASKS:
                    for name in names:
                        cpu_ms = measure(name, task, url)
                        best[name, task] = min(cpu_ms, best.get((name, task), cpu_ms))
        finally:
            server.terminate()
    return [
        report.Figure(
            name=f"http_{task}_{name}", ours=best["http1", task], peer=best[name, task], unit="ms"
        )
        for task in TASKS
        for name in names[1:]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--work")
    parser.add_argument("--url", default="")
    args, _ = parser.parse_known_args()
    if args.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve())
        return 0
    if args.work:
        client, task = args.work.split(":")
        print(asyncio.run(work(client, task, args.url)), flush=True)
        return 0
    import report

    report.parse("http_clients")
    return report.finish("http_clients", compare(args.rounds))


if __name__ == "__main__":
    sys.exit(main())
