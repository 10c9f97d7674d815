"""Members die, hang and run out of memory; the run goes on and ends with the same bits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import app_world
import numpy as np
import pytest
import torch
from app_world import AppWorld, open_app
from pools import TOY, EngineWorker, Run, always_split, opened, torch_member
from wire_client import PROTO, loss_of, model_body, train_body

from tinkex.engine.heartbeat import Activity
from tinkex.engine.jobs import Engine, Failed, TrainJob
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.engine import toy_engine
from tinkex.errors import EngineError
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.watchdog import Budget, Watchdog


@pytest.fixture(autouse=True)
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    always_split(monkeypatch)


class WireRun:
    """A run over the wire, of passes with eight datums each; `losses` is what it was told."""

    def __init__(self, world: AppWorld, model: str) -> None:
        self.world, self.model = world, model
        self.pool = world.service.workers.pool
        self.losses: list[float] = []
        self._seq, self._num = 0, 0

    async def _post(self, *, forward_only: bool = False, longest: int = 0) -> dict[str, Any]:
        rng, self._seq = np.random.default_rng(self._num), self._seq + 1
        passes = [rng.integers(3, 97, int(rng.integers(2, 20))).tolist() for _ in range(8)]
        passes += [[5] * longest] if longest else []
        body = b"".join(
            train_body(self.model, self._seq, tokens, forward_only=forward_only)
            for tokens in passes
        )
        answer = await self.world.post("forward_backward", body, headers=PROTO)
        return dict(answer.json())

    async def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        promise = await self._post()
        self._num, self._seq = self._num + 1, self._seq + 1
        stepped = (await self.world.step(self.model, self._seq)).json()
        meanwhile()
        self.losses.append(loss_of(await self.world.result(promise)))
        assert (await self.world.result(stepped))["metrics"]["step:max"] == self._num

    async def fails(self, *, longest: int) -> dict[str, Any]:
        """A pass with a datum that is too long; gives what its client is told."""
        told: dict[str, Any] = await self.world.result(await self._post(longest=longest))
        return told

    @property
    def members(self) -> list[Any]:
        placement = self.pool._placements.get(self.model)
        return [] if placement is None else [lease.worker for lease in placement.leases]

    async def shared(self, by: int) -> list[Any]:
        """Wait until that many members share the model."""
        for _ in range(2000):
            if len(self.members) >= by:
                return self.members
            await self.world.result(await self._post(forward_only=True))
            await asyncio.sleep(0.02)
        raise AssertionError("nobody came to share it")


async def calm(folder: Path, num: int) -> list[float]:
    async with open_app(folder, engine=TOY) as world:
        run = WireRun(world, await world.model())
        for _ in range(num):
            await run.step()
        return run.losses


async def test_members_that_are_killed_cost_time_and_nothing_else(tmp_path: Path) -> None:
    settings = {"engine": TOY, "num_workers": 3, "snapshot_every_ops": 5}
    async with open_app(tmp_path / "killed", **settings) as world:
        run = WireRun(world, await world.model())
        for victim in (2, 0, 1):
            await run.step()
            members = await run.shared(3)
            await run.step(lambda members=members, v=victim: os.kill(members[v].pid, 9))
            await run.step()
        text = (await world.http.get("/metrics")).text
        assert 'tinkex_training_seconds{phase="reduce"}' in text
        assert run.pool.seconds["reduce"] > 0
    assert run.losses == await calm(tmp_path / "calm", 9)


async def test_a_member_that_stops_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    settings = {"engine": TOY, "num_workers": 2, "stuck_after_s": 5.0}
    async with open_app(tmp_path / "stopped", **settings) as world:
        run = WireRun(world, await world.model())
        await run.step()
        leader, other = await run.shared(2)
        generation = other.generation
        await run.step(lambda: os.kill(other.pid, signal.SIGSTOP))
        await run.step()
        if other.generation == generation:  # its part was done before it stopped
            await run.shared(2)
        await run.step()
    assert other.generation > generation
    assert run.losses == await calm(tmp_path / "calm", 4)


class Full:
    """An engine whose device has no room for a training pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.heartbeat = engine, engine.heartbeat
        self.cancel, self.close = engine.cancel, engine.close

    def submit(self, job: Any, emit: Any) -> None:
        if isinstance(job, TrainJob):
            message = "the training pass failed: out of memory, 3 GB wanted and 1 GB free"
            emit(Failed(job_id=job.job_id, message=message, category="server"))
        else:
            self._engine.submit(job, emit)


