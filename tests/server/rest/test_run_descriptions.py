"""What a user says of a run: bounded, theirs alone, and the same however often it is said."""

from __future__ import annotations

from typing import Any

import pytest
import store_rows as rows
from rest_world import World

from tinkex.server.runs.curves import LiveCurves
from tinkex.server.runs.segments import courses_of

RUN = "s:train:0"


async def describe(world: World, run: str = RUN, status: int = 200, **said: Any) -> Any:
    key = said.pop("key", "tml-ann")
    answer = await world.http.put(f"/tinkex/v1/runs/{run}", json=said, headers={"x-api-key": key})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_what_is_said_of_a_run_is_kept_and_a_repeat_changes_nothing(world: World) -> None:
    said = {"name": "caps é", "note": "first try", "tags": ["a", "b", "a"], "settings": {"lr": 1}}
    first = await describe(world, **said)
    assert first == await describe(world, **said)
    run = await world.call("GET", f"/training_runs/{RUN}", 200)
    assert (run["name"], run["note"], run["tags"]) == ("caps é", "first try", ["a", "b"])
    assert run["settings"] == {"lr": 1}
    [listed] = (await world.call("GET", "/training_runs", 200))["training_runs"]
    assert (listed["name"], listed["tags"], listed.get("settings")) == ("caps é", ["a", "b"], None)


async def test_what_is_left_out_stays_and_what_is_empty_goes(world: World) -> None:
    await describe(world, name="caps", note="x", tags=["a"], settings={"lr": 1, "rank": 4})
    await describe(world, settings={"lr": 2})
    run = await world.call("GET", f"/training_runs/{RUN}", 200)
    assert (run["name"], run["settings"]) == ("caps", {"lr": 2, "rank": 4})
    run = await describe(world, name="", note="", tags=[])
    assert (run.get("name"), run.get("note"), run["tags"]) == (None, None, [])


async def test_a_run_goes_by_its_sessions_name_and_tags_until_it_has_its_own(world: World) -> None:
    session = rows.session("t", display_name="all", tags=["team"], project_id="p")
    world.store.sessions.create(session)
    world.store.models.create(rows.model("t:train:0"))
    run = await world.call("GET", "/training_runs/t:train:0", 200)
    assert (run["name"], run["tags"], run["project_id"]) == ("all", ["team"], "p")
    run = await describe(world, "t:train:0", name="one", tags=["own"])
    assert (run["name"], run["tags"]) == ("one", ["own"])


async def test_a_run_is_described_by_its_owner_alone(world: World) -> None:
    await world.save(public=True)
    await describe(world, note="mine", tags=["secret"], settings={"lr": 1})
    await describe(world, status=404, key="tml-bob", name="stolen")
    path = f"/training_runs/{RUN}?access_scope=accessible"
    seen = await world.call("GET", path, 200, key="tml-bob")
    assert {seen.get(name) for name in ("note", "tags", "settings", "project_id")} == {None}
    listed = await world.call("GET", "/training_runs?access_scope=accessible", 200, key="tml-bob")
    assert {listed["training_runs"][0].get(name) for name in ("note", "tags")} == {None}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"name": "x" * 201}, "200"),
        ({"name": "a\nb"}, "one line"),
        ({"name": " a"}, "spaces"),
        ({"name": "tinker://x"}, "tinker://"),
        ({"note": "x" * 10_001}, "10000"),
        ({"tags": ["x"] * 65}, "64"),
        ({"tags": [""]}, "tags"),
        ({"settings": {str(n): n for n in range(257)}}, "256"),
        ({"settings": {"prompt": "x" * 40_000}}, "32768"),
        ({"settings": [1]}, "settings"),
        ({"continues": {"run_id": RUN, "step": 1}}, "itself"),
        ({"continues": {"run_id": "t:train:0", "step": -1}}, "step"),
    ],
)
async def test_too_much_is_refused_and_nothing_of_it_kept(
    world: World, said: dict[str, Any], words: str
) -> None:
    error = await describe(world, status=400, **said)
    assert words in str(error)
    run = await world.call("GET", f"/training_runs/{RUN}", 200)
    assert {run.get(name) for name in ("name", "note", "settings", "continues")} == {None}


async def test_settings_are_bounded_as_they_add_up(world: World) -> None:
    for part in range(3):
        await describe(world, settings={f"p{part}": "x" * 10_000})
    assert "32768" in str(await describe(world, status=400, settings={"p3": "x" * 10_000}))
    run = await world.call("GET", f"/training_runs/{RUN}", 200)
    assert sorted(run["settings"]) == ["p0", "p1", "p2"]


async def test_a_run_goes_on_from_another_with_its_name_note_and_settings(world: World) -> None:
    await describe(world, name="caps", note="n", tags=["a"], settings={"lr": 1, "rank": 4})
    world.store.models.create(rows.model("s:train:1"))
    on = {"continues": {"run_id": RUN, "step": 14}}
    run = await describe(world, "s:train:1", settings={"lr": 2}, **on)
    assert run == await describe(world, "s:train:1", settings={"lr": 2}, **on)
    assert (run["name"], run["note"], run["tags"]) == ("caps", "n", ["a"])
    assert run["settings"] == {"lr": 2, "rank": 4}
    assert run["continues"] == {"run_id": RUN, "step": 14}
    before = await world.call("GET", f"/training_runs/{RUN}", 200)
    assert before["continued_by"] == "s:train:1"


async def test_a_crash_before_the_first_save_leaves_a_segment_of_the_same_run(world: World) -> None:
    """Resumed twice from one checkpoint: the second try is the run, the first a part of it."""
    for number in (1, 2):
        world.store.models.create(rows.model(f"s:train:{number}"))
        await describe(world, f"s:train:{number}", continues={"run_id": RUN, "step": 10})
    first = await world.call("GET", "/training_runs/s:train:1", 200)
    assert first["continued_by"] == "s:train:2"
    model = world.store.models.get("s:train:2")
    assert model is not None
    ids = [segment.model_id for segment in world.store.models.segments(model)]
    assert ids == [RUN, "s:train:1", "s:train:2"]


async def test_curves_of_many_resumed_runs_are_asked_for_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a thousand of them would else be thousands of queries."""
    models = []
    for number in range(1, 9):
        world.store.models.create(rows.model(run_id := f"s:train:{number}"))
        await describe(world, run_id, continues={"run_id": RUN, "step": number})
        models.append(world.store.models.get(run_id))
    asked, call = [], world.store.call

    async def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(method)
        return await call(method, *args, **kwargs)

    monkeypatch.setattr(world.store, "call", counted)
    await courses_of(world.store, LiveCurves(world.store), models, ["loss_per_token"])
    assert len(asked) == 3  # curves of the runs, their segments, curves of those


async def test_no_run_goes_on_from_its_own_future_or_from_a_strangers(world: World) -> None:
    world.store.models.create(rows.model("s:train:1"))
    await describe(world, "s:train:1", continues={"run_id": RUN, "step": 3})
    assert "segment" in str(
        await describe(world, status=400, continues={"run_id": "s:train:1", "step": 3})
    )
    world.store.sessions.create(rows.session("b", "bob"))
    world.store.models.create(rows.model("b:train:0", "bob"))
    on = {"continues": {"run_id": RUN, "step": 3}}
    await describe(world, "b:train:0", 404, key="tml-bob", **on)
