"""What is written down goes after its time, and what is logged names its request."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
from app_world import open_app

from tinkex.server.files.sweeper import Sweeper
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.logs import JsonLines, TextLines, answering
from tinkex.server.serve import open_store
from tinkex.store import Ended, NewRow, Store

DAY_S = 86_400.0


async def test_sessions_without_a_run_go_and_those_with_one_stay(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        idle, used = await world.session(), await world.session()
        await world.model(used)
        asked = {"session_id": idle, "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler = (await world.ok("create_sampling_session", asked))["sampling_session_id"]
        store = world.service.store
        store.flush()
        config = ServerConfig(session_ttl_s=30 * DAY_S)
        sweeper = Sweeper(store, world.service.shelf, config)
        await sweeper.sweep(time.time() + 29 * DAY_S)
        assert store.sessions.get(idle) is not None
        await sweeper.sweep(time.time() + 31 * DAY_S)
        assert store.sessions.get(idle) is None
        assert store.sampling.get(sampler) is None
        assert store.sessions.get(used) is not None


def test_the_journal_forgets_when_it_was_told_to(tmp_path: Path) -> None:
    config = ServerConfig(engine="toy", data_dir=tmp_path, journal_ttl_s=3 * DAY_S)
    store = open_store(config)
    row = NewRow(model_id="m", seq_id=1, kind="x", request_id="m:1", user_id="ann", body=b"b")
    store.journal.append(row).result()
    store.journal.note([Ended(request_id="m:1", result=b"done", finished_at=time.time())]).result()
    store.journal.release_bodies("m", 1).result()
    store.journal.sweep(time.time() + 2 * DAY_S)
    assert store.journal.find("m", 1) is not None
    store.journal.sweep(time.time() + 4 * DAY_S)
    assert store.journal.find("m", 1) is None
    store.close()


def test_a_line_names_its_request() -> None:
    record = logging.LogRecord("tinkex.x", logging.WARNING, "f", 1, "no %s", ("room",), None)
    assert "no room" in TextLines().format(record)
    token = answering.set("abc-1")
    try:
        assert TextLines().format(record).endswith("tinkex.x: no room [abc-1]")
        line = json.loads(JsonLines().format(record))
    finally:
        answering.reset(token)
    assert (line["message"], line["level"], line["request_id"]) == ("no room", "warning", "abc-1")
    assert "request_id" not in json.loads(JsonLines().format(record))


async def test_what_a_request_logs_carries_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(TextLines().format(record))  # type: ignore[method-assign]
    logging.getLogger("tinkex.server.process.problems").addHandler(handler)
    async with open_app(tmp_path) as world:

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Store, "call", fail)
        headers = {"x-request-id": "mine-7"}
        answer = await world.post("get_info", {"model_id": "x"}, headers=headers)
        monkeypatch.undo()
    logging.getLogger("tinkex.server.process.problems").removeHandler(handler)
    assert answer.status_code == 500
    assert any("[mine-7]" in line for line in lines)
