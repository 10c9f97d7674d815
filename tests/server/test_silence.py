"""What a session that never comes back leaves behind, and when it goes."""

from __future__ import annotations

import time
from pathlib import Path

from app_world import AppWorld, open_app

TOKENS = [3, 1, 4, 1, 5]
DAY_S = 86_400.0


async def trained(world: AppWorld) -> tuple[str, str]:
    """A model with two requests behind it, and the path of its checkpoint."""
    model = await world.model()
    await world.result((await world.train(model, 1, TOKENS)).json())
    await world.result((await world.step(model, 2)).json())
    save = {"model_id": model, "seq_id": 3, "path": "a"}
    return model, (await world.result(await world.ok("save_weights", save)))["path"]


def bodies(world: AppWorld, model: str) -> list[bytes | None]:
    return [row.body for row in world.parts.store.journal.since(model, -1)]


async def test_state_goes_after_its_time_and_checkpoints_stay(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        parked, path = await trained(world)
        await world.service.park_session(parked.split(":")[0])
        assert len(list((tmp_path / "state").glob("*/*"))) == 1, "parked: one snapshot"
        abandoned, _ = await trained(world)
    async with open_app(tmp_path) as world:  # nobody comes back after a restart
        store = world.parts.store
        await world.service.drop_silent(time.time() + 13 * DAY_S)
        assert store.models.get_snapshot(parked) is not None
        assert any(bodies(world, abandoned))
        await world.service.drop_silent(time.time() + 15 * DAY_S)
        assert not list((tmp_path / "state").glob("*"))
        assert store.models.get_snapshot(parked) is None
        store.flush()
        assert not any(bodies(world, parked) + bodies(world, abandoned))
        refused = await world.train(parked, 4, TOKENS)
        assert refused.status_code == 400
        assert "its state was dropped (state_ttl_s)" in refused.json()["detail"]
        load = {"session_id": await world.session(), "model_seq_id": 0, "path": path}
        assert (await world.result(await world.ok("load_weights", load)))["model_id"]


async def test_curves_go_with_the_state_of_their_run(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        silent, _ = await trained(world)
        ended, _ = await trained(world)
        await world.ok("unload_model", {"model_id": ended})
    async with open_app(tmp_path) as world:
        store, service = world.parts.store, world.service
        assert "loss_per_token" in await service.curves.of_run(silent)
        await service.drop_silent(time.time() + 13 * DAY_S)
        assert store.curves.of_run(silent)
        assert store.curves.of_run(ended)
        await service.drop_silent(time.time() + 15 * DAY_S)
        await service.curves.flush()
        assert store.curves.of_run(silent) == store.curves.of_run(ended) == []
        assert await service.curves.of_run(silent) == {}


async def test_a_model_in_use_keeps_its_state_whatever_its_session_says(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        model, _ = await trained(world)
        await world.service.drop_silent(time.time() + 15 * DAY_S)
        assert (await world.train(model, 4, TOKENS)).status_code == 200


async def test_a_heartbeat_keeps_the_state_of_a_parked_model(tmp_path: Path) -> None:
    async with open_app(tmp_path, state_ttl_s=60.0) as world:
        model, _ = await trained(world)
        session, store = model.split(":")[0], world.parts.store
        await world.service.park_session(session)
        store.flush()
        store.models.touch(model, time.time() - 3600)
        store.sessions.heartbeat(session, time.time() - 30)
        store.flush()
        await world.service.drop_silent(time.time())
        assert (await world.train(model, 4, TOKENS)).status_code == 200


async def closed(world: AppWorld, model: str) -> None:
    session = model.split(":")[0]
    reason = {"reason": {"type": "success"}, "detail": None}
    answer = await world.http.post(f"/api/v1/sessions/{session}/finish", json=reason)
    assert answer.status_code == 204, answer.text


async def test_a_run_that_its_client_closed_keeps_little_and_not_for_long(tmp_path: Path) -> None:
    """No snapshot is written for it; for an hour the journal could bring it back."""
    async with open_app(tmp_path) as world:
        model, path = await trained(world)
        twin, _ = await trained(world)
        await closed(world, model)
        await closed(world, twin)
        assert not list((tmp_path / "state").glob("*/*"))
        await world.result((await world.train(twin, 4, TOKENS)).json())
    async with open_app(tmp_path) as world:
        await world.service.drop_silent(time.time() + 1800)
        assert any(bodies(world, model))
        await world.service.drop_silent(time.time() + 2 * 3600)
        world.parts.store.flush()
        assert not any(bodies(world, model))
        curves = await world.service.curves.of_run(model)
        assert "loss_per_token" in curves, "its curves are looked at later"
        load = {"session_id": await world.session(), "model_seq_id": 0, "path": path}
        assert (await world.result(await world.ok("load_weights", load)))["model_id"]
