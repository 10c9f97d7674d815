"""`DELETE /tinkex/v1/runs/RUN`: a run goes whole and for good, and only when its owner means it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from sqlalchemy import select, text
from wire_client import save_body

from tinkex.store import SpendingBudget, schema

OURS = "/tinkex/v1"
KEYS = ("tml-ann=ann", "tml-bob=bob")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with open_app(tmp_path, api_keys=KEYS) as made:
        accounts, call = made.service.store.accounts, made.service.store.call
        await call(accounts.ensure_user, "root")
        await call(accounts.add_key, "tml-root", "root", role="admin")
        yield made


async def trained(world: AppWorld, key: str = "tml-ann") -> tuple[str, str]:
    """A run with a step, two checkpoints, unnamed weights, a curve; and its session."""
    session = await world.session(key=key)
    run = await world.model(session, key=key)
    await world.result((await world.train(run, 1, [1, 2, 3], key=key)).json(), key=key)
    await world.result((await world.step(run, 2, key=key)).json(), key=key)
    for number, (path, name) in enumerate(
        [("save_weights", "a"), ("save_weights_for_sampler", "b")]
    ):
        promise = await world.ok(path, save_body(run, 3 + number, name), key=key)
        await world.result(promise, key=key)
    unnamed = {"model_id": run, "seq_id": 5, "sampling_session_seq_id": 0}
    await world.result(await world.ok("save_weights_for_sampler", unnamed, key=key), key=key)
    return run, session


async def end(world: AppWorld, session: str, key: str = "tml-ann") -> None:
    body = {"reason": {"type": "success"}}
    await world.call("POST", f"/sessions/{session}/finish", 204, key=key, json=body)


async def delete(world: AppWorld, run: str, status: int, key: str = "tml-ann", at: str = "") -> Any:
    headers = {"x-api-key": key}
    answer = await world.http.delete(f"{OURS}{at}/runs/{run}", headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def left(world: AppWorld, run: str) -> dict[str, int]:
    """How many rows of each table, and which folders, speak of a run."""
    found = {}
    with world.service.store._database.reader.connect() as connection:
        for table in schema.metadata.tables.values():
            names = {"model_id", "path", "subject", "run_id"} & set(table.c.keys())
            rows = [
                row
                for name in names
                for row in connection.execute(
                    select(text("1")).select_from(table).where(table.c[name].contains(run))
                )
            ]
            if rows:
                found[table.name] = len(rows)
    return found


def folders(root: Path, run: str) -> list[str]:
    """Files and folders of a run; the empty ones above them may stay."""
    name = run.replace(":", "-")
    return [str(one) for one in root.rglob("*") if name in str(one) and one.is_file()]


async def test_nothing_of_a_deleted_run_is_left_but_its_bill(
    world: AppWorld, tmp_path: Path
) -> None:
    run, session = await trained(world)
    names = {"name": "mine", "path": f"tinker://{run}/weights/a"}
    await world.call("POST", "/checkpoint_names", 200, json=names)
    store = world.service.store
    await world.service.ends.caught_up()
    await store.call(store.flush)
    await world.service.curves.flush()
    budget = SpendingBudget(
        scope="run", subject=run, unit="tokens", user_id="ann", amount=1e9, pauses=False,
        by_admin=False, set_at=0.0, before={},
    )  # fmt: skip
    await world.service.budgets.put(budget)
    before = left(world, run)
    assert {"models", "journal", "checkpoints", "curves", "usage", "budgets"} <= before.keys()
    await end(world, session)
    deleted = await delete(world, run, 200)
    assert (deleted["run_ids"], deleted["num_checkpoints"]) == ([run], 2)
    assert deleted["freed_bytes"] > 0
    await store.call(store.flush)
    # Of the sampling session that had unnamed weights a row stays, which says that they are gone.
    assert left(world, run).keys() - {"sampling_sessions"} == {"usage"}
    assert folders(tmp_path, run) == []
    assert store.stored.of("ann") == store.recount_bytes().get("ann", {})
    assert world.service.budgets.of_user("ann") == []
    await world.call("GET", f"/training_runs/{run}", 404)
    await delete(world, run, 404)
    [line] = await store.call(
        store.audit.entries, "ann", prefixes=["run_deleted"], start=0, end=1e12
    )
    assert (line.details["run_id"], line.details["num_checkpoints"]) == (run, 2)


async def test_a_run_that_trains_is_not_deleted_until_it_was_stopped(world: AppWorld) -> None:
    run, _ = await trained(world)
    refused = await delete(world, run, 400)
    assert f"tinkex run stop {run}" in refused["detail"]
    headers = {"x-api-key": "tml-ann"}
    await world.http.post(f"{OURS}/runs/{run}/stop", headers=headers, json={})
    await delete(world, run, 200)


async def test_a_run_with_work_queued_is_not_deleted_whatever_its_session_is(
    world: AppWorld,
) -> None:
    run, session = await trained(world)
    await world.train(run, 9, [1, 2, 3], key="tml-ann")  # waits for the numbers before it
    await end(world, session)
    assert "queued or running" in (await delete(world, run, 400))["detail"]
    await world.call("GET", f"/training_runs/{run}", 200)


async def test_a_run_with_a_published_checkpoint_is_not_deleted(world: AppWorld) -> None:
    run, session = await trained(world)
    await end(world, session)
    where = f"/training_runs/{run}/checkpoints/weights/a/publish"
    await world.call("POST", where, 204)
    refused = await delete(world, run, 400)
    assert f"tinkex checkpoint unpublish tinker://{run}/weights/a" in refused["detail"]
    await world.call("DELETE", where, 204)
    await delete(world, run, 200)


async def test_only_its_owner_or_an_administrator_deletes_a_run(world: AppWorld) -> None:
    run, session = await trained(world)
    await end(world, session)
    await delete(world, run, 404, key="tml-bob")
    await delete(world, run, 403, key="tml-bob", at="/admin")
    await delete(world, run, 403, at="/admin")
    await delete(world, run, 200, key="tml-root", at="/admin")
    store = world.service.store
    await store.call(store.flush)
    [line] = await store.call(
        store.audit.entries, "ann", prefixes=["run_deleted"], start=0, end=1e12
    )
    assert line.details["by"] == "root"


async def test_segments_go_together_and_a_branch_trains_on(world: AppWorld) -> None:
    run, session = await trained(world)
    made = []
    for number in (1, 2):
        body = {"session_id": session, "model_seq_id": number, "path": f"tinker://{run}/weights/a"}
        promise = await world.ok("load_weights", body | {"optimizer": True}, key="tml-ann")
        made.append((await world.result(promise, key="tml-ann"))["model_id"])
    segment, branch = made
    headers = {"x-api-key": "tml-ann"}
    said = {"continues": {"run_id": run, "step": 1}}
    await world.http.put(f"{OURS}/runs/{segment}", headers=headers, json=said)
    await world.http.post(f"{OURS}/runs/{segment}/stop", headers=headers, json={})
    store = world.service.store
    for model_id in (run, segment):  # its session goes on with the branch; the run is long silent
        store.models.touch(model_id, 1.0)
    await store.call(store.flush)
    assert (await delete(world, run, 200))["run_ids"] == [run, segment]
    assert left(world, run).keys() | left(world, segment).keys() <= {"usage", "sampling_sessions"}
    trained_on = await world.train(branch, 1, [1, 2, 3], key="tml-ann")
    await world.result(trained_on.json(), key="tml-ann")


async def test_a_crash_in_the_middle_leaves_a_run_that_can_be_deleted(
    world: AppWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, session = await trained(world)
    await end(world, session)

    def die(*_: Any) -> None:
        raise OSError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(world.service.store.runs, "delete", die)
        await delete(world, run, 500)
    listed = await world.call("GET", f"/training_runs/{run}/checkpoints", 200)
    assert len(listed["checkpoints"]) == 2
    assert len(list((tmp_path / "checkpoints").glob("*/*/*"))) == 2
    await delete(world, run, 200)
    assert folders(tmp_path, run) == []
