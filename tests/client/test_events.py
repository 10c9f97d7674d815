"""The local event bus (R19)."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from tinkex import events


@pytest.fixture
def seen():
    """Everything emitted while the test runs."""
    collected: list[events.Event] = []
    unsubscribe = events.subscribe(collected.append)
    yield collected
    unsubscribe()


def test_a_subscriber_sees_events_until_it_unsubscribes():
    """R19: user code can subscribe."""
    first: list[events.Event] = []
    end = events.subscribe(first.append)
    events.emit("queue.change", state="active")
    end()
    events.emit("queue.change", state="paused")
    assert [(e.name, dict(e.fields)) for e in first] == [("queue.change", {"state": "active"})]


def test_a_failing_handler_reaches_neither_the_caller_nor_other_handlers(seen, caplog):
    def broken(event: events.Event) -> None:
        raise RuntimeError("handler bug")

    end = events.subscribe(broken)
    late: list[events.Event] = []
    end_late = events.subscribe(late.append)
    events.emit("x.y")
    end(), end_late()
    assert [e.name for e in seen] == [e.name for e in late] == ["x.y"]
    assert "event handler failed" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "tml-secret-1234"},
        {"Authorization": "Bearer abc"},
        {"note": "failed with key tml-secret-1234 in it"},
        {"note": "Bearer abcdefgh"},
        {"url": "https://host/x?signature=abc"},
        {"path": "/x?signature=abc"},
        {"prompt": "abc"},
        {"tokens": [1, 2, 3]},
        {"headers": {"x-api-key": "tml-secret-1234"}},
        {"extra": {"api_key": "tml-secret-1234", "deep": {"prompt": "abc"}}},
        {"thing": ["abc"]},
    ],
)
def test_no_credential_and_no_prompt_passes(seen, fields):
    """R19: never a credential, never a prompt, whatever the call site hands over."""
    events.emit("x.y", **fields)
    text = repr(seen[0].fields)
    assert not any(word in text for word in ("secret", "abc", "[1, 2, 3]"))


def test_a_span_tells_start_and_stop_with_duration_and_added_fields(seen):
    with events.span("http.request", path="/api/v1/x") as span:
        span.add(status_code=200)
    start, stop = seen
    assert (start.name, stop.name) == ("http.request.start", "http.request.stop")
    assert start.fields["span_id"] == stop.fields["span_id"]
    assert stop.fields["status_code"] == 200
    assert stop.fields["duration_s"] >= 0


def test_a_span_tells_its_exception_and_lets_it_through(seen):
    with pytest.raises(asyncio.CancelledError), events.span("future.wait"):
        raise asyncio.CancelledError
    assert seen[-1].name == "future.wait.exception"
    assert seen[-1].fields["error_type"] == "CancelledError"


def test_without_a_subscriber_an_event_costs_next_to_nothing():
    def cost(n: int = 20_000) -> float:
        begin = time.thread_time()  # ours alone, however busy the machine is
        for _ in range(n):
            events.emit("x.y", a=1, b="two")
        return (time.thread_time() - begin) / n

    assert min(cost() for _ in range(5)) < 5e-6


def test_a_span_becomes_an_opentelemetry_span():
    """R19: OpenTelemetry can consume it; attributes are redacted like fields."""
    from opentelemetry import trace
    from opentelemetry.sdk import trace as sdk
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with events.span("training.forward_backward", model_id="m", api_key="tml-secret"):
        with events.span("http.request", path="/x"):
            pass
    inner, outer = exporter.get_finished_spans()
    assert (inner.name, outer.name) == ("http.request", "training.forward_backward")
    assert inner.parent.span_id == outer.context.span_id
    assert dict(outer.attributes) == {"tinkex.model_id": "m"}


def test_every_event_of_the_sdk_stands_in_the_list_of_the_module():
    listed = re.findall(r"^    ([a-z.]+\*?) ", events.__doc__, re.M)
    sources = [file.read_text() for file in Path(events.__file__).parent.rglob("*.py")]
    named = {
        name
        for text in sources
        for name in re.findall(r"events\.(?:emit|span)\(\s*\"(.+?)\"", text)
    }
    assert len(named) > 8, "the pattern no longer finds the calls"
    covered = [name.rstrip("*").rstrip(".") for name in listed]
    assert not [name for name in named if not name.startswith(tuple(covered))]
    assert not [name for name in covered if not any(one.startswith(name) for one in named)]
