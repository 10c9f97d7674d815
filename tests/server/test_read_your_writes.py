"""Who was told of an end finds it in bills and in the audit log; no first request is a long one."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fastapi.routing
import pytest
from app_world import AppWorld, open_app
from jinja2 import Environment

from tinkex.server import openapi
from tinkex.server.console import shell
from tinkex.store import Store

TOKENS = [1, 2, 3, 4]
KEY = "tml-ann"
HEADERS = {"x-api-key": "tml-test"}


async def test_a_bill_has_what_was_told_a_moment_ago(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=(f"{KEY}=ann",)) as world:
        model = await world.model(key=KEY)
        world.service.ends._delay_s = 1000.0  # nothing else takes the end to the journal
        await world.result((await world.train(model, 1, TOKENS, key=KEY)).json(), key=KEY)
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        window = {
            "starting_on": (hour - timedelta(hours=1)).isoformat(),
            "ending_before": (hour + timedelta(hours=2)).isoformat(),
        }
        bill = await world.call("GET", "/billing/usage/events", 200, key=KEY, params=window)
    told = [event["event_info"] for event in bill["data"]]
    assert sum(info.get("token_count", 0) for info in told) == len(TOKENS)


def test_an_entry_of_the_audit_log_is_there_for_whoever_looks_next(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path)
    try:
        store._writer.submit(lambda connection: time.sleep(0.5))  # others are written before it
        store.audit.record("ann", "key_added", {})
        assert [entry.event for entry in store.audit.page(9, 0)] == ["key_added"]
        store._writer.submit(lambda connection: time.sleep(0.5))
        store.audit.record("ann", "key_revoked", {})
        found = store.audit.entries("ann", prefixes=None, start=0.0, end=1e12)
        assert [entry.event for entry in found] == ["key_added", "key_revoked"]
    finally:
        store.close()


async def test_what_handlers_declare_is_read_before_the_first_request(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI does it once for each router, and everybody's heartbeats would wait for it."""
    read = []
    get_dependant = fastapi.routing.get_dependant

    def noted(*args: Any, **kwargs: Any) -> Any:
        read.append(kwargs.get("path"))
        return get_dependant(*args, **kwargs)

    monkeypatch.setattr(fastapi.routing, "get_dependant", noted)
    for path in ("/api/v1/healthz", "/tinkex/v1/budgets", "/console/login", "/v1/models", "/none"):
        await app_world.http.get(path)
    assert read == []


async def test_pages_are_compiled_off_the_event_loop(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    compiled = Environment.compile

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return compiled(*args)

    monkeypatch.setattr(Environment, "compile", noted)
    monkeypatch.setattr(shell._templates, "cache", {})
    shell._compile_templates.cache_clear()
    for path in ("/console/login", "/console"):
        await app_world.http.get(path)
    assert len(threads) == len(shell._templates.list_templates())
    assert threading.current_thread() not in threads


async def test_the_openapi_document_is_made_once_and_off_the_event_loop(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    describe = openapi._describe

    def noted(*args: Any) -> None:
        threads.append(threading.current_thread())
        describe(*args)

    monkeypatch.setattr(openapi, "_describe", noted)
    asked = (app_world.http.get("/openapi.json", headers=HEADERS) for _ in range(3))
    answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(threads) == len(openapi.ENDPOINTS)
    assert threading.current_thread() not in threads
