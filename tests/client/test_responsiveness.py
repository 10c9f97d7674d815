"""The SDK's loop stays awake: heartbeats and polls go on while large bodies are built."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hostile import Server

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
    assert ready.wait(10)
    loop, stop, port = bound[0]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def _batch(num_bytes: int) -> list[types.Datum]:
    tokens = np.arange(4096) % 1000
    inputs = {"target_tokens": tokens, "weights": np.ones(4096, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints(tokens), inputs)
    return [datum] * (num_bytes // (16 * 4096))


@pytest.mark.parametrize("compress", [False, True])
def test_heartbeats_go_on_while_fifty_megabytes_are_sent(
    compress: bool, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a body is made half a second slower here, so that doing it on the loop would show.

    Eleven chunks on the loop would be a silence of more than five seconds; on a quiet machine the
    longest is 0.2 s with a beat every 0.1 s.
    """
    encode = pass_requests.requests.encode

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return encode(*args, **options)

    monkeypatch.setattr(pass_requests.requests, "encode", slow)
    server = Swallow(flags={"proto_compress_fwdbwd": compress}, compute_s=0.0)
    beats: list[float] = []
    with over_http(server) as base_url:
        config = ClientConfig(
            base_url=base_url, api_key="tml-k", telemetry=False, heartbeat_interval_s=0.1
        )
        service = tinkex.ServiceClient(config=config)
        client = service.create_lora_training_client("m", rank=4)
        data = _batch(50_000_000)
        unsubscribe = tinkex.events.subscribe(
            lambda event: (
                beats.append(time.monotonic()) if event.name == "session.heartbeat" else None
            )
        )
        try:
            started = time.monotonic()
            client.forward_backward(data, "cross_entropy").result(120)
            seconds = time.monotonic() - started
            time.sleep(0.3)
        finally:
            unsubscribe()
            service.close("success").result(30)
    marks = [started, *(beat for beat in beats if beat > started)]
    silence = max(later - earlier for earlier, later in zip(marks, marks[1:], strict=False))
    record_property("longest_silence_s", silence)
    print(f"50 MB in {seconds:.2f} s, longest silence between heartbeats {silence:.3f} s")
    assert server.num_bytes > (1_000 if compress else 45_000_000)
    assert server.num_passes >= 10
    assert silence < 2.5


def test_a_thousand_waiting_samples_do_not_delay_a_heartbeat() -> None:
    """R10: pools are kept apart."""
    server = Server(compute_s=1.0)
    with over_http(server) as base_url:
        config = ClientConfig(
            base_url=base_url, api_key="tml-k", telemetry=False, heartbeat_interval_s=0.1
        )
        service = tinkex.ServiceClient(config=config)
        sampler = service.create_sampling_client(base_model="m")
        prompt = types.ModelInput.from_ints([1, 2])
        started = time.monotonic()
        futures = [
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(1000)
        ]
        before = server.heartbeats
        for future in futures:
            future.result(60)
        seconds = time.monotonic() - started
        assert server.heartbeats - before >= min(seconds / 0.5, 3) - 1
        service.close("success").result(30)


def test_heartbeats_survive_a_busy_loop_in_the_main_thread() -> None:
    """Most reported hangs were a background thread starved by the program's own Python."""
    server = Server()
    with over_http(server) as base_url:
        config = ClientConfig(
            base_url=base_url, api_key="tml-k", telemetry=False, heartbeat_interval_s=0.1
        )
        service = tinkex.ServiceClient(config=config)
        service.create_sampling_client(base_model="m")
        before, until = server.heartbeats, time.monotonic() + 1.5
        number = 0
        while time.monotonic() < until:
            number += 1
        assert server.heartbeats - before >= 5
        service.close("success").result(30)
