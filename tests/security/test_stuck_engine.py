"""An engine that hangs: the job to blame fails, everybody else sees a pause."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from app_world import AppWorld, open_app
from wire_client import loss_of

from tinkex.engine.heartbeat import Activity, Heartbeat
from tinkex.engine.jobs import DescribeModelJob, SampleJob
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.workers.deaths import Cause
from tinkex.server.workers.supervised_worker import SupervisedWorker
from tinkex.server.workers.watchdog import Budget, Watchdog

TOKENS, HANG = [1, 2, 3, 4], 666
ENGINE = f"toy:hang_token={HANG}"


async def trained(world: AppWorld, model: str, first: int) -> float:
    loss = (await world.train(model, first, TOKENS)).json()
    await world.result((await world.step(model, first + 1)).json())
    return loss_of(await world.result(loss))


async def test_the_job_to_blame_fails_and_the_other_models_go_on(tmp_path: Path) -> None:
    async with open_app(tmp_path / "calm") as world:
        model = await world.model()
        expected = [await trained(world, model, first) for first in (1, 3, 5)]
    async with open_app(tmp_path / "stuck", engine=ENGINE, stuck_after_s=5.0) as world:
        session = await world.session()
        hostile, polite = [await world.model(session, number) for number in range(2)]
        losses = [await trained(world, polite, 1)]
        stuck = (await world.train(hostile, 1, [HANG, 2, 3])).json()
        await asyncio.sleep(0.1)  # the engine hangs by now, and this one waits behind it
        losses.append(await trained(world, polite, 3))
        failed = await world.result(stuck)
        assert failed["category"] == "server"
        assert "did not get on with this request: no progress" in failed["error"]
        assert world.service.workers.pool.members[0].generation == 2
        losses.append(await trained(world, polite, 5))
        assert losses == expected
        assert await trained(world, hostile, 2) == expected[0], "its own state is restored too"


async def test_a_stopped_worker_is_replaced_and_its_work_is_done(tmp_path: Path) -> None:
    async with open_app(tmp_path, stuck_after_s=5.0) as world:
        model = await world.model()
        worker = world.service.workers.pool.members[0]
        os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        assert await trained(world, model, 1) > 0
        assert worker.generation == 2


async def test_readiness_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.server.workers.watchdog.LATELY_S", 0.2)
    async with open_app(tmp_path, engine=ENGINE) as world:
        model = await world.model()
        await asyncio.sleep(0.5)
        assert (await world.http.get("/readyz")).status_code == 200, "nothing to do is fine"
        await world.train(model, 1, [HANG])
        answer = await world.http.get("/readyz")
        for _ in range(1200):  # a busy machine takes its time to send the job
            if answer.status_code == 503 and "makes no progress" in answer.text:
                break
            await asyncio.sleep(0.05)
            answer = await world.http.get("/readyz")
        assert "makes no progress" in answer.text


def test_a_budget_counts_from_the_last_turn_and_grows_with_the_job() -> None:
    now = [0.0]
    dog = Watchdog(Budget(turn_s=10, token_s=0.5, load_s=99), clock=lambda: now[0])
    prompt = [1] * 20
    dog.posted(SampleJob(job_id="s", base_model="m", adapter_folder=None, prompt=prompt))  # type: ignore[arg-type]
    dog.posted(DescribeModelJob(job_id="d", base_model="m"))
    assert dog.limit_s() == 10
    dog.note(Activity(1, True, False, ("s",)))
    assert dog.limit_s() == 20
    assert dog.suspects == ["s"]
    dog.note(Activity(2, True, True, ("d",)))
    assert dog.limit_s() == 99
    now[0] = 130.0
    dog.note(Activity(2, True, False, ("d",)))
    assert not dog.is_moving
    dog.note(Activity(3, True))
    assert dog.is_moving
    assert dog.suspects == []
    assert (dog.is_blameless("d"), dog.is_blameless("s")) == (True, False)


class _Hanging(SupervisedWorker):
    """An engine in this process that began with some jobs and says nothing more."""

    def __init__(self, *at_work: str) -> None:
        super().__init__(budget=Budget(turn_s=0.2))
        self._at_work, self._is_gone = at_work, asyncio.Event()

    async def _live(self) -> None:
        self.generation += 1
        self._is_gone.clear()
        self._ready.set()
        await self._is_gone.wait()

    async def _end(self) -> str:
        self._is_gone.set()
        return "was ended"

    def _kill(self) -> None:
        self._is_gone.set()

    def _flush(self) -> None:
        self._outbox.clear()

    def _look(self) -> Activity:
        return Activity(1, is_busy=True, job_ids=self._at_work)


async def _ends(worker: SupervisedWorker) -> list[BaseException]:
    """How three jobs end whose engine hangs."""
    await worker.start()
    await worker.wait_ready()
    jobs = [worker.post(DescribeModelJob(job_id=name, base_model="toy")) for name in "abc"]
    ends = await asyncio.gather(*jobs, return_exceptions=True)
    await worker.close()
    return [end for end in ends if isinstance(end, BaseException)]


async def test_of_several_that_share_a_pass_none_is_blamed_and_each_runs_again_alone() -> None:
    """The neighbour in a packed pass did nothing, and must neither fail nor be paused for it."""
    shared, neighbour, waiting = await _ends(_Hanging("a", "b"))
    for end in (shared, neighbour):
        assert isinstance(end, WorkerLostError)
        assert (end.cause, end.is_to_blame, end.is_blameless) == ("stuck", False, False)
    assert isinstance(waiting, WorkerLostError)
    assert (waiting.cause, waiting.is_blameless) == ("", True)
    hanging, *others = await _ends(_Hanging("a"))
    assert isinstance(hanging, EngineError)
    assert not isinstance(hanging, WorkerLostError)
    assert hanging.is_to_blame
    assert all(isinstance(end, WorkerLostError) and end.is_blameless for end in others)


class _Dying(_Hanging):
    """An engine that runs out of memory as soon as it has three jobs."""

    def _flush(self) -> None:
        super()._flush()
        if len(self._pending) == 3:
            self._is_gone.set()

    def _cause(self) -> Cause:
        return "memory"


async def test_only_what_the_engine_worked_on_is_suspected_when_it_dies() -> None:
    """A neighbour whose jobs wait while another's end one worker after the other loses none."""
    alone, *waiting = await _ends(_Dying("a"))
    assert isinstance(alone, WorkerLostError)
    assert (alone.cause, alone.is_to_blame) == ("memory", True)
    for end in waiting:
        assert isinstance(end, WorkerLostError)
        assert (end.cause, end.is_to_blame, end.is_blameless) == ("", False, True)


