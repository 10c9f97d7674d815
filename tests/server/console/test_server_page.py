"""The server's page: administrators see all and change it by forms; nobody else gets in."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from app_world import AppWorld, open_app
from sqlalchemy import event, insert
from visits import HOSTILE, token_of

from tinkex.engine.heartbeat import KINDS
from tinkex.server.administration.remembered import Remembered
from tinkex.store import UsageCount, schema

ADMIN, ANN = "tml-admin", "tml-ann"
TOKENS = [1, 2, 3, 4]
FORMS = [
    ("/console/server/keys", {"user_id": "eve"}),
    ("/console/server/keys/revoke", {"key_id": "1"}),
    ("/console/server/users", {"user_id": "ann", "action": "stop"}),
    ("/console/server/quotas", {"user_id": "ann", "name": "models", "limit": "1"}),
    ("/console/server/runs/stop", {"run_id": "x"}),
]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """Ann has trained a step; root has an admin key."""
    async with open_app(tmp_path, api_keys=("tml-ann=ann",)) as world:
        store = world.service.store
        await store.call(store.accounts.ensure_user, "root")
        await store.call(store.accounts.add_key, ADMIN, "root", role="admin")
        model = await world.model(key=ANN)
        await world.result((await world.train(model, 1, TOKENS, key=ANN)).json(), key=ANN)
        await world.result((await world.step(model, 2, key=ANN)).json(), key=ANN)
        world.run_id = model
        yield world


@asynccontextmanager
async def log_in(world: AppWorld, key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(world.app),
        base_url="http://127.0.0.1:1",
        follow_redirects=True,
    ) as client:
        assert (await client.post("/console/login", data={"key": key})).status_code == 200
        yield client


async def form(client: httpx.AsyncClient, path: str, **given: str) -> httpx.Response:
    token = token_of((await client.get("/console")).text)
    return await client.post(path, data={**given, "form_token": token})


async def test_an_ordinary_key_gets_nowhere(world):
    async with log_in(world, ANN) as ann:
        assert "/console/server" not in (await ann.get("/console")).text
        for path in ("/console/server", "/console/api/server", "/console?everyone=true"):
            assert (await ann.get(path)).status_code == 403, path
        for path, given in FORMS:
            assert (await form(ann, path, **given)).status_code == 403, path


async def test_a_change_needs_a_form_of_the_page(world):
    async with log_in(world, ADMIN) as root:
        for path, given in FORMS:
            assert (await root.post(path, data=given)).status_code == 403, path


async def test_the_page_shows_health_users_usage_and_audit(world):
    async with log_in(world, ADMIN) as root:
        world.service.ends.flush()
        world.service.store.flush()
        page = (await root.get("/console/server")).text
        told = (await root.get("/console/api/server")).json()
    assert "healthy" in page
    assert {user["user_id"] for user in told["users"]} >= {"ann", "root"}
    usage = next(one for one in told["usage_by_run"] if one["run_id"] == world.run_id)
    assert usage["user_id"] == "ann"
    assert usage["counts"]["training"] == len(TOKENS)
    assert usage["counts"]["device_seconds"] > 0
    (ann,) = [one for one in told["usage_by_user"] if one["user_id"] == "ann"]
    assert ann["counts"] == usage["counts"]
    assert set(told["workers"][0]["held_bytes"]) == set(KINDS) - {"process"}
    for name in ("KV cache", "Snapshots", world.run_id):
        assert name in page
    assert told["workers"][0]["is_ready"]
    assert any(entry["event"] == "login" for entry in told["audit"])


async def test_a_sample_is_counted_in_tokens_and_seconds_of_device(world):
    sample = {
        "base_model": "toy",
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 5},
        "num_samples": 2,
    }
    promise = (await world.post("asample", sample, key=ANN)).json()
    await world.result(promise, key=ANN)
    async with log_in(world, ADMIN) as root:
        world.service.ends.flush()
        world.service.store.flush()
        told = (await root.get("/console/api/server")).json()
    (used,) = [one["counts"] for one in told["usage_by_run"] if one["run_id"] is None]
    assert 2 <= used["sampling_sample"] <= 10
    assert used["device_seconds"] > 0


async def test_a_key_is_made_shown_once_and_revoked(world):
    async with log_in(world, ADMIN) as root:
        page = (await form(root, "/console/server/keys", user_id="eve", name=HOSTILE)).text
        key = re.search(r'id="new-key">(tml-[\w-]+)<', page)[1]
        assert HOSTILE not in page
        assert key not in (await root.get("/console/server")).text
        async with log_in(world, key) as eve:
            assert (await eve.get("/console/api/runs")).json()["total"] == 0
        told = (await root.get("/console/api/server")).json()
        number = next(one["key_id"] for one in told["keys"] if one["user_id"] == "eve")
        await form(root, "/console/server/keys/revoke", key_id=str(number))
        told = (await root.get("/console/api/server")).json()
        assert [one for one in told["keys"] if one["user_id"] == "eve"] == []
    stranger = httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://l:1")
    assert (await stranger.post("/console/login", data={"key": key})).status_code == 401


async def test_users_are_limited_disabled_and_let_in_again(world):
    async with log_in(world, ADMIN) as root:
        page = await form(root, "/console/server/quotas", user_id="ann", name="models", limit="7")
        assert "models 7" in page.text
        # As people write it for `tinkex serve --quota`.
        page = await form(
            root, "/console/server/quotas", user_id="ann", name="disk_bytes", limit="5M"
        )
        assert "disk_bytes 5,000,000" in page.text
        wrong = await form(root, "/console/server/quotas", user_id="ann", name="models", limit="-")
        assert (wrong.status_code, "at least 0" in wrong.text) == (400, True)
        await form(root, "/console/server/users", user_id="ann", action="disable")
        denied = await world.post("auth/token", {}, key=ANN)
        assert denied.status_code == 403
        await form(root, "/console/server/users", user_id="ann", action="enable")
        assert (await world.post("auth/token", {}, key=ANN)).status_code == 200


async def test_an_administrator_sees_all_runs_and_changes_none_of_them(world):
    async with log_in(world, ADMIN) as root:
        assert (await root.get("/console/api/runs")).json()["total"] == 0
        everyone = (await root.get("/console/api/runs?everyone=true")).json()
        assert [run["owner"] for run in everyone["runs"]] == ["ann"]
        page = await root.get(f"/console/runs/{world.run_id}")
        assert (page.status_code, "user ann" in page.text) == (200, True)
        assert "Timeline (Perfetto)" not in page.text
        for part in ("rollouts", "trace"):
            assert (await root.get(f"/console/runs/{world.run_id}/{part}")).status_code == 404
        tagged = await form(root, "/console/describe", run=world.run_id, tags="mine")
        assert tagged.status_code == 404


async def test_slow_requests_are_shown_and_polls_are_not_among_them(world):
    metrics = world.parts.metrics
    metrics.observe("/api/v1/retrieve_future", 200, 30.0, "ann")
    metrics.observe("/api/v1/save_weights", 200, 0.5, "ann")
    for number in range(50):
        metrics.observe("/api/v1/create_model", 200, 2.0 + number, HOSTILE)
    async with log_in(world, ADMIN) as root:
        slow = (await root.get("/console/api/server?brief=true")).json()["slow"]
        assert [one["seconds"] for one in slow] == [51.0 - number for number in range(20)]
        assert {one["route"] for one in slow} == {"/api/v1/create_model"}
        assert HOSTILE not in (await root.get("/console/server")).text


async def test_the_number_of_questions_does_not_grow_with_users_runs_and_rows(world, monkeypatch):
    """Nor does what is shown: pages have a bound, and sums over many rows are told again."""
    store, asked = world.service.store, []
    monkeypatch.setattr("tinkex.server.console.server_page.MAX_USERS", 10)
    monkeypatch.setattr("tinkex.server.console.server_page.MAX_KEYS", 10)

    def note(connection, cursor, statement, *_):
        asked.append(statement)

    event.listen(store._database.reader, "before_cursor_execute", note)
    administration = world.parts.administration

    def forget_sums() -> None:
        administration._usage, administration._throughput = Remembered(60), Remembered(60)

    async with log_in(world, ADMIN) as root:

        async def cost(path: str) -> int:
            forget_sums()
            await root.get(path)  # whoever looks is known from now on
            forget_sums()
            asked.clear()
            assert (await root.get(path)).status_code == 200
            # Housekeeping asks too, now and then.
            return sum(not any(name in one for name in ("journal", "folder")) for one in asked)

        few = await cost("/console/server")
        now = time.time()
        await store.call(_fill, store, now)
        many = await cost("/console/server")
        assert many <= few + 3, asked  # a page of users, their keys, and a look at a clock
        assert many <= 40
        page = (await root.get("/console/server")).text
        assert page.count("/console/server/users") <= 2 * 10
        asked.clear()
        told = (await root.get("/console/api/server")).json()
        assert not any("FROM usage" in one for one in asked), "told again for a while"
        assert (told["num_users"], len(told["users"]), told["users_pages"]) == (102, 10, 11)
        assert len(told["usage_by_key"]) == 50
        assert told["usage_by_key"][0]["key_name"]
        assert told["num_keys"] > len(told["keys"]) == 10
        last = (await root.get("/console/api/server?users=10")).json()
        assert len(last["users"]) == 2
        found = (await root.get("/console/api/server?find=ER099")).json()
        assert [one["user_id"] for one in found["users"]] == ["user099"]
        assert {one["user_id"] for one in found["keys"]} == {"user099"}
        for path in ("/console?everyone=true", "/console/api/runs?everyone=true"):
            assert await cost(path) <= 15
        plans = []
        for statement in [one for one in asked if "FROM models" in one and "LIMIT" in one]:
            with store._database.reader.connect() as connection:
                rows = connection.exec_driver_sql(
                    f"EXPLAIN QUERY PLAN {statement}", (50, 0)[: statement.count("?")]
                )
                plans += [row[-1] for row in rows]
        assert plans
        assert all("INDEX" in line for line in plans if line.startswith("SCAN")), plans


def _fill(store, now: float) -> None:
    """A hundred users with two keys, ten runs, and usage of each."""
    users = [f"user{number:03}" for number in range(100)]
    with store._database.writer.begin() as connection:
        connection.execute(
            insert(schema.users),
            [{"user_id": name, "name": name, "email": "", "created_at": now} for name in users],
        )
        keys = [
            {
                "key_hash": f"{name}-{n}",
                "user_id": name,
                "name": f"key {n}",
                "note": "",
                "created_at": now,
            }
            for name in users
            for n in range(2)
        ]
        connection.execute(insert(schema.api_keys), keys)
        runs = [
            {
                "model_id": f"{name}-{n}:train:0",
                "session_id": f"{name}-{n}",
                "user_id": name,
                "model_seq_id": 0,
                "base_model": "toy",
                "lora": {},
                "optimizer_config": {},
                "created_at": now - n,
                "last_request_time": now,
                "corrupted": False,
                "unloaded": False,
            }
            for name in users
            for n in range(10)
        ]
        connection.execute(insert(schema.models), runs)
    store.usage.add(
        UsageCount(
            kind=kind, count=1.0 + n, user_id=name, key_id=2 + n % 200, model_id=f"{name}-{n}"
        )
        for n, name in enumerate(users)
        for kind in ("training", "device_seconds")
    )
    store.flush()
