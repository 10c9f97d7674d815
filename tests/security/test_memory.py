"""What the server remembers has an end: no map grows with requests, users, runs or crashes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app_world import AppWorld, open_app
from wire_client import SESSION, loss_of, train_body

from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.budgets import Prices, SpendingBudgets
from tinkex.server.runs import curves as curves_module
from tinkex.server.runs.curves import LiveCurves
from tinkex.server.work.open_work import OpenWork
from tinkex.server.workers.pool import Pool
from tinkex.store import SampleLedger, Store

SAMPLE = {
    "base_model": "toy",
    "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "sampling_params": {"max_tokens": 5},
}


def _lost(folder: Path) -> list[str]:
    """The samples that a server which starts there would call lost."""
    ledger = SampleLedger(folder / "samples.log")
    ledger.close()
    return ledger.lost


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------ waiting


async def test_who_leaves_the_line_again_and_again_leaves_nothing_behind() -> None:
    gate = FairGate(1)
    await gate.acquire("ann")
    for _ in range(100):
        waiting = asyncio.create_task(gate.acquire("eve"))
        await asyncio.sleep(0)
        await _cancelled(waiting)
    assert len(gate._order) <= 1
    # And a place still goes to whoever waits.
    waiting = asyncio.create_task(gate.acquire("eve"))
    await asyncio.sleep(0)
    gate.release("ann")
    await asyncio.wait_for(waiting, 60)
    assert not gate._order


async def test_work_that_is_cancelled_while_it_waits_for_its_user_is_forgotten() -> None:
    open_work = OpenWork(  # type: ignore[arg-type]
        SimpleNamespace(limit=lambda user_id, name: 1), SpendingBudgets(None, Prices({}))
    )
    held = open_work.slot("eve")
    await held.__aenter__()
    first = asyncio.create_task(open_work.acquire("eve"))
    await asyncio.sleep(0)
    for _ in range(100):
        waiting = asyncio.create_task(open_work.acquire("eve"))
        await asyncio.sleep(0)
        await _cancelled(waiting)
    assert len(open_work._lines["eve"]) == 1
    await held.__aexit__(None, None, None)
    await asyncio.wait_for(first, 60)


# ------------------------------------------------------------------------------------ requests


async def test_a_refused_request_is_remembered_without_its_body(app_world: AppWorld) -> None:
    model = await app_world.model()
    await app_world.facts()
    tokens = [10**6] * 50_000
    refused = await app_world.post(
        "forward_backward",
        train_body(model, 1, tokens),
        headers={"content-type": "application/x-protobuf"},
    )
    assert refused.status_code == 400
    (inbox,) = app_world.service._inboxes.values()
    answer = inbox._taken[1].accepted.result()
    assert isinstance(answer, Exception)
    assert answer.__traceback__ is None
    assert answer.__context__ is None
    del refused, tokens
    gc.collect()
    held = [one for one in gc.get_referrers(answer) if isinstance(one, BaseException)]
    assert held == []
    again = await app_world.post(
        "forward_backward",
        train_body(model, 1, [10**6] * 50_000),
        headers={"content-type": "application/x-protobuf"},
    )
    assert (again.status_code, answer.__traceback__) == (400, None)


async def test_a_result_that_nobody_fetches_is_in_the_journal_alone(tmp_path: Path) -> None:
    async with open_app(tmp_path, result_grace_s=0.0) as world:
        model = await world.model()
        promise = (await world.train(model, 1, [1, 2, 3])).json()
        while (found := world.service.promises.get(promise["request_id"])) is not None:
            world.service.ends.flush()
            await asyncio.to_thread(world.service.store.flush)
            await asyncio.sleep(0.01)
            world.service.promises.forget_expired()
        assert found is None
        assert loss_of(await world.result(promise)) > 0


# ------------------------------------------------------------------------------------ samples


async def test_a_poll_for_nothing_leaves_no_log(app_world: AppWorld) -> None:
    session = await app_world.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await app_world.ok("create_sampling_session", body))["sampling_session_id"]
    for clone in range(50):
        target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
        asked = {"target": target, "prev_cursor": 0, "timeout": 0.0}
        assert (await app_world.ok("retrieve_futures", asked))["completions"] == []
    assert app_world.service.finished_logs._logs == {}


async def test_a_sample_that_nobody_fetches_is_forgotten_everywhere(tmp_path: Path) -> None:
    async with open_app(tmp_path, result_ttl_s=1e-6) as world:
        for _ in range(3):
            await world.ok("asample", SAMPLE)
        samples = world.service.samples
        while samples._runs:
            await asyncio.sleep(0.01)
        world.service.promises.forget_expired()
        logs = world.service.finished_logs
        logs.forget()
        assert len(world.service.promises) == 0
        assert (world.service.kept.kept_bytes, dict(logs._ledger._open)) == (0, {})
    assert _lost(tmp_path) == []


async def test_losses_that_nobody_asks_for_are_forgotten_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SampleLedger(tmp_path / "samples.log")
    for number in range(3):
        ledger.promised(f"s:sample:0:{number}")
    ledger.close()
    monkeypatch.setattr("tinkex.server.work.finished_logs.LOST_S", 0.0)
    async with open_app(tmp_path) as world:
        world.service.finished_logs.forget()
    assert _lost(tmp_path) == []


# ------------------------------------------------------------------------------------ runs


async def test_a_parked_run_leaves_no_home_and_no_curves(app_world: AppWorld) -> None:
    """Even when its worker died meanwhile, and the place it would have had is asked for."""
    pool, service = app_world.service.workers.pool, app_world.service
    sessions = [await app_world.session() for _ in range(3)]
    for session in sessions:
        model = await app_world.model(session)
        await app_world.result((await app_world.train(model, 1, [1, 2])).json())
        await app_world.result((await app_world.step(model, 2)).json())
    assert len(pool._placements) == 3
    await service.park_session(sessions[0])
    assert len(pool._placements) == 2
    before = pool.generation
    pool.members[0]._kill()  # type: ignore[attr-defined]
    while pool.generation == before or not pool.is_ready:
        await asyncio.sleep(0.01)
    for session in sessions[1:]:
        await service.park_session(session)
    assert pool._placements == {}
    await service.curves.flush()
    for session in sessions:
        service.curves.let_go(f"{session}:train:0")
    assert service.curves._runs == {}
    # It goes on from where it was.
    assert (await app_world.step(f"{sessions[0]}:train:0", 3)).status_code == 200
    assert "loss_per_token" in await service.curves.of_run(f"{sessions[0]}:train:0")


@dataclass(eq=False)
class Member:
    """As much of a worker as a pool needs to know what it has loaded."""

    name: str
    post: Callable[..., Any]
    generation: int = 1
    is_ready: bool = True


async def test_what_a_dead_process_had_loaded_is_forgotten() -> None:
    answers: list[asyncio.Future[Any]] = []

    def post(job: Any, on_event: Any = None) -> asyncio.Future[Any]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    members: Any = [Member(str(n), post) for n in range(2)]
    pool = Pool(members)
    for generation in range(1, 50):
        members[0].generation = generation
        pool._with_model("toy")
    assert len(pool._loaded) == 2
    for answer in answers:  # those of dead processes come too late to count
        answer.set_result(None)
    await asyncio.sleep(0)
    assert len(pool._loaded) == 2
    assert len(pool._with_model("toy")) == 2


async def test_curves_in_memory_have_a_bound_in_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "MAX_HELD", 100)
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    for run in range(10):
        for step in range(40):
            await curves.log(f"run-{run}", {"reward": float(step)}, step)
    await curves.flush()
    assert sum(len(c.steps) for r in curves._runs.values() for c in r.curves.values()) <= 100
    assert len((await curves.of_run("run-0"))["reward"].values) == 40
    store.close()


async def test_a_session_in_memory_keeps_nothing_of_what_its_client_said(
    app_world: AppWorld,
) -> None:
    said = {**SESSION, "tags": ["t"], "user_metadata": {"note": "x" * 1000}}
    session_id = (await app_world.ok("create_session", said))["session_id"]
    known = app_world.service.sessions._known[session_id]
    assert (known.tags, known.user_metadata) == ([], {})
    stored = await app_world.service.store.call(app_world.service.store.sessions.get, session_id)
    assert stored is not None
    assert (stored.tags, stored.user_metadata) == (["t"], {"note": "x" * 1000})


async def test_the_pages_of_the_database_in_memory_have_a_bound(tmp_path: Path) -> None:
    store = Store.in_folder(tmp_path)
    for engine in (store._database.reader, store._database.writer):
        with engine.connect() as connection:
            kib = -connection.exec_driver_sql("PRAGMA cache_size").scalar_one()
            assert 0 < kib <= 4000
    # One after another, readers share one connection and its pages.
    for _ in range(20):
        await store.call(store.accounts.get_user, "ann")
    assert store._database.reader.pool.checkedin() == 1  # type: ignore[attr-defined]
    store.close()
