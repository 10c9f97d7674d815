"""Curves cost the same however long a run is, keep their shape, and survive a restart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from app_world import open_app
from wire_client import loss_of

from tinkex.errors import InvalidInputError
from tinkex.server.console.source import Growth
from tinkex.server.runs.curves import (
    MANY_CURVES,
    MAX_CURVES,
    MAX_POINTS,
    Curve,
    LiveCurves,
)
from tinkex.store import Store


def test_a_long_curve_is_thinned_and_keeps_its_shape():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, step / 1000, 0.0)
    assert MAX_POINTS // 2 <= len(curve.steps) <= MAX_POINTS
    assert all(
        abs(value - step / 1000) < 0.1
        for step, value in zip(curve.steps, curve.values, strict=True)
    )


async def test_what_was_logged_is_there_after_a_restart(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    for step in range(10):
        await curves.log("m", {"reward": step}, step)
    await curves.flush()
    store.close()
    store = Store.in_folder(tmp_path)
    found = await LiveCurves(store).of_run("m")
    assert found["reward"].values == list(range(10))
    await LiveCurves(store).drop("m")
    assert await LiveCurves(store).of_run("m") == {}
    store.close()


async def test_a_curve_in_short_is_the_same_from_memory_and_store(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    for step in range(5000):
        await curves.log("m", {"reward": step / 8}, step)
    await curves.flush()
    here = await curves.of_runs(["m", "absent"], ["reward", "other"])
    stored = await LiveCurves(store).of_runs(["m", "absent"], ["reward", "other"])
    assert here == stored
    (course,) = here.values()
    assert (course.last_step, len(course.values) <= 120) == (4999, True)
    assert course.total == pytest.approx(sum(range(5000)) / 8, rel=0.01)
    store.close()


async def test_a_curve_in_short_is_in_the_order_of_its_steps(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    for step in (3, 0, 2, 1):  # calls that nobody waited for overtake each other
        await curves.log("m", {"reward": step / 10}, step)
    for look in (curves, LiveCurves(store)):
        await curves.flush()
        course = (await look.of_runs(["m"], ["reward"]))["m", "reward"]
        assert list(course.values) == [0.0, 0.1, 0.2, 0.3]
        assert (course.last_step, course.last_value) == (3, 0.3)
    store.close()


def test_a_page_that_looks_on_is_told_what_is_new_and_all_after_a_thinning():
    growth, curve = Growth(), Curve()
    shown: list[float] = []
    for step in range(10_000):
        curve.add(step, float(step), 0.0)
        if step % 7 == 0:
            told = growth.of({"loss": curve}).get("loss", {"steps": [], "isMore": True})
            shown = shown + told["steps"] if told["isMore"] else told["steps"]
            assert shown == curve.steps
    assert growth.of({"loss": curve})["loss"]["isMore"]
    assert growth.of({"loss": curve}) == {}


async def test_steps_are_counted_on_after_a_restart(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    await curves.stepped("m", {"grad_norm:mean": 1.0}, 0.1)
    await curves.flush()
    again = LiveCurves(store)
    await again.stepped("m", {"grad_norm:mean": 2.0}, 0.1)
    assert (await again.of_run("m"))["grad_norm"].steps == [1, 2]
    store.close()


async def test_a_million_points_cost_little(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    began = time.process_time()
    for step in range(50_000):
        await curves.log("m", dict.fromkeys("abcdefghijklmnopqrst", 1.0), step)
    assert time.process_time() - began < 60
    await curves.flush()
    store.close()
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size < 64 * 1024 * 1024


async def test_too_many_names_are_refused(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    await curves.log("m", {f"n{i}": 1.0 for i in range(MAX_CURVES)}, 0)
    with pytest.raises(InvalidInputError, match="at most 1000 curves"):
        await curves.log("m", {"one more": 1.0}, 1)
    store.close()


async def test_a_run_of_many_curves_keeps_fewer_points_of_each(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    curves = LiveCurves(store)
    for step in range(1501):  # odd: the last point has no neighbour when the others are joined
        await curves.log("m", {"first": float(step)}, step)
    for step in range(1501, 2200):
        await curves.log("m", dict.fromkeys(["first", *map(str, range(MANY_CURVES))], step), step)
    found = await curves.of_run("m")
    store.close()
    assert max(len(curve.steps) for curve in found.values()) <= MAX_POINTS // 4
    first = found["first"]
    assert first.steps == sorted(first.steps)
    assert all(abs(v - s) < 20 for s, v in zip(first.steps, first.values, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.25, 8.0])
async def test_the_loss_of_a_token_is_the_same_whatever_scale_its_weights_have(
    tmp_path: Path, scale: float
):
    """Who weighs n tokens by 1/n has divided by n already."""
    async with open_app(tmp_path) as world:
        model = await world.model()
        sent = await world.train(model, 1, [1, 2, 3, 4], weights=[scale] * 3 + [0.0])
        total = loss_of(await world.result(sent.json()))
        await world.result((await world.step(model, 2)).json())
        curves = await world.service.curves.of_run(model)
    assert curves["loss_per_token"].values == [pytest.approx(total / (3 * scale))]
