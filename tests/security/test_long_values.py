"""Whatever a key holder makes long, deep or many is refused quickly, with a short answer."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import zstandard
from app_world import AppWorld
from wire_client import model_body, save_body

SAMPLE = {
    "base_model": "toy",
    "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "sampling_params": {"max_tokens": 1},
}
SESSION = {"tags": [], "sdk_version": "1"}
LONG = "x" * 900_000


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


LONG_BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name": ("create_session", SESSION | {"display_name": LONG}, "display_name"),
    "a project": ("create_session", SESSION | {"project_id": LONG}, "project_id"),
    "a tag": ("create_session", SESSION | {"tags": [LONG]}, "tags[0]"),
    "many tags": ("create_session", SESSION | {"tags": ["x"] * 10_000}, "tags"),
    "metadata": (
        "create_session",
        SESSION | {"user_metadata": {"a": ["x"] * 30_000}},
        "user_metadata",
    ),
    "deep metadata": ("create_session", SESSION | {"user_metadata": deep(200)}, "user_metadata"),
    "NUL": ("create_session", SESSION | {"display_name": "a\x00b"}, "display_name"),
    "NUL in metadata": (
        "create_session",
        SESSION | {"user_metadata": {"a": [{"b": "\x00"}]}},
        "user_metadata",
    ),
    "NUL in a key": ("create_session", SESSION | {"user_metadata": {"\x00": 1}}, "user_metadata"),
    "an id": ("session_heartbeat", {"session_id": LONG}, "session_id"),
    "a request id": ("retrieve_future", {"request_id": LONG}, "request_id"),
    "a base model": ("asample", SAMPLE | {"base_model": LONG}, "base_model"),
    "stop texts": (
        "asample",
        SAMPLE | {"sampling_params": {"stop": ["x"] * 490_000}},
        "sampling_params.stop",
    ),
    "a stop text": (
        "asample",
        SAMPLE | {"sampling_params": {"stop": LONG}},
        "sampling_params.stop",
    ),
    "stop tokens": (
        "asample",
        SAMPLE | {"sampling_params": {"stop": [1] * 490_000}},
        "sampling_params.stop",
    ),
    "samples": ("asample", SAMPLE | {"num_samples": 10**6}, "num_samples"),
    "search words": (
        "sessions/search",
        {"user_metadata": {str(n): "" for n in range(30_000)}},
        "user_metadata",
    ),
    "searched projects": ("sessions/search", {"project_ids": ["p"] * 30_000}, "project_ids"),
    "events": (
        "telemetry",
        {"events": [{"event": "x"}] * 30_000, "platform": "", "sdk_version": "", "session_id": "s"},
        "events",
    ),
    "a setting of an optimizer": (
        "create_model",
        {"session_id": "s", "base_model": "toy", "optimizer_config": {"type": LONG}},
        "optimizer_config.type",
    ),
    "a traced loss": (
        "create_custom_loss",
        {
            "session_id": "s",
            "custom_loss_seq_id": 0,
            "name": "f",
            "inputs": [],
            "graph": {"nodes": [{"op": "output", "name": "o", "target": "o", "args": [deep(100)]}]},
        },
        "graph.nodes[0].args",
    ),
    "a number": ("optim_step", {"model_id": "m", "seq_id": 2**63, "adam_params": {}}, "seq_id"),
}


@pytest.mark.parametrize("what", LONG_BODIES)
async def test_what_has_no_end_is_refused_by_name(app_world: AppWorld, what: str) -> None:
    route, body, path = LONG_BODIES[what]
    started = time.perf_counter()
    answer = await app_world.post(route, body)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["path"] == path
    assert len(answer.content) < 1000
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize("raw", [b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 100_000])
@pytest.mark.parametrize("route", ["create_session", "asample", "forward", "sessions/search"])
async def test_deep_json_is_refused(app_world: AppWorld, route: str, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert (await app_world.post(route, raw, headers=headers)).status_code == 400


async def test_a_million_events_in_a_few_bytes_cost_nothing(app_world: AppWorld) -> None:
    raw = b'{"events":[' + b"{}," * 1_400_000 + b"{}]}"
    packed = zstandard.compress(raw)
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    started = time.perf_counter()
    answer = await app_world.post("telemetry", packed, headers=headers)
    assert answer.status_code in (400, 413)
    assert time.perf_counter() - started < 60


async def test_a_refused_step_keeps_only_a_short_word_of_it(app_world: AppWorld) -> None:
    """The journal keeps why a number was refused; that text is as short as the answer."""
    model = await app_world.model()
    body = {"model_id": model, "seq_id": 1, "path": LONG, "optimizer": False}
    assert (await app_world.post("load_weights", body)).status_code == 400
    store = app_world.service.store
    row = await store.call(store.journal.find, model, 1)
    assert row is not None
    assert len(row.error or "") < 500
    assert len(await store.call(store.journal.body, row.request_id) or b"") < 500


async def test_the_published_ranges_are_those_that_are_checked(app_world: AppWorld) -> None:
    document = app_world.app.openapi()
    schemas = document["components"]["schemas"]
    post = document["paths"]["/api/v1/asample"]["post"]
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fields["num_samples"]["maximum"] == 4096
    params = schemas["SamplingParams"]["properties"]
    assert params["max_tokens"]["anyOf"][0]["maximum"] == 2**31 - 1
    accepted = SAMPLE | {"num_samples": 4096}
    assert (await app_world.post("asample", accepted)).status_code == 200
    assert (await app_world.post("asample", SAMPLE | {"num_samples": 4097})).status_code == 400
    assert json.dumps(document)


async def test_odd_queries_are_refused(app_world: AppWorld) -> None:
    """Each was a 500, or seconds of everybody's time."""
    key = {"x-api-key": "tml-test"}
    far = {"starting_on": "9999-12-31T00:00:00Z", "ending_before": "9999-12-31T01:00:00Z"}
    for path, query in (
        ("billing/usage/events", far),
        ("audit", {"day": "0000-01-01"}),
        ("training_runs", {"project_id": "a\x00"}),
        ("training_runs", {"limit": "9" * 30}),
        (f"samplers/{'x' * 3000}", {}),
    ):
        answer = await app_world.http.get(f"/api/v1/{path}", params=query, headers=key)
        assert answer.status_code == 400, f"{path}: {answer.text[:300]}"
        assert len(answer.content) < 1000


