"""The life of a session: the order of the first calls, heartbeats, flags, the end (contract 3)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import orjson
import pytest
from hostile import Network, Server, json_reply
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.http.http1 import Reply
from tinkex.client.session.flags import DynamicFlags, ServerFlags
from tinkex.client.session.holder import Holder


class Logged(Server):
    """Remembers the path of every request."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.sessions: list[dict[str, Any]] = []
        self.beat_status = 200

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        self.paths.append(path.removeprefix("/api/v1/"))
        self.keys.append(headers["X-API-Key"])
        return await super().handle(method, path, headers, body)

    def on_create_session(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.sessions.append(orjson.loads(body))
        return json_reply({"session_id": "S", "warning_message": "your key ends soon"})

    def on_session_heartbeat(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.heartbeats += 1
        return json_reply({}, self.beat_status)


Program = Callable[[tinkex.ServiceClient], Coroutine[Any, Any, Any]]


def run(server: Server, program: Program, **settings: Any) -> Any:
    async def main() -> Any:
        config = ClientConfig(
            base_url="http://session.test", api_key="tml-k", telemetry=False, **settings
        )
        service = tinkex.ServiceClient(config=config)
        network = Network(server, random.Random(0), rate=0.0)
        service._holder = Holder(config, make_backend=network.make_backend)
        try:
            return await program(service)
        finally:
            await service.close("errored", "why")

    return run_virtual(main())


async def start(service: tinkex.ServiceClient) -> None:
    await service.create_sampling_client_async(base_model="m")


def test_the_first_calls_come_in_the_contracts_order() -> None:
    server = Logged()
    settings = {"user_metadata": {"a": "b"}, "tags": ("x",), "project_id": "p", "display_name": "d"}
    run(server, start, **settings)
    assert server.paths == [
        "client/config",
        "client/dynamic_config",
        "create_session",
        "create_sampling_session",
        "sessions/S/finish",
    ]
    assert server.sessions == [
        {
            "tags": ["x"],
            "user_metadata": {"a": "b"},
            "sdk_version": "0.36.0",
            "project_id": "p",
            "display_name": "d",
            "type": "create_session",
        }
    ]
    assert server.finished == ["errored"]


def test_a_token_is_exchanged_between_config_and_the_rest() -> None:
    server = Logged(jwt=True)
    run(server, start)
    assert server.paths[:3] == ["client/config", "auth/token", "client/dynamic_config"]
    assert server.keys[:2] == ["tml-k", "tml-k"]
    assert all(key.startswith("eyJ") for key in server.keys[2:])
    assert server.violations == []


def test_many_first_calls_at_once_make_one_session() -> None:
    server = Logged()

    async def many(service: tinkex.ServiceClient) -> None:
        await asyncio.gather(*(start(service) for _ in range(10)))

    run(server, many)
    assert server.paths.count("create_session") == 1


def test_a_start_that_failed_can_be_tried_again() -> None:
    class Late(Logged):
        refusals = 1

        def on_client_config(self, headers: Mapping[str, str], body: bytes) -> Reply:
            if self.refusals:
                self.refusals -= 1
                return json_reply({"detail": "who are you"}, 401)
            return super().on_client_config(headers, body)

    server = Late()

    async def twice(service: tinkex.ServiceClient) -> None:
        with pytest.raises(tinkex.AuthenticationError, match="TINKER_API_KEY"):
            await start(service)
        await start(service)

    run(server, twice)
    assert server.paths.count("create_session") == 1


def test_heartbeats_come_every_ten_seconds_and_410_ends_them() -> None:
    server = Logged()

    async def live(service: tinkex.ServiceClient) -> tuple[int, int]:
        await start(service)
        await asyncio.sleep(95)
        before = server.heartbeats
        server.beat_status = 410
        await asyncio.sleep(100)
        return before, server.heartbeats

    assert run(server, live) == (9, 10)


def test_lost_heartbeats_are_told_after_two_minutes(caplog: pytest.LogCaptureFixture) -> None:
    server = Logged()

    async def silence(service: tinkex.ServiceClient) -> None:
        await start(service)
        server.beat_status = 503
        await asyncio.sleep(115)
        assert "No heartbeat" not in caplog.text
        await asyncio.sleep(20)

    with caplog.at_level(logging.WARNING):
        run(server, silence)
    assert "No heartbeat reached the server for 1" in caplog.text
    assert "your key ends soon" in caplog.text


def test_dynamic_flags_are_fetched_again_and_a_failure_keeps_the_last() -> None:
    class Changing(Logged):
        answers = [
            {"refresh_interval_sec": 60},
            {"refresh_interval_sec": 20, "sample_cancel_enabled": True},
            None,
        ]

        def on_client_dynamic_config(self, headers: Mapping[str, str], body: bytes) -> Reply:
            answer = self.answers.pop(0) if self.answers else None
            return json_reply({}, 500) if answer is None else json_reply(answer)

    async def watch(service: tinkex.ServiceClient) -> list[bool]:
        await start(service)
        seen = [service.holder.dynamic.sample_cancel_enabled]
        for delay in (61, 60):
            await asyncio.sleep(delay)
            seen.append(service.holder.dynamic.sample_cancel_enabled)
        return seen

    assert run(Changing(), watch) == [False, True, True]


def test_flags_of_a_wrong_type_keep_their_default(caplog: pytest.LogCaptureFixture) -> None:
    flags = ServerFlags.from_json(
        {"fwdbwd_max_chunk_len": "many", "parallel_fwdbwd_chunks": 0, "new_flag": 1, "x": None}
    )
    assert flags == ServerFlags()
    assert "fwdbwd_max_chunk_len" in caplog.text
    assert ServerFlags.from_json(None) == ServerFlags()
    assert DynamicFlags.from_json({"refresh_interval_sec": 7}).refresh_interval_sec == 7


def test_chunks_of_one_call_leave_together_the_first_one_last() -> None:
    """Contract 5.3: seq 2, 3, 1."""
    tokens = [1, 2]
    datum = types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})

    def arrivals(*, parallel: bool) -> list[int]:
        server = Logged(
            flags={"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel}, compute_s=0.0
        )

        async def train(service: tinkex.ServiceClient) -> None:
            client = await service.create_lora_training_client_async("m", rank=4)
            loss = client.forward_backward([datum] * 3, "cross_entropy")
            step = client.optim_step(types.AdamParams())
            assert (await loss).metrics == {"loss:sum": 9.0}
            await step

        run(server, train)
        return [seq_id for _, seq_id in server.arrivals]

    assert arrivals(parallel=False) == [1, 2, 3, 4]
    chosen = arrivals(parallel=True)
    assert sorted(chosen[:2]) == [2, 3]
    assert chosen[2:] == [1, 4]


async def test_a_credential_command_needs_a_server_that_gives_tokens() -> None:
    config = ClientConfig(
        base_url="http://session.test", credential_cmd="echo tml-cmd", telemetry=False
    )
    network = Network(Logged(), random.Random(0), rate=0.0)
    holder = Holder(config, make_backend=network.make_backend)
    with pytest.raises(tinkex.ConfigError, match="TINKER_API_KEY"):
        await holder.ready()
    await holder.close()


def test_closing_ends_waiting_calls_with_an_error_that_says_so() -> None:
    server = Logged(compute_s=10_000.0)

    async def close_early(service: tinkex.ServiceClient) -> list[Any]:
        client = await service.create_sampling_client_async(base_model="m")
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        waiting = [client.sample(prompt, 1, params) for _ in range(3)]
        await asyncio.sleep(5)
        await service.close("success")
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = run(server, close_early)
    assert [type(answer) for answer in answers] == [tinkex.ClientClosedError] * 3


def test_a_session_ends_with_its_reason_whatever_the_text_of_the_error_holds() -> None:
    class Listening(Server):
        details: list[Any] = []

        async def handle(self, method: str, path: str, headers: Any, body: bytes | None) -> Reply:
            if path.endswith("/finish"):
                self.details.append(orjson.loads(body or b"{}")["detail"])
            return await super().handle(method, path, headers, body)

    server = Listening(compute_s=0.0)

    async def main() -> None:
        config = ClientConfig(base_url="http://session.test", api_key="tml-k", telemetry=False)
        service = tinkex.ServiceClient(config=config)
        network = Network(server, random.Random(0), rate=0.0)
        service._holder = Holder(config, make_backend=network.make_backend)
        await service.create_lora_training_client("m", rank=4)
        await service.close("errored", "a\x00b\ud800")

    run_virtual(main())
    assert (server.finished, server.details) == (["errored"], ["a?b?"])