async def test_no_memory_on_one_member_fails_the_pass_in_words_and_the_pool_goes_on(
    tmp_path: Path,
) -> None:
    config = ToyConfig(train_token_latency_s=1e-7)
    members = [
        EngineWorker(lambda: toy_engine(config), "large"),
        EngineWorker(lambda: Full(toy_engine(config)), "small"),
    ]
    async with opened(members, tmp_path / "rendezvous") as pool:
        run = Run(pool, "toy")
        await run.create()
        placement = pool.place("a")
        with pytest.raises(EngineError, match="3 GB wanted"):
            await run.until_shared(99)
        assert pool.place("a") is not placement
        again = Run(pool, "toy", "b")
        await again.create()
        assert (await again.train(1)).num_tokens > 0


def tight_pool(rendezvous: Path) -> Pool:
    """Two engines, one of which has no room for a datum of more than forty tokens."""
    from tinkex.engine.torch.config import EngineConfig
    from tinkex.engine.torch.engine import TorchEngine
    from tinkex.engine.train.passes import PassRunner

    def make_tight() -> TorchEngine:
        engine = TorchEngine(EngineConfig(device="cpu"))
        find = engine.compute.bases.find

        def find_tight(*args: Any) -> Any:
            base = find(*args)

            def run_pass(one: Any, *rest: Any) -> None:
                if max(item.length for item in one.items) > 40:
                    raise torch.OutOfMemoryError(
                        "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has 1.00 GiB free."
                    )
                PassRunner.run_pass(base.trainer.passes, one, *rest)

            base.trainer.passes.run_pass = run_pass
            return base

        engine.compute.bases.find = find_tight  # type: ignore[method-assign]
        return engine

    tight = EngineWorker(make_tight, "tight")
    return Pool([tight, torch_member(deterministic=False)], rendezvous=rendezvous)


async def tiny_model(world: AppWorld, session: str, number: int, base_model: str) -> str:
    body = model_body(session, number) | {"base_model": base_model}
    return str((await world.result(await world.ok("create_model", body)))["model_id"])


async def test_no_memory_on_one_device_fails_the_pass_to_blame_and_nothing_else(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine, whose device has no room for passes with long datums; through the server."""
    monkeypatch.setattr(app_world, "make_pool", lambda config: tight_pool(tmp_path / "rendezvous"))
    async with open_app(tmp_path / "tight", engine="torch", models=(tiny,)) as world:
        session = await world.session()
        mine, theirs = [await tiny_model(world, session, n, tiny) for n in range(2)]
        run, other = WireRun(world, mine), WireRun(world, theirs)
        await run.step()
        await run.shared(2)
        failed = await run.fails(longest=60)
        assert failed["category"] == "server"
        assert "Tried to allocate 3.00 GiB" in failed["error"]
        assert re.search(r"held \d+ tokens; send fewer or shorter datums", failed["error"])
        await run.step()
        await other.step()
        assert run.pool.num_ready == 2
    async with open_app(tmp_path / "calm", engine="torch", models=(tiny,)) as world:
        calm = WireRun(world, await tiny_model(world, await world.session(), 0, tiny))
        await calm.step()
        await calm.step()
    assert run.losses == pytest.approx(calm.losses, rel=1e-5)


def test_a_process_that_does_not_run_is_noticed_and_its_job_may_run_again() -> None:
    now = [0.0]
    dog = Watchdog(Budget(turn_s=300, heartbeat_s=30), clock=lambda: now[0])
    dog.posted(TrainJob(job_id="t", adapter_id="a", data=(), loss_fn="cross_entropy"))
    dog.posted(TrainJob(job_id="u", adapter_id="b", data=(), loss_fn="cross_entropy"))
    for second in range(20):
        now[0] = second
        dog.note(Activity(1, True, False, ("t",), num_heartbeats=1 + second))
    assert dog.suspects == ["t"], "it runs, so the job is to blame"
    now[0] = 60.0
    dog.note(Activity(1, True, False, ("t",), num_heartbeats=20))
    assert dog.suspects == []
    assert not dog.is_blameless("t"), "it is counted, and given up after some times"
    assert dog.is_blameless("u")
