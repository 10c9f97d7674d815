"""What a run's owner is told: where the time of a step goes, and what the workers hold."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from app_world import open_app
from pools import always_split
from test_faults import WireRun

from tinkex.server.workers.step_times import MAX_STEPS, PHASES, StepTimes
from tinkex.server.workers.utilisation import WINDOW_S, Utilisation


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_step_is_told_apart_and_adds_up() -> None:
    clock = Clock()
    times = StepTimes(clock)
    assert times.average == {}
    times.begun()  # the pass
    times.begun()  # the step, posted at the same time
    clock.now += 4.0
    times.spent(compute=3.0)
    times.ended()
    times.begun()  # the next pass is posted before the step has ended
    clock.now += 2.0
    times.spent(compute=0.5, reduce=0.25, transfer=0.25)
    times.stepped()
    times.ended()
    first = {"compute": 3.5, "wait": 2.0, "reduce": 0.25, "transfer": 0.25}
    assert times.average == first
    clock.now += 1.0
    times.spent(compute=1.0)
    times.ended()
    times.begun()
    times.stepped()
    times.ended()
    assert times.average == {p: (first[p] + (p == "compute")) / 2 for p in PHASES}
    clock.now += 1000.0  # nobody asks for anything: that is no time of a step
    for _ in range(MAX_STEPS):
        times.begun()
        clock.now += 1.0
        times.stepped()
        times.ended()
    assert times.average == dict.fromkeys(PHASES, 0.0) | {"wait": 1.0}


def test_a_worker_is_as_busy_as_it_was_in_the_last_minute() -> None:
    clock = Clock()
    use = Utilisation(clock)
    assert use.share == 0.0
    for second in range(200):
        clock.now += 1.0
        use.note(min(second, 100))
    assert use.share == 0.0
    for second in range(int(WINDOW_S) // 2):
        clock.now += 1.0
        use.note(101 + second)
    assert use.share == pytest.approx(0.5)
    use.note(0.0)  # another engine
    assert use.share == 0.0


async def test_a_run_says_where_its_time_goes_and_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_split(monkeypatch)
    engine = "toy:train_token_latency_s=1e-3"
    async with open_app(tmp_path, engine=engine, num_workers=2) as world:
        run = WireRun(world, await world.model())
        await run.step()
        await run.shared(2)
        await run.step()
        info = (await world.http.get(f"/api/v1/training_runs/{run.model}")).json()
        assert set(info["step_seconds"]) == set(PHASES)
        assert info["step_seconds"]["compute"] > 0
        assert info["step_seconds"]["reduce"] > 0
        assert [worker["name"] for worker in info["workers"]] == [m.name for m in run.members]
        assert all(0 <= worker["utilisation"] <= 1 for worker in info["workers"])
        for _ in range(1000):
            if any(member.utilisation > 0 for member in run.members):
                break
            await run.step()
            await asyncio.sleep(0.01)
        text = (await world.http.get("/metrics")).text
        assert 'tinkex_worker_utilisation{worker="worker-0"}' in text
        assert max(member.utilisation for member in run.members) > 0
        listed = (await world.http.get("/api/v1/training_runs")).json()["training_runs"]
        assert listed[0].get("workers") is None
