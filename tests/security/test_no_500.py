"""What a review answered with 500 is the caller's mistake, and said so."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from app_world import AppWorld, open_app

from tinkex.store.claim import Fence

JSON = {"content-type": "application/json"}
KEY = {"x-api-key": "tml-test"}


def deep(depth: int) -> object:
    """What can be read and is too deep to be written."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_the_same_create_model_at_once_makes_one(app_world: AppWorld) -> None:
    body = {"session_id": await app_world.session(), "model_seq_id": 7, "base_model": "toy"}
    answers = await asyncio.gather(*(app_world.post("create_model", body) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["request_id"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("create_custom_loss", {"inputs": [], "graph": {"ref": ["a"]}, "custom_loss_seq_id": 1}),
        ("sessions/search", {"display_name": " ".join(f"w{n}" for n in range(1100))}),
        ("sessions/search", {"display_name": "a\x00"}),
        ("create_session", {"tags": ["a\x00b"], "sdk_version": "x"}),
        ("optim_step", {"seq_id": 2**63 - 1, "adam_params": {"learning_rate": 0.1}}),
        ("create_model", {"base_model": "toy", "optimizer_config": {"type": "none"}}),
        ("create_model", {"base_model": "toy", "lora_config": {"rank": 4, "alpha": "x"}}),
        ("sessions/search", b"[" * 100_000 + b"]" * 100_000),
        ("optim_step", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        ("save_weights", {"seq_id": 1, "path": "a", "user_metadata": deep(300)}),
        ("optim_step", {"seq_id": 1, "adam_params": deep(300)}),
        ("create_model", {"base_model": "toy", "user_metadata": deep(300)}),
        ("load_weights", {"seq_id": 1, "path": deep(300)}),
    ],
)
async def test_a_wrong_body_is_a_400(app_world: AppWorld, path: str, fields: object) -> None:
    session = await app_world.session()
    if isinstance(fields, dict):
        model = await app_world.model(session)
        fields = {"session_id": session, "model_id": model, "model_seq_id": 3, **fields}
    answer = await app_world.post(path, fields, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["category"] == "user"


async def test_a_server_whose_database_another_took_over_says_so(app_world: AppWorld) -> None:
    """503, so that a client asks again, where the other one answers."""
    session, store = await app_world.session(), app_world.service.store
    store._writer.fence = Fence(store._database.writer)
    Fence(store._database.writer)  # another server's
    for path, body in (
        ("create_session", {"tags": [], "sdk_version": "x"}),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "toy"}),
    ):
        answer = await app_world.post(path, body)
        assert (answer.status_code, answer.json()["code"]) == (503, "fenced"), answer.text
        assert answer.headers["retry-after"]
    store._writer.fence = None


async def test_a_time_that_no_calendar_has_is_a_400(app_world: AppWorld) -> None:
    asked = {"starting_on": "9999-12-31T00:00:00Z", "ending_before": "9999-12-31T01:00:00Z"}
    answer = await app_world.http.get("/api/v1/billing/usage/events", params=asked, headers=KEY)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "path", ["/api/v1/asample", "/api/v1/sessions/search", "/v1/chat/completions"]
)
async def test_who_hangs_up_in_a_body_is_no_failure_of_the_server(
    app_world: AppWorld, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Else one key fills the log with tracebacks, and the dashboards with failures."""
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    told: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    await app_world.app(
        {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        },
        receive,
        send,
    )
    assert told[0]["status"] == 499
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_every_answer_has_a_request_id_and_the_log_has_it_too(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex.access")
    async with open_app(tmp_path, api_keys=("tml-ann=ann",), access_log=True) as world:
        body = {"tags": [], "sdk_version": "x"}
        answer = await world.post("create_session", body, key="tml-ann")
        named = await world.post("nowhere", key="tml-ann", headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    (line,) = [r.getMessage() for r in caplog.records if "create_session" in r.getMessage()]
    assert answer.headers["x-request-id"] in line
    assert '"user":"ann"' in line
    assert "tml-ann" not in caplog.text