async def test_a_search_of_many_words_is_refused(app_world: AppWorld) -> None:
    answer = await app_world.post("sessions/search", {"display_name": "a " * 1100})
    assert (answer.status_code, answer.json()["path"]) == (400, "display_name")


async def test_a_graph_that_refers_to_a_list_is_refused(app_world: AppWorld) -> None:
    node = {"op": "output", "name": "o", "target": "output", "args": [{"ref": ["a"]}]}
    body = {
        "session_id": await app_world.session(),
        "custom_loss_seq_id": 0,
        "name": "f",
        "inputs": [],
        "graph": {"nodes": [node]},
    }
    assert (await app_world.post("create_custom_loss", body)).status_code == 400


@pytest.mark.parametrize("kind", ["checkpoint", "session", "tags", "model"])
async def test_what_every_listing_repeats_is_short(app_world: AppWorld, kind: str) -> None:
    """Else a page of a thousand of them would be a gigabyte."""
    many = {f"k{n}": "x" * 1000 for n in range(17)}
    model, session = await app_world.model(), await app_world.session()
    name, body = {
        "checkpoint": ("save_weights", save_body(model, 1, "s") | {"user_metadata": many}),
        "session": ("create_session", SESSION | {"user_metadata": {"a": {"b": [many]}}}),
        "tags": ("create_session", SESSION | {"tags": list(many.values())}),
        "model": ("create_model", model_body(session, number=9) | {"user_metadata": many}),
    }[kind]
    answer = await app_world.post(name, body)
    assert answer.status_code == 400, answer.text
    assert "16384 characters" in answer.json()["detail"]
