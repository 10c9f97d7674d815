"""Whose work took a worker from everybody: found by trial, paused, told, and forgiven."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app_world import AppWorld, open_app
from wire_client import loss_of

from tinkex.server.fairness.pauses import FIRST_S, FORGET_S, LIFTED, NOTED, Pauses
from tinkex.server.work.gated_pool import GatedPool

TOKENS, HANG = [1, 2, 3, 4], 666
ANN, BOB, ROOT = "tml-ann", "tml-bob", "tml-root"


def _open(folder: Path, **settings: Any) -> Any:
    return open_app(
        folder,
        engine=f"toy:hang_token={HANG}",
        hold_s=0.05,
        **({"stuck_after_s": 3.0, "api_keys": (f"{ANN}=ann", f"{BOB}=bob")} | settings),
    )


async def _sampler(world: AppWorld, key: str) -> str:
    body = {
        "session_id": await world.session(key=key),
        "sampling_session_seq_id": 0,
        "base_model": "toy",
    }
    return str((await world.ok("create_sampling_session", body, key=key))["sampling_session_id"])


def _asked(sampler: str, number: int, prompt: list[int]) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
    }


async def _make_admin(world: AppWorld) -> None:
    accounts = world.service.store.accounts
    accounts.ensure_user("root")
    accounts.add_key(ROOT, "root", role="admin")


async def _users(world: AppWorld) -> dict[str, Any]:
    answer = await world.http.get("/tinkex/v1/admin/users", headers={"x-api-key": ROOT})
    return {user["user_id"]: user for user in answer.json()["users"]}


async def test_of_samples_that_hung_together_the_guilty_one_is_found(tmp_path: Path) -> None:
    """A step of sampling is shared, so nobody can say whose it was until each has one alone."""
    async with _open(tmp_path) as world:
        ann, bob = await _sampler(world, ANN), await _sampler(world, BOB)
        hostile = await world.ok("asample", _asked(ann, 0, [HANG, 1]), key=ANN)
        polite = [await world.ok("asample", _asked(bob, n, TOKENS), key=BOB) for n in range(3)]
        failed = await world.result(hostile, key=ANN)
        assert "did not get on" in failed["error"]
        for promise in polite:
            assert isinstance(await world.result(promise, key=BOB), bytes), "bob has his tokens"
        entries = world.service.store.audit.page(10, 0, prefix=NOTED)
        assert [(entry.user_id, entry.details["cause"]) for entry in entries] == [("ann", "stuck")]
        (worker,) = world.service.workers.pool.members
        assert worker.generation == 3, "one loss among all of them, and one on trial"


async def test_suspects_are_tried_one_at_a_time_and_the_other_worker_is_for_the_others(
    tmp_path: Path,
) -> None:
    async with _open(tmp_path, num_workers=2) as world:
        ann = await _sampler(world, ANN)
        model = await world.model(key=BOB)
        hostile = [await world.ok("asample", _asked(ann, n, [HANG, n]), key=ANN) for n in range(3)]
        for seq_id in range(1, 9):
            promise = (await world.train(model, seq_id, TOKENS, key=BOB)).json()
            assert loss_of(await world.result(promise, key=BOB)) > 0
            runs = world.service.samples._runs.values()
            assert sum(run.sent and run.suspicion.on_trial for run in runs) <= 1
        for promise in hostile[:2]:
            await world.result(promise, key=ANN)
        assert world.service.open_work.pauses.left_s("ann") > 0
        assert world.service.open_work.pauses.left_s("bob") == 0


async def test_a_pause_is_told_with_its_end_survives_a_restart_and_can_be_lifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.fairness.pauses.FIRST_S", 500.0)
    async with _open(tmp_path) as world:
        await _make_admin(world)
        model = await world.model(key=ANN)
        for seq_id in (1, 2):
            stuck = (await world.train(model, seq_id, [HANG, 2], key=ANN)).json()
            assert "did not get on" in (await world.result(stuck, key=ANN))["error"]
        told = (await _users(world))["ann"]
        assert told["paused_until"] is not None
        assert f"the last one: {stuck['request_id']}" in told["pause_reason"]
    async with _open(tmp_path) as world:
        users = await _users(world)
        assert "ended a worker 2 times" in users["ann"]["pause_reason"]
        assert "paused_until" not in users["bob"]
        waiting = (await world.train(model, 3, TOKENS, key=ANN)).json()
        body = {"request_id": waiting["request_id"]}
        answer = await world.post("retrieve_future", body, key=ANN)
        assert answer.status_code == 408
        assert 400 < int(answer.headers["retry-after"]) <= 500
        assert "paused for" in answer.json()["queue_state_reason"]
        streamed = _asked(await _sampler(world, ANN), 0, TOKENS)
        answer = await world.post("sample_stream", streamed, key=ANN)
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["retry-after"]) > 400
        assert "ended a worker 2 times" in answer.text
        headers = {"x-api-key": ROOT}
        path = "/tinkex/v1/admin/users/ann/lift_pause"
        assert (await world.http.post(path, headers=headers)).status_code == 204
        assert loss_of(await world.result(waiting, key=ANN)) > 0
        (entry,) = world.service.store.audit.page(10, 0, prefix=LIFTED)
        assert (entry.user_id, entry.details) == ("ann", {"by": "root"})
        assert (await world.http.post(path, headers={"x-api-key": ANN})).status_code == 403
    async with _open(tmp_path) as world:
        assert "paused_until" not in (await _users(world))["ann"], "forgiven for good"


def test_what_was_noted_long_ago_begins_no_pause_after_a_restart() -> None:
    pauses = Pauses(clock=lambda: 1000.0)
    noted = {"cause": "memory", "request_id": "r"}
    events = [(FORGET_S + 1, "eve", NOTED, noted), (FIRST_S / 2, "eve", NOTED, noted)]
    pauses.restore(events)
    assert pauses.left_s("eve") == 0
    pauses.restore([(FIRST_S / 4, "eve", NOTED, noted), (-5.0, "ann", NOTED, {})])
    assert pauses.left_s("eve") == FIRST_S * 3 / 4
    assert pauses.retry_after("eve") == {"Retry-After": "8"}
    assert pauses.left_s("ann") == 0


def test_a_restart_makes_no_pause_shorter() -> None:
    """Each blame comes within the hour of the one before, so none of them is forgotten."""
    now, told = [0.0], []
    pauses = Pauses(lambda *event: told.append((now[0], *event)), clock=lambda: now[0])
    for _ in range(4):
        now[0] += 0.9 * FORGET_S
        pauses.blame("eve")
    again = Pauses(clock=lambda: now[0])
    again.restore((now[0] - at, *event) for at, *event in told)
    assert again.left_s("eve") == pauses.left_s("eve") == 4 * FIRST_S


def test_as_many_trials_run_as_there_are_workers_but_one() -> None:
    pool: Any = SimpleNamespace(size=1, watch=(resized := []).append)
    gated = GatedPool.before(pool, max_training=2, max_sampling=4)
    assert gated.trials.num_slots == 1
    pool.size = 4
    resized[0]()
    assert (gated.trials.num_slots, gated.training.num_slots) == (3, 8)
