"""Servers that are not ours: the old generation, TLS with HTTP/2, limits shared by an account."""

from __future__ import annotations

import asyncio
import random
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from datums import datum
from hostile import Network, Server, json_reply
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.http.backends import HttpxBackend
from tinkex.client.http.http1 import Http1Pool, Reply
from tinkex.client.session.holder import Holder

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PARAMS = types.SamplingParams(max_tokens=4, seed=1)


# --------------------------------------------------------------------------- old generation


class WithoutConfig(Http1Pool):
    """Hides `/client/config`, as servers before 0.18 did not have it."""

    seen: set[str] = set()

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        name = url.rpartition("/api/v1/")[2]
        if name.startswith("client/"):
            return json_reply({"detail": "Not Found"}, 404)
        type(self).seen.add(f"{name} {headers.get('Content-Type', '')}")
        return await super().send(method, url, headers, body, timeout_s)


def test_a_server_without_a_client_config_is_spoken_to_in_json(toy_server: str) -> None:
    config = ClientConfig(base_url=toy_server, api_key="tml-old", telemetry=False)
    service = tinkex.ServiceClient(config=config)
    service._holder = Holder(config, make_backend=lambda given: WithoutConfig(given.base_url))
    client = service.create_lora_training_client(MODEL, rank=4, seed=1)
    data = [datum([1, 2, 3]) for _ in range(200)]  # more than the 128 such a server takes
    step = client.train_step(data, "cross_entropy", types.AdamParams(learning_rate=0.01))
    assert len(step.result(60).loss_fn_outputs) == 200
    lower = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
    assert step.result().loss is not None
    assert lower < step.result().loss
    sampler = client.save_weights_and_get_sampling_client()
    assert len(sampler.sample(types.ModelInput.from_ints([1]), 2, PARAMS).result(60).sequences) == 2
    assert "forward application/json" in WithoutConfig.seen
    assert "forward_backward application/json" in WithoutConfig.seen
    service.close("success").result(60)


# --------------------------------------------------------------------------- TLS and HTTP/2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    openssl = shutil.which("openssl")
    assert openssl, "the test of TLS needs the openssl command"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def tls_server(certificate: Path) -> Iterator[tuple[str, list[str]]]:
    """Answers every request with `{}` over HTTP/2; remembers the protocol it agreed on."""
    import h2.config
    import h2.connection
    import h2.events

    protocols: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        protocols.append(chosen)
        peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        peer.initiate_connection()
        writer.write(peer.data_to_send())
        while data := await reader.read(65536):
            for event in peer.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    headers = [(":status", "200"), ("content-type", "application/json")]
                    peer.send_headers(event.stream_id, headers)
                    peer.send_data(event.stream_id, b'{"supported_models":[]}', end_stream=True)
            writer.write(peer.data_to_send())
        writer.close()

    ready = threading.Event()
    bound: list[Any] = []

    async def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        context.set_alpn_protocols(["h2"])
        stop = asyncio.Event()
        async with await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context) as listening:
            port = listening.sockets[0].getsockname()[1]
            bound.extend((asyncio.get_running_loop(), stop, port))
            ready.set()
            await stop.wait()
            await asyncio.sleep(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    loop, stop, port = bound
    try:
        yield f"https://127.0.0.1:{port}", protocols
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def test_http2_is_spoken_where_tls_offers_it(tls_server: tuple[str, list[str]]) -> None:
    base_url, protocols = tls_server
    config = ClientConfig(
        base_url=base_url, api_key="tml-k", telemetry=False, verify_tls=False, max_retries=0
    )
    service = tinkex.ServiceClient(config=config)
    assert service.get_server_capabilities().supported_models == []
    assert set(protocols) == {"h2"}
    service.close("success").result(60)


def test_an_unknown_certificate_is_refused(tls_server: tuple[str, list[str]]) -> None:
    config = ClientConfig(
        base_url=tls_server[0], api_key="tml-k", telemetry=False, max_retries=0, retry_window_s=0
    )
    with pytest.raises(tinkex.APIConnectionError, match="SSL_CERT_FILE"):
        tinkex.ServiceClient(config=config).get_server_capabilities()


async def test_a_further_client_is_opened_when_all_carry_their_most() -> None:
    """Contract 1.3: fifty requests per HTTP client."""
    backend = HttpxBackend(ClientConfig(base_url="https://busy.test", api_key="tml-k"))
    for _ in range(120):
        backend._busy[backend._least_busy()] += 1
    assert backend._busy == [50, 50, 20]
    await backend.close()


# --------------------------------------------------------------------------- one account


def test_a_429_seen_by_one_client_holds_back_the_others_of_its_account_only() -> None:
    """R14."""

    class Busy(Server):
        refusals = 1

        def on_optim_step(self, headers: Mapping[str, str], body: bytes) -> Reply:
            if self.refusals:
                self.refusals -= 1
                return json_reply({"detail": "slow down"}, 429, **{"retry-after": "30"})
            return super().on_optim_step(headers, body)

    async def client_of(key: str, server: Server) -> tuple[Any, Any]:
        config = ClientConfig(base_url="http://shared.test", api_key=key, telemetry=False)
        service = tinkex.ServiceClient(config=config)
        network = Network(server, random.Random(0), rate=0.0)
        service._holder = Holder(config, make_backend=network.make_backend)
        return service, await service.create_lora_training_client_async("m", rank=4)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        pairs = [
            await client_of("tml-a", Busy(compute_s=0.0)),
            await client_of("tml-a", Server(compute_s=0.0)),
            await client_of("tml-b", Server(compute_s=0.0)),
        ]
        start = loop.time()
        limited = asyncio.ensure_future(pairs[0][1].optim_step(types.AdamParams()).result_async())
        await asyncio.sleep(1)
        times = []
        for _, client in reversed(pairs[1:]):
            await client.optim_step(types.AdamParams())
            times.append(loop.time() - start)
        await limited
        for service, _ in pairs:
            await service.close("success")
        return times

    other, same = run_virtual(main())
    assert other < 2
    assert 30 <= same < 32


# --------------------------------------------------------------------------- leaving


def test_a_program_that_just_ends_ends_quietly(toy_server: str) -> None:
    """No close, samples in flight: no noise, no hang, no thread that keeps it alive."""
    program = f"""
import tinkex
service = tinkex.ServiceClient(base_url={toy_server!r}, api_key="tml-k")
sampler = service.create_sampling_client(base_model={MODEL!r}).result()
prompt = tinkex.ModelInput.from_ints([1])
params = tinkex.SamplingParams(max_tokens=3, seed=1, stop=[])
futures = [sampler.sample(prompt, 1, params) for _ in range(20)]
print(len(futures[0].result(60).sequences[0].tokens))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
    # In this mode asyncio tells of every callback that a busy machine took 0.1 s for.
    noise = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert noise == []


def test_ctrl_c_interrupts_a_wait_and_is_told_to_the_server(toy_server: str) -> None:
    """Contract 3.6: anything but an Exception ends the session as interrupted."""
    config = ClientConfig(base_url=toy_server, api_key="tml-int", telemetry=False)
    service = tinkex.ServiceClient(config=config)

    def program() -> None:
        with service:
            service.create_sampling_client(base_model=MODEL)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program()
    session_id = service.holder.session_id
    rest = tinkex.RestClient(base_url=toy_server, api_key="tml-int")
    found = rest.search_sessions(types.SessionSearchRequest(session_id=session_id)).result(60)
    assert found.sessions[0].status is not None
    assert found.sessions[0].status.type == "client_finished"
    assert found.sessions[0].status.reason.type == "interrupted"
