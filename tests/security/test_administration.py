"""An admin key sees and stops what others do; an ordinary key does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_world import AppWorld, open_app
from wire_client import loss_of

from tinkex.server import app
from tinkex.server.rest import administration
from tinkex.wire.endpoints import ENDPOINTS

ADMIN, BOB, ANN = "tml-admin", "tml-bob", "tml-ann"
TOKENS = [1, 2, 3, 4]
ROWS = [row for row in ENDPOINTS.values() if row.path.startswith("/tinkex/v1/admin")]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with _open(tmp_path) as world:
        yield world


def _open(folder: Path, **settings: Any) -> Any:
    return open_app(folder, api_keys=("tml-ann=ann", "tml-bob=bob"), **settings)


async def _make_admin(world: AppWorld) -> None:
    store = world.service.store
    await store.call(store.accounts.ensure_user, "root")
    await store.call(store.accounts.add_key, ADMIN, "root", role="admin")


async def _call(
    world: AppWorld, method: str, path: str, body: Any = None, key: str = ADMIN
) -> httpx.Response:
    headers = {"x-api-key": key}
    return await world.http.request(method, f"/tinkex/v1/admin/{path}", json=body, headers=headers)


async def _audit(world: AppWorld, **params: Any) -> list[dict[str, Any]]:
    world.service.store.flush()
    headers = {"x-api-key": ADMIN}
    found = await world.http.get("/tinkex/v1/admin/audit", params=params, headers=headers)
    entries: list[dict[str, Any]] = found.json()["entries"]
    return entries


async def test_usage_is_told_by_key_and_by_run(tmp_path: Path) -> None:
    """Ann has two keys and a run; each key is told by its number, and what waits keeps its key."""
    keys = ("tml-ann=ann", "tml-two=ann", "tml-bob=bob")
    sample = {
        "base_model": "toy",
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 5},
    }
    async with open_app(tmp_path, api_keys=keys) as world:
        await _make_admin(world)
        model = await world.model(key=ANN)
        await world.result((await world.train(model, 1, TOKENS, key=ANN)).json(), key=ANN)
        await world.result((await world.train(model, 2, TOKENS, key="tml-two")).json(), key=ANN)
        token = (await world.post("auth/token", {}, key="tml-two")).json()["jwt"]
        await world.result((await world.post("asample", sample, key=token)).json(), key=ANN)
        world.service.ends.flush()
        store = world.service.store
        store.flush()
        numbers = [
            (await store.call(store.accounts.find_key, key)).key_id
            for key in ("tml-ann", "tml-two")
        ]
        by_key = (await _call(world, "GET", "usage?by=key")).json()["usage"]
        by_run = (await _call(world, "GET", "usage?by=run")).json()["usage"]
    told = {one["key_id"]: one for one in by_key if one["user_id"] == "ann"}
    assert set(told) == set(numbers)
    first, second = (told[number] for number in numbers)
    assert first["counts"]["training"] == second["counts"]["training"] == len(TOKENS)
    assert "sampling_sample" not in first["counts"]
    assert second["counts"]["sampling_sample"] > 0
    assert min(one["counts"]["device_seconds"] for one in (first, second)) > 0
    assert second["key_name"] == "key of ann"
    assert "tml-" not in str(by_key)
    (run,) = [one for one in by_run if one.get("run_id") == model]
    assert run["counts"]["training"] == 2 * len(TOKENS)


async def test_a_request_that_a_restart_finishes_counts_for_the_key_it_came_with(
    tmp_path: Path,
) -> None:
    async with _open(tmp_path, gap_limit_s=1000.0) as world:
        model = await world.model(key=ANN)
        # The number before it is missing, so it waits in the journal.
        assert (await world.train(model, 2, TOKENS, key=ANN)).status_code == 200
    async with _open(tmp_path) as world:
        await world.result((await world.train(model, 1, TOKENS, key=ANN)).json(), key=ANN)
        promise = (await world.train(model, 2, TOKENS, key=ANN)).json()
        assert loss_of(await world.result(promise, key=ANN)) > 0
        world.service.ends.flush()
        store = world.service.store
        store.flush()
        number = (await store.call(store.accounts.find_key, ANN)).key_id
        used = await store.call(store.usage.used, "key", 0.0, 10)
    assert [(one.key_id, one.counts["training"]) for one in used] == [(number, 2 * len(TOKENS))]


async def test_every_call_asks_for_an_admin_key(world: AppWorld) -> None:
    for row in ROWS:
        path = row.path.removeprefix("/tinkex/v1/admin/").replace("{key_id}", "1")
        for name in ("user_id", "session_id", "run_id"):
            path = path.replace(f"{{{name}}}", "ann")
        answer = await _call(world, row.method, path, {}, key=ANN)
        assert answer.status_code == 403, row.name
        assert "tinkex keys add" in answer.json()["detail"]
        assert (await _call(world, row.method, path, {}, key="tml-nobody")).status_code == 401


async def test_a_token_of_an_admin_key_is_an_admins_too(world: AppWorld) -> None:
    await _make_admin(world)
    for key, status in ((ADMIN, 200), (ANN, 403)):
        token = (await world.post("auth/token", {}, key=key)).json()["jwt"]
        assert (await _call(world, "GET", "users", key=token)).status_code == status


async def test_an_admin_sees_who_holds_what(world: AppWorld) -> None:
    await _make_admin(world)
    model = await world.model(key=BOB)
    users = (await _call(world, "GET", "users")).json()["users"]
    bob = next(user for user in users if user["user_id"] == "bob")
    assert (bob["num_sessions"], bob["num_models"], bob["is_admin"]) == (1, 1, False)
    assert next(user for user in users if user["user_id"] == "root")["is_admin"]
    runs = (await _call(world, "GET", "runs?user_id=bob")).json()["runs"]
    assert [run["run_id"] for run in runs] == [model]
    sessions = (await _call(world, "GET", "sessions")).json()["sessions"]
    assert [session["user_id"] for session in sessions] == ["bob"]


async def _train(world: AppWorld, model: str, seq_id: int) -> httpx.Response:
    """Other tokens each time: a step after them tells which were gathered."""
    return await world.train(model, seq_id, [seq_id, 2, 3, seq_id + 1], key=BOB)


async def _trained(world: AppWorld, model: str, seq_id: int) -> float:
    """The loss after a step."""
    await world.result((await world.step(model, seq_id, key=BOB)).json(), key=BOB)
    promise = (await world.train(model, seq_id + 1, TOKENS, key=BOB)).json()
    return loss_of(await world.result(promise, key=BOB))


async def test_a_stopped_run_fails_what_waits_undoes_what_ran_and_goes_on(tmp_path: Path) -> None:
    async with _open(tmp_path, engine="toy:latency_s=0.6") as world:
        await _make_admin(world)
        model = await world.model(key=BOB)
        sent = [(await _train(world, model, n)).json() for n in range(1, 12)]
        stopped = await _call(world, "POST", f"runs/{model}/stop", {"reason": "too long"})
        told = [await world.result(promise, key=BOB) for promise in sent]
        failed = [text for text in told if isinstance(text, dict)]
        assert 1 <= len(failed) <= stopped.json()["num_ended"]
        assert "ended by an administrator (root): too long" in failed[-1]["error"]
        other, num_ran = await world.model(key=BOB), len(told) - len(failed)
        for n in range(1, num_ran + 1):
            await world.result((await _train(world, other, n)).json(), key=BOB)
        expected = await _trained(world, other, num_ran + 1)
        assert await _trained(world, model, 12) == expected
        (line,) = await _audit(world, user_id="bob", event="run_stopped")
        assert (line["details"]["by"], line["details"]["reason"]) == ("root", "too long")


async def test_a_stopped_session_takes_nothing_more(tmp_path: Path) -> None:
    async with _open(tmp_path, engine="toy:token_latency_s=1") as world:
        await _make_admin(world)
        session = await world.session(key=BOB)
        model = await world.model(session, key=BOB)
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler = await world.ok("create_sampling_session", asked, key=BOB)
        sample = {
            "sampling_session_id": sampler["sampling_session_id"],
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 64},
            "num_samples": 1,
        }
        promise = await world.ok("asample", sample | {"seq_id": 1}, key=BOB)
        ended = await _call(world, "POST", f"sessions/{session}/stop", {"reason": "maintenance"})
        assert ended.json()["num_ended"] == 1
        told = await world.result(promise, key=BOB)
        assert isinstance(told, dict)
        assert "maintenance" in told["error"]
        for answer in (
            await world.train(model, 1, TOKENS, key=BOB),
            await world.post("asample", sample | {"seq_id": 2}, key=BOB),
            await world.post("session_heartbeat", {"session_id": session}, key=BOB),
            await world.post("create_model", asked | {"model_seq_id": 9}, key=BOB),
        ):
            assert answer.status_code == 410
            assert "maintenance" in answer.json()["detail"]
        assert (await world.train(await world.model(key=BOB), 1, TOKENS, key=BOB)).is_success


async def test_a_disabled_user_is_refused_everywhere_until_enabled(tmp_path: Path) -> None:
    async with _open(tmp_path, engine="toy:latency_s=1") as world:
        await _make_admin(world)
        model = await world.model(key=BOB)
        token = (await world.post("auth/token", {}, key=BOB)).json()["jwt"]
        waiting = (await world.train(model, 1, TOKENS, key=BOB)).json()
        answer = await _call(world, "POST", "users/bob/disable", {"reason": "unpaid"})
        assert answer.json() == {"num_ended": 1}
        for key in (BOB, token):
            refused = await world.post("get_info", {"model_id": model}, key=key)
            assert (refused.status_code, refused.json()["code"]) == (403, "user_disabled")
        assert (await world.post("create_session", {}, key=ANN)).status_code != 403
        assert (await _call(world, "POST", "users/bob/enable")).status_code == 204
        assert "unpaid" in (await world.result(waiting, key=BOB))["error"]
        assert (await world.train(model, 2, TOKENS, key=BOB)).is_success
        events = [line["event"] for line in await _audit(world, user_id="bob", event="user_")]
        assert events == ["user_enabled", "user_disabled"]


async def test_an_admin_does_not_lock_themself_out(world: AppWorld) -> None:
    await _make_admin(world)
    assert (await _call(world, "POST", "users/root/disable", {})).status_code == 400


async def test_keys_are_made_and_revoked_with_a_line_each(world: AppWorld) -> None:
    await _make_admin(world)
    asked = {"user_id": "cat", "name": "laptop"}
    made = (await _call(world, "POST", "keys", asked)).json()
    assert (await world.post("auth/token", {}, key=made["key"])).status_code == 200
    assert (await _call(world, "DELETE", f"keys/{made['key_id']}")).status_code == 204
    assert (await world.post("auth/token", {}, key=made["key"])).status_code == 401
    assert (await _call(world, "DELETE", "keys/1")).status_code == 403, "of the configuration"
    lines = await _audit(world, user_id="cat")
    assert [line["event"] for line in lines] == ["key_revoked", "login", "key_added"]
    assert made["key"] not in str(lines)


async def test_logins_and_knocking_are_in_the_audit_log(world: AppWorld) -> None:
    await _make_admin(world)
    await world.http.post("/console/login", data={"key": BOB})
    world.parts.failed_logins._clock = lambda: 0.0
    for number in range(130):
        await world.post("get_info", {}, key=f"tml-{number}")
    logins = await _audit(world, user_id="bob", event="login")
    assert [line["details"]["by"] for line in logins] == ["console"]
    assert len(await _audit(world, event="login_refused")) == 1


async def test_quotas_of_one_user_are_set_by_an_admin_and_hold_at_once(world: AppWorld) -> None:
    await _make_admin(world)
    session = {"tags": [], "sdk_version": "test"}
    changed = await _call(world, "PUT", "users/bob/quotas", {"quotas": {"sessions": 1}})
    assert changed.json()["own_quotas"] == {"sessions": 1}
    statuses = [(await world.post("create_session", session, key=BOB)).status_code for _ in "12"]
    assert statuses == [200, 429]
    assert (await world.post("create_session", session, key=ANN)).status_code == 200
    await _call(world, "PUT", "users/bob/quotas", {"quotas": {"sessions": None}})
    assert (await world.post("create_session", session, key=BOB)).status_code == 200
    wrong = await _call(world, "PUT", "users/bob/quotas", {"quotas": {"cats": 1}})
    assert wrong.status_code == 400
    assert "requests_per_minute" in wrong.json()["detail"]


async def test_the_limits_on_open_work_hold_and_the_stream_goes_on(tmp_path: Path) -> None:
    async with _open(tmp_path, max_user_queued=4, max_user_running=2) as world:
        models = [await world.model(key=BOB) for _ in range(4)]
        work, place = world.service.open_work, world.service.workers
        others = [f"other{n}" for n in range(place.training.num_slots)]
        for other in others:
            await place.training.acquire(other)
        answers = [await world.train(model, 1, TOKENS, key=BOB) for model in models]
        answers += [await world.train(models[0], n, TOKENS, key=BOB) for n in (2, 3)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
        assert "'queued' is 4" in answers[4].json()["detail"]
        assert int(answers[4].headers["retry-after"]) > 0
        async with asyncio.timeout(60):
            while len(work._lines.get("bob", ())) < 2:
                await asyncio.sleep(0.01)
        assert (work._held["bob"], place.training.num_waiting) == (2, 2)
        for other in others:
            place.training.release(other)
        for answer in answers[:4]:
            assert loss_of(await world.result(answer.json(), key=BOB)) > 0
        after = await world.train(models[0], 2, TOKENS, key=BOB)
        assert after.is_success, "the number of what was refused is free"
        assert loss_of(await world.result(after.json(), key=BOB)) > 0
        assert not work._open
        assert not work._held


async def test_a_sample_beyond_the_limit_is_refused_by_its_name(tmp_path: Path) -> None:
    async with _open(tmp_path, engine="toy:token_latency_s=1", max_user_queued=2) as world:
        sample = {
            "base_model": "toy",
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 64},
            "num_samples": 1,
        }
        answers = [await world.post("asample", sample, key=BOB) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["code"] == "quota"
        assert (await world.post("asample", sample, key=ANN)).status_code == 200


def test_a_route_for_administrators_never_goes_the_short_way(monkeypatch):
    """There the caller is known as a user, and nobody asks whether they are more."""
    monkeypatch.setattr(app, "_OURS", (administration.router,))
    assert app._hot_endpoints() == {}
