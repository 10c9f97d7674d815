"""The SDK's loop stays awake: heartbeats and polls go on while large bodies are built."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hostile import Promise, Server
from patience import until

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.http.http1 import Reply
from tinkex.client.training import pass_requests


class Swallow(Server):
    """Takes passes without reading them; counts their bytes."""

    num_bytes = 0
    num_passes = 0

    def on_forward_backward(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.num_bytes += len(body)
        self.num_passes += 1
        value = types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.0})
        return self._promise(f"pass-{self.num_passes}", value)


class Held(Server):
    """Looks again and again whether a promise is ready: a test may say so at any time."""

    async def _hold(self, promise: Promise) -> bool:
        while promise.ready_at > asyncio.get_running_loop().time():
            await asyncio.sleep(0.2)
        return True


@contextlib.contextmanager
def over_http(server: Server) -> Iterator[str]:
    """The in-memory server behind a real socket, on a thread of its own."""
    ready = threading.Event()
    bound: list[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("Content-Length", 0)))
                reply = await server.handle(method, path, headers, body)
                kind = reply.headers.get("content-type", "text/plain")
                writer.write(
                    f"HTTP/1.1 {reply.status} X\r\ncontent-type: {kind}\r\n"
                    f"content-length: {len(reply.content)}\r\n\r\n".encode()
                    + reply.content
                )
        writer.close()

    async def serve() -> None:
        stop = asyncio.Event()
        async with await asyncio.start_server(talk, "127.0.0.1", 0, limit=2**22) as listening:
            port = listening.sockets[0].getsockname()[1]
            bound.append((asyncio.get_running_loop(), stop, port))
            ready.set()
            await stop.wait()
            await asyncio.sleep(0.1)  # the client has closed; let its connections end

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    loop, stop, port = bound[0]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def _batch(num_bytes: int) -> list[types.Datum]:
    tokens = np.arange(4096) % 1000
    inputs = {"target_tokens": tokens, "weights": np.ones(4096, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints(tokens), inputs)
    return [datum] * (num_bytes // (16 * 4096))


class Beats:
    """Counts the heartbeats that were answered."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> Beats:
        self._end = tinkex.events.subscribe(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _note(self, event: Any) -> None:
        self.num += event.name == "session.heartbeat"

    def more(self, num: int) -> bool:
        """Wait here for so many more; False when they do not come."""
        wanted, deadline = self.num + num, time.monotonic() + 60
        while self.num < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.num >= wanted


def connect(base_url: str) -> tinkex.ServiceClient:
    config = ClientConfig(
        base_url=base_url, api_key="tml-k", telemetry=False, heartbeat_interval_s=0.1
    )
    return tinkex.ServiceClient(config=config)


@pytest.mark.parametrize("compress", [False, True])
def test_heartbeats_go_on_while_fifty_megabytes_are_sent(
    compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a body waits for two heartbeats here: on the loop it would wait in vain."""
    encode, went_on = pass_requests.requests.encode, []

    def slow(name: str, *args: Any, **options: Any) -> Any:
        if name == "forward_backward":
            went_on.append(beats.more(2) if all(went_on) else False)
        return encode(name, *args, **options)

    monkeypatch.setattr(pass_requests.requests, "encode", slow)
    server = Swallow(flags={"proto_compress_fwdbwd": compress}, compute_s=0.0)
    with over_http(server) as base_url, Beats() as beats:
        service = connect(base_url)
        client = service.create_lora_training_client("m", rank=4)
        client.forward_backward(_batch(50_000_000), "cross_entropy").result(120)
        service.close("success").result(60)
    assert server.num_bytes > (1_000 if compress else 45_000_000)
    assert server.num_passes >= 10
    assert len(went_on) == server.num_passes
    assert all(went_on)


def test_a_thousand_waiting_samples_do_not_delay_a_heartbeat() -> None:
    """R10: pools are kept apart."""
    server = Held(compute_s=3600.0)
    with over_http(server) as base_url, Beats() as beats:
        service = connect(base_url)
        sampler = service.create_sampling_client(base_model="m")
        prompt = types.ModelInput.from_ints([1, 2])
        futures = [
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(1000)
        ]
        until(lambda: len(server.promises) == 1000)
        assert beats.more(3)
        for promise in server.promises.values():
            promise.ready_at = 0.0
        for future in futures:
            future.result(60)
        service.close("success").result(60)


def test_heartbeats_survive_a_busy_loop_in_the_main_thread() -> None:
    """Most reported hangs were a background thread starved by the program's own Python."""
    server = Server()
    with over_http(server) as base_url, Beats() as beats:
        service = connect(base_url)
        service.create_sampling_client(base_model="m")
        wanted, deadline, number = beats.num + 5, time.monotonic() + 60, 0
        while beats.num < wanted and time.monotonic() < deadline:
            number += 1
        assert beats.num >= wanted
        service.close("success").result(60)