async def test_the_one_on_trial_is_to_blame_for_what_happens_in_its_turn() -> None:
    """A long job of another key, in the middle of which it has its turn, is not."""
    worker = _Dying("b", "a")
    await worker.start()
    await worker.wait_ready()
    suspect = SampleJob(
        job_id="b",
        base_model="toy",
        adapter_folder=None,
        prompt=np.array([1]),
        max_tokens=1,
        alone=True,
    )
    others = [DescribeModelJob(job_id=name, base_model="toy") for name in "ac"]
    ends = await asyncio.gather(*map(worker.post, [suspect, *others]), return_exceptions=True)
    await worker.close()
    assert [getattr(end, "is_to_blame", None) for end in ends] == [True, False, False]
    assert [getattr(end, "is_blameless", None) for end in ends] == [False, True, True]


def test_a_job_in_the_middle_of_anothers_is_never_at_work_alone() -> None:
    """The one that waits holds its memory: a death now may be either's."""
    heartbeat = Heartbeat()
    with heartbeat.work("long"):
        with heartbeat.work("short"):
            assert heartbeat.now.job_ids == ("short", "long")
        with heartbeat.work():
            assert heartbeat.now.job_ids == (), "many share a step of sampling"
        assert heartbeat.now.job_ids == ("long",)
        with heartbeat.work("long", is_loading=True):
            assert heartbeat.now.job_ids == ("long",), "a job that loads its model is one job"
