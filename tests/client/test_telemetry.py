"""The reporter to the server (R19)."""

from __future__ import annotations

import asyncio
import threading

import orjson
import pytest
from patience import soon

from tinkex import events
from tinkex.client.config import ClientConfig
from tinkex.client.service.service_client import ServiceClient
from tinkex.client.session import telemetry
from tinkex.client.session.telemetry import Reporter, ReporterConfig
from tinkex.errors import (
    APIConnectionError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RequestFailedError,
)
from tinkex.types.service.telemetry import TelemetrySendRequest
from tinkex.wire import requests

SECRET = "tml-super-secret-key"
FAST = ReporterConfig(interval_s=0.02, first_retry_s=0.01, max_retry_s=0.02, drain_timeout_s=60.0)


class FakeServer:
    """Keeps what arrives; fails as often as it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.bodies: list[bytes] = []
        self.num_calls = 0

    async def __call__(self, request: TelemetrySendRequest) -> None:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        self.bodies.append(requests.encode("telemetry", request).content)

    @property
    def events(self) -> list[dict]:
        return [event for body in self.bodies for event in orjson.loads(body)["events"]]

    async def received(self, num: int) -> list[dict]:
        await soon(lambda: len(self.events) >= num, lambda: f"{len(self.events)} of {num} came")
        return self.events


def connection_error() -> Exception:
    return APIConnectionError()


def status(cls, code: int) -> Exception:
    return cls(f"{code}", status_code=code)


async def test_a_batch_has_the_shape_of_the_contract():
    """Contract 10: our own strict type reads it, indices count from 0."""
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    reporter.log("mine", {"a": 1}, severity="warning")
    await reporter.flush()
    batch = TelemetrySendRequest.model_validate(orjson.loads(server.bodies[0]))
    assert [e.event for e in batch.events] == ["SESSION_START", "GENERIC_EVENT"]
    assert [e.event_session_index for e in batch.events] == [0, 1]
    assert batch.events[1].severity == "WARNING"
    assert batch.session_id == "s-1"
    assert batch.process_uuid == telemetry.process_uuid()


async def test_events_leave_in_batches_and_none_twice():
    server = FakeServer()
    reporter = Reporter(server, "s-1", ReporterConfig(max_batch=10))
    for number in range(34):
        reporter.log("n", {"n": number})
    await asyncio.gather(reporter.flush(), reporter.flush())
    assert [len(orjson.loads(b)["events"]) for b in server.bodies] == [10, 10, 10, 5]
    assert [e["event_session_index"] for e in server.events] == list(range(35))


async def test_the_interval_flushes_and_an_exception_flushes_at_once():
    server = FakeServer()
    reporter = Reporter(server, "s-1", ReporterConfig(interval_s=30.0))
    reporter.start()
    reporter.log("waits")
    await asyncio.sleep(0.02)
    assert server.num_calls == 0
    reporter.log_exception(RuntimeError("boom"))
    assert len(await server.received(3)) == 3
    await reporter.drain()
    quick = FakeServer()
    reporter = Reporter(quick, "s-1", FAST)
    reporter.start()
    reporter.log("soon")
    await quick.received(2)
    await reporter.drain()


async def test_a_full_batch_does_not_wait_for_the_interval():
    server = FakeServer()
    reporter = Reporter(server, "s-1", ReporterConfig(interval_s=30.0, max_batch=5))
    reporter.start()
    for _ in range(4):
        reporter.log("n")
    await server.received(5)
    await reporter.drain()


async def test_a_failing_endpoint_is_tried_again_and_nothing_is_lost():
    server = FakeServer(connection_error(), status(InternalServerError, 503), connection_error())
    reporter = Reporter(server, "s-1", FAST)
    reporter.start()
    reporter.log("kept")
    found = await server.received(2)
    assert [e["event_session_index"] for e in found] == [0, 1]
    await reporter.drain()


async def test_a_text_that_no_json_holds_does_not_block_those_behind_it():
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    reporter.log("mine\ud800", {"a\ud800": "b\x00c\udfff"})
    reporter.log("next", {"a": 1})
    assert await reporter.flush()
    told = [event["event_data"] for event in server.events if event["event"] == "GENERIC_EVENT"]
    assert told == [{"a?": "b?c?"}, {"a": 1}]


async def test_a_server_without_the_endpoint_is_left_alone():
    server = FakeServer(*[status(NotFoundError, 404)] * 50)
    reporter = Reporter(server, "s-1", FAST)
    reporter.start()
    await soon(lambda: server.num_calls)
    await asyncio.sleep(0.2)  # ten times the interval
    assert server.num_calls == 1
    assert reporter.log("later") is False
    await reporter.drain()


async def test_closing_does_not_hang_on_a_dead_endpoint():
    async def never(request: TelemetrySendRequest) -> None:
        await asyncio.sleep(3600)

    reporter = Reporter(never, "s-1", ReporterConfig(drain_timeout_s=0.05))
    reporter.start()
    await asyncio.wait_for(reporter.drain(), 60)


async def test_a_full_queue_drops_and_says_how_many():
    server = FakeServer()
    reporter = Reporter(server, "s-1", ReporterConfig(max_queue=3))
    assert [reporter.log("n") for _ in range(5)] == [True, True, False, False, False]
    await reporter.flush()
    assert server.events[-1]["event_name"] == "telemetry.dropped"
    assert server.events[-1]["event_data"] == {"num_events": 3}


async def test_an_event_that_could_never_be_sent_is_dropped_and_the_others_go_on():
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    assert not reporter.log("n" * 2000)
    assert reporter.log("short")
    assert await reporter.flush()
    assert [event.get("event_name") for event in server.events][1] == "short"
    assert server.events[-1]["event_data"] == {"num_events": 1}


async def test_many_threads_get_one_index_each():
    reporter = Reporter(FakeServer(), "s-1", ReporterConfig())
    threads = [
        threading.Thread(target=lambda: [reporter.log("n") for _ in range(200)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.event_session_index for e in reporter._queue] == list(range(1601))


def failing_inside(prompt: str) -> None:
    key = SECRET
    raise KeyError(f"{prompt} {key}")


async def test_no_credential_no_prompt_no_source_leaves_the_process():
    """R19: whatever an exception or a field holds."""
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    try:
        failing_inside("my private prompt")
    except KeyError as exc:
        reporter.log_exception(exc)
    reporter.log_exception(APIConnectionError(f"could not reach host with {SECRET}"))
    reporter.log(
        "x", {"api_key": SECRET, "note": f"Bearer {SECRET}", "prompt": "my private prompt"}
    )
    reporter.log_exception(BadRequestError(f"my private prompt {SECRET}", status_code=400))
    await reporter.flush()
    text = b"".join(server.bodies).decode()
    assert "super" not in text
    assert "private" not in text
    assert "test_telemetry.py" in text  # where it happened is told
    assert "in failing_inside" in text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestFailedError("x", "r", "user"), "GENERIC_EVENT"),
        (RequestFailedError("x", "r", "server"), "UNHANDLED_EXCEPTION"),
        (status(BadRequestError, 400), "GENERIC_EVENT"),
        (status(InternalServerError, 500), "UNHANDLED_EXCEPTION"),
        (ZeroDivisionError(), "UNHANDLED_EXCEPTION"),
    ],
)
async def test_errors_of_the_user_are_warnings_and_others_are_errors(error, kind):
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    reporter.log_exception(error)
    await reporter.flush()
    assert server.events[-1]["event"] == kind
    assert server.events[-1]["severity"] == ("WARNING" if kind == "GENERIC_EVENT" else "ERROR")


async def test_a_user_error_is_found_behind_what_it_caused():
    error = RuntimeError("wrapped")
    error.__cause__ = status(BadRequestError, 422)
    assert telemetry.is_user_error(error) is error.__cause__
    error.__cause__ = error  # a circle must not hang
    assert telemetry.is_user_error(error) is None


async def test_a_fatal_exception_ends_the_session():
    server = FakeServer()
    reporter = Reporter(server, "s-1", FAST)
    await reporter.log_fatal_exception(RuntimeError("x"))
    assert [e["event"] for e in server.events] == [
        "SESSION_START",
        "UNHANDLED_EXCEPTION",
        "SESSION_END",
    ]
    assert server.events[1]["severity"] == "CRITICAL"


async def test_without_a_session_there_are_no_session_events():
    server = FakeServer()
    reporter = Reporter(server, None, FAST)
    await reporter.log_fatal_exception(RuntimeError("x"))
    assert [e["event"] for e in server.events] == ["UNHANDLED_EXCEPTION"]
    assert orjson.loads(server.bodies[0])["session_id"].startswith("sessionless-")


async def test_failures_on_the_bus_are_reported_by_the_session_they_belong_to():
    mine, other = FakeServer(), FakeServer()
    reporters = [Reporter(mine, "s-1", FAST), Reporter(other, "s-2", FAST)]
    for reporter in reporters:
        reporter.start()
    with pytest.raises(ZeroDivisionError), events.span("training", model_id="s-1:train:0"):
        raise ZeroDivisionError
    with pytest.raises(asyncio.CancelledError), events.span("training", model_id="s-1:train:0"):
        raise asyncio.CancelledError
    await mine.received(2)
    for reporter in reporters:
        await reporter.drain()
    assert [e.get("event_name") for e in mine.events] == [None, "training.exception"]
    assert [e["event"] for e in other.events] == ["SESSION_START"]


@pytest.mark.parametrize(
    ("env", "url", "on"),
    [
        ({}, "https://example.com", True),
        ({}, "http://127.0.0.1:8000", False),
        ({}, "local", False),
        ({"TINKER_TELEMETRY": "0"}, "https://example.com", False),
        ({"TINKEX_TELEMETRY": "0"}, "https://example.com", False),
        ({"TINKER_TELEMETRY": "1", "TINKEX_TELEMETRY": "0"}, "https://example.com", False),
        ({"TINKEX_TELEMETRY": "1"}, "http://127.0.0.1:8000", True),
    ],
)
def test_it_is_off_when_asked_and_off_by_default_against_a_local_server(env, url, on):
    """R19."""
    config = ClientConfig.from_env(base_url=url, api_key="tml-x", env=env)
    assert config.telemetry is on


def test_a_real_server_takes_the_reports(toy_server):
    """R19: asked for, a local server gets them too, and counts them."""
    config = ClientConfig.from_env(base_url=toy_server, env={"TINKEX_TELEMETRY": "1"})
    with ServiceClient(config=config) as service:
        model = service.get_server_capabilities().supported_models[0].model_name
        service.create_lora_training_client(model, rank=4)
        reporter = service.get_telemetry()
        assert reporter.log("experiment.started", {"rank": 4})
        assert not reporter.session_id.startswith("sessionless-")
    assert not reporter._queue  # closing sent all of it
    assert reporter._task.done()


def test_without_telemetry_there_is_no_reporter(toy_server):
    with ServiceClient(config=ClientConfig.from_env(base_url=toy_server, env={})) as service:
        service.get_server_capabilities()
        assert service.get_telemetry() is None
