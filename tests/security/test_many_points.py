"""What is made of very many points or rows, curves and traces, is bounded in size and in number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from patience import soon

from tinkex.server.console.source import MAX_SENT, Growth
from tinkex.server.runs import curves as curves_module
from tinkex.server.runs import segments
from tinkex.server.runs.curves import Curve, LiveCurves
from tinkex.store import Store, StoredCurve

KEYS = ("tml-ann=ann", "tml-bob=bob")
ANN = {"key": "tml-ann"}
HEADERS = {"x-api-key": "tml-ann"}


def full(num_points: int = 500, stride: int = 1) -> Curve:
    numbers = [float(n) for n in range(num_points)]
    return Curve(stride, list(numbers), list(numbers), list(numbers), num_points)


async def run_with(world: AppWorld, curves: dict[str, Curve]) -> str:
    """A run whose curves are in the store, as after a restart."""
    model = await world.model(**ANN)
    stored = [
        StoredCurve(model_id=model, name=name, stride=curve.stride, points=curve.packed())
        for name, curve in curves.items()
    ]
    await world.service.store.call(world.service.store.curves.save, stored)
    return model


def num_points(curves: dict[str, Any]) -> int:
    return sum(len(curve["steps"]) for curve in curves.values())


async def test_a_page_is_sent_so_many_points_whatever_it_asks_by(tmp_path: Path) -> None:
    """Twenty-four small requests made two gigabytes of half a million points each."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        curves = {f"c{n}": full() for n in range(1000)}
        runs = [await run_with(world, curves) for _ in range(2)]

        async def told(path: str) -> Any:
            answer = await world.http.get(f"/console/api/{path}", headers=HEADERS)
            assert answer.status_code == 200, answer.text[:500]
            return answer.json()

        both = ",".join(runs)
        shown = [num_points((await told(f"runs/{runs[0]}"))["curves"])]
        compared = (await told(f"compare?runs={both}"))["runs"]
        shown.append(sum(num_points(run["curves"]) for run in compared))
        shown.append(sum(map(num_points, (await told(f"curves?runs={both}")).values())))
        assert all(0.8 * MAX_SENT < number <= 1.1 * MAX_SENT for number in shown), shown
        named = await told(f"curves?runs={runs[0]}&names=c1&names=c2")
        assert num_points(named[runs[0]]) == 1000, "a few that are named are whole"


def test_a_page_that_looks_on_is_sent_so_many_points_after_a_thinning_too() -> None:
    growth = Growth()
    growth.of({f"c{n}": full() for n in range(1000)})
    assert num_points(growth.of({f"c{n}": full(stride=2) for n in range(1000)})) <= 1.1 * MAX_SENT


async def test_runs_that_were_only_looked_at_do_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "MAX_HELD", 1000)
    store = Store.in_folder(tmp_path)
    points = full(300).packed()
    names = [f"r{n}" for n in range(40)]
    store.curves.save(
        [StoredCurve(model_id=name, name="c", stride=1, points=points) for name in names]
    )
    live = LiveCurves(store)
    await live.log("mine", {"c": 1.0}, 1)
    await live.passed("mine", {"loss:sum": 3.0, "num_tokens:sum": 3.0})
    for name in names:
        await live.of_run(name)
        assert sum(run.num_points for run in live._runs.values()) <= 2 * 1000 + 2 * 300
    await live.stepped("mine", {}, 0.1)
    mine = await live.of_run("mine")
    assert mine["loss_per_token"].values == [1.0], "what it did before its step is not lost"
    store.close()


async def test_segments_have_so_many_points_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_JOINED", 1000)
    async with open_app(tmp_path, api_keys=KEYS) as world:
        runs = []
        for number in range(4):
            curve = full(900)
            curve.steps = [step + 900 * number for step in curve.steps]
            runs.append(await run_with(world, {"c": curve}))
        for number, (before, run) in enumerate(zip(runs, runs[1:], strict=False), start=1):
            answer = await world.http.put(
                f"/tinkex/v1/runs/{run}",
                headers=HEADERS,
                json={"continues": {"run_id": before, "step": 900 * number}},
            )
            assert answer.status_code == 200, answer.text
        found = await world.http.get(f"/console/api/runs/{runs[-1]}", headers=HEADERS)
        steps = found.json()["curves"]["c"]["steps"]
        assert len(steps) <= 1000
        assert (steps == sorted(steps), steps[-1]) == (True, 3599)


async def test_traces_and_lists_without_pages_are_made_in_turns(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        run = f"/training_runs/{await world.model(**ANN)}"
        url = (await world.call("GET", f"{run}/trace_export", 200))["url"]
        gate = world.parts.drawing
        for _ in range(gate.num_slots):
            await gate.acquire("bob")
        paths = (url, f"/api/v1{run}/checkpoints")
        asked = [asyncio.create_task(world.http.get(path, headers=HEADERS)) for path in paths]
        await soon(lambda: gate.num_waiting == 2)
        gate.release("bob")
        assert [(await answer).status_code for answer in asked] == [200, 200]


async def test_streams_of_a_page_look_in_turns_and_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty of one key looked every second at a run of a million points, and nobody had a turn."""
    monkeypatch.setattr("tinkex.server.console.run_pages.MAX_LIVE", 3)
    async with open_app(tmp_path, api_keys=KEYS) as world:
        run, watching = await world.model(**ANN), world.app.state.console.watching
        gate, told = world.parts.drawing, list[bytes]()
        for _ in range(gate.num_slots):
            await gate.acquire("bob")

        async def look() -> int:
            live = f"/console/api/runs/{run}/live"
            async with world.http.stream("GET", live, headers=HEADERS) as answer:
                told.extend([piece async for piece in answer.aiter_bytes()])
                return answer.status_code

        streams = [asyncio.create_task(look()) for _ in range(3)]
        await soon(lambda: gate.num_waiting == 3)
        assert watching == {"ann": 3}
        assert await look() == 429
        assert not any(piece.startswith(b"data:") for piece in told)
        gate.release("bob")
        world.service.begin_stop()
        assert [await stream for stream in streams] == [200] * 3
        assert sum(piece.startswith(b"data:") for piece in told) >= 1
        await soon(lambda: not watching)


async def test_a_page_waits_for_room_like_every_answer(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        budget = world.parts.bodies
        await budget.reserve("ann", budget.per_user_bytes)
        asked = asyncio.create_task(world.http.get("/console", headers=HEADERS))
        await soon(lambda: budget._num_waiting["ann"] == 1)
        budget.release("ann", budget.per_user_bytes)
        assert (await asked).status_code == 200
        await soon(lambda: budget.held_bytes == 0)
