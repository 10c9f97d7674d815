"""What a restart keeps, and how silent sessions give their memory back and return."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from safetensors.torch import load_file, save_file
from wire_client import loss_of

TOKENS = [3, 1, 4, 1, 5]


async def train_steps(world: AppWorld, model: str, first: int, num_steps: int) -> float:
    loss = 0.0
    for number in range(first, first + 2 * num_steps, 2):
        promise = (await world.train(model, number, TOKENS)).json()
        step = (await world.step(model, number + 1, learning_rate=0.01)).json()
        loss = loss_of(await world.result(promise))
        await world.result(step)
    return loss


async def test_a_restart_keeps_sessions_models_samplers_and_results(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        model = await world.model()
        await train_steps(world, model, 1, 3)
        unfetched = (await world.train(model, 7, TOKENS)).json()
        save = {"model_id": model, "seq_id": 8, "sampling_session_seq_id": 0}
        saved = await world.result(await world.ok("save_weights_for_sampler", save))
    async with open_app(tmp_path) as world:
        again = await world.ok("get_info", {"model_id": model})
        assert again["lora_rank"] == 4
        assert loss_of(await world.result(unfetched)) > 0
        beat = {"session_id": model.split(":")[0]}
        assert (await world.post("session_heartbeat", beat)).status_code == 200
        sample = {
            "sampling_session_id": saved["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 2},
        }
        assert await world.result(await world.ok("asample", sample))


@pytest.mark.timeout(1200)
async def test_a_replay_on_other_base_weights_is_refused_and_goes_on_with_its_own(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot says on which weights the run was made; the run itself does."""
    monkeypatch.setenv("TINKEX_CACHE", str(tmp_path / "cache"))
    base, other = tmp_path / "base", tmp_path / "other.safetensors"
    shutil.copytree(tiny_model, base)
    weights = base / "model.safetensors"
    own = shutil.copy(weights, tmp_path / "own.safetensors")
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, other, metadata={"format": "pt"})
    settings: Any = {"engine": "torch", "models": (str(base),), "aliases": {"toy": str(base)}}
    async with open_app(tmp_path / "data", **settings) as world:
        model = await world.model()
        await train_steps(world, model, 1, 1)
    shutil.copy(other, weights)
    async with open_app(tmp_path / "data", **settings) as world:
        told = await world.result((await world.train(model, 3, TOKENS)).json())
        assert "was trained on base weights" in told["error"]
        assert "--any-base" in told["error"]
    shutil.copy(own, weights)
    async with open_app(tmp_path / "data", **settings) as world:
        assert await train_steps(world, model, 4, 1) > 0


async def test_training_goes_on_after_a_restart_as_if_nothing_happened(tmp_path: Path) -> None:
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 12)
    async with open_app(tmp_path / "restarted", snapshot_every_ops=5) as world:
        model = await world.model()
        await train_steps(world, model, 1, 7)
    async with open_app(tmp_path / "restarted", snapshot_every_ops=5) as world:
        assert await train_steps(world, model, 15, 5) == expected


async def test_gradients_gathered_before_a_restart_are_stepped_after_it(tmp_path: Path) -> None:
    async with open_app(tmp_path / "calm") as world:
        model = await world.model()
        await world.result((await world.train(model, 1, TOKENS)).json())
        expected = (await world.result((await world.step(model, 2)).json()))["metrics"]
    async with open_app(tmp_path / "restarted") as world:
        model = await world.model()
        await world.result((await world.train(model, 1, TOKENS)).json())
    async with open_app(tmp_path / "restarted") as world:
        assert (await world.result((await world.step(model, 2)).json()))["metrics"] == expected


async def test_a_silent_session_is_parked_and_comes_back_by_itself(tmp_path: Path) -> None:
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 6)
    async with open_app(tmp_path / "parked") as world:
        model = await world.model()
        await train_steps(world, model, 1, 4)
        lane = world.service.find_lane(model)
        while not lane.is_idle:  # a snapshot may follow the last answer; busy lanes are not parked
            await asyncio.sleep(0.01)
        await world.service.park_session(model.split(":")[0])
        assert world.service.num_lanes == 0
        snapshots = list((tmp_path / "parked" / "state").glob("*/*"))
        assert len(snapshots) == 1, "the state is saved"
        assert await train_steps(world, model, 9, 2) == expected


async def test_a_snapshot_bounds_the_replay_and_old_ones_go(tmp_path: Path) -> None:
    async with open_app(tmp_path, snapshot_every_ops=4) as world:
        model = await world.model()
        await train_steps(world, model, 1, 10)
        lane = world.service.find_lane(model)
        while not lane.is_idle:
            await asyncio.sleep(0.01)
        await lane._state.snapshot_ended()
        snapshot = world.parts.store.models.get_snapshot(model)
        assert snapshot is not None
        assert 0 <= 20 - snapshot.seq_id < 4
        assert len(list((tmp_path / "state").glob("*/*"))) == 1
        world.parts.store.flush()  # nobody waits for bodies to go
        rows = world.parts.store.journal.since(model, -1)
        assert all(row.body is None for row in rows if row.seq_id <= snapshot.seq_id)


async def test_a_snapshot_made_in_the_middle_of_a_replay_holds_what_it_says(tmp_path: Path) -> None:
    """A replay may be longer than a snapshot's distance: the setting changed, or a save failed."""
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 13)
    async with open_app(tmp_path / "often", snapshot_every_ops=1000) as world:
        model = await world.model()
        await train_steps(world, model, 1, 10)
    for first, num_steps in ((21, 1), (23, 2)):
        async with open_app(tmp_path / "often", snapshot_every_ops=7) as world:
            loss = await train_steps(world, model, first, num_steps)
    assert loss == expected


async def test_a_snapshot_that_was_due_when_the_worker_died_is_not_made_of_older_state(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 6)
    async with open_app(tmp_path / "killed", snapshot_every_ops=4) as world:
        model = await world.model()
        await train_steps(world, model, 1, 3)
        worker = world.service.workers.pool.members[0]
        generation = worker.generation
        worker._process.kill()  # type: ignore[union-attr]
        while worker.generation == generation or not worker.is_ready:
            await asyncio.sleep(0.01)
        world.service.find_lane(model)._snapshot_due = True
        await train_steps(world, model, 7, 1)
    async with open_app(tmp_path / "killed") as world:
        assert await train_steps(world, model, 9, 2) == expected


async def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    async with open_app(tmp_path, snapshot_every_ops=4) as world:
        model = await world.model()
        state = world.service.find_lane(model)._state
        adopt, gate = state._adopt, asyncio.Event()

        async def adopt_later(*args: Any) -> None:
            await gate.wait()
            await adopt(*args)

        state._adopt = adopt_later  # type: ignore[method-assign]
        await train_steps(world, model, 1, 3)
        store = world.parts.store
        assert store.models.get_snapshot(model) is None
        assert all(row.body for row in store.journal.since(model, 0)), (
            "the journal still has it all"
        )
        gate.set()
        await state.snapshot_ended()
        assert store.models.get_snapshot(model) is not None


async def test_a_worker_that_dies_with_a_snapshot_under_way_costs_a_replay(tmp_path: Path) -> None:
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 8)
    async with open_app(
        tmp_path / "killed", snapshot_every_ops=4, engine="toy:latency_s=0.05"
    ) as world:
        model = await world.model()
        state, worker = world.service.find_lane(model)._state, world.service.workers.pool.members[0]
        begin, killed_at = state.begin_snapshot, []

        async def begin_and_die(seq_id: int) -> None:
            await begin(seq_id)
            if not killed_at:
                killed_at.append(seq_id)
                worker._process.kill()  # type: ignore[attr-defined]

        state.begin_snapshot = begin_and_die  # type: ignore[method-assign]
        await train_steps(world, model, 1, 2)
        assert await train_steps(world, model, 5, 6) == expected
        assert killed_at == [4]


async def test_loading_a_checkpoint_survives_its_deletion_and_a_crash(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        model = await world.model()
        loss = await train_steps(world, model, 1, 3)
        save = {"model_id": model, "seq_id": 7, "path": "a"}
        path = (await world.result(await world.ok("save_weights", save)))["path"]
        session = await world.session()
        load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = await world.result(await world.ok("load_weights", load))
        assert loaded["model_id"] == f"{session}:train:0"
        other = loaded["model_id"]
        deleted = await world.http.delete(
            f"/api/v1/training_runs/{model}/checkpoints/weights/a", headers={"x-api-key": "tml-x"}
        )
        assert deleted.status_code == 204
        world.service.workers.pool.members[0]._process.kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.2)
        after = loss_of(await world.result((await world.train(other, 1, TOKENS)).json()))
        assert after < loss


async def test_saved_optimizer_state_continues_bit_for_bit_and_weights_only_starts_afresh(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path) as world:
        model = await world.model()
        await train_steps(world, model, 1, 3)
        save = {"model_id": model, "seq_id": 7, "path": "a"}
        path = (await world.result(await world.ok("save_weights", save)))["path"]
        expected = await train_steps(world, model, 8, 3)
        losses = {}
        for optimizer in (True, False):
            session = await world.session()
            load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": optimizer}
            loaded = await world.result(await world.ok("load_weights", load))
            losses[optimizer] = await train_steps(world, loaded["model_id"], 1, 3)
        assert losses[True] == expected
        assert losses[False] != expected


async def test_a_request_that_kills_its_worker_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with open_app(tmp_path, engine="toy:latency_s=1.5") as world:
        model = await world.model()
        promise = (await world.train(model, 1, TOKENS)).json()

        async def killer() -> None:
            worker = world.service.workers.pool.members[0]
            while True:
                await worker.wait_ready()
                if any("#" in job_id and ":1#" in job_id for job_id in worker._pending):
                    worker._process.kill()  # type: ignore[union-attr]
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.02)

        task = asyncio.create_task(killer())
        body = {"request_id": promise["request_id"]}
        for _ in range(40):
            response = await world.post("retrieve_future", body)
            if response.status_code == 200:
                break
        task.cancel()
        assert "given up" in response.json()["error"]
        assert response.json()["category"] == "server"
        done = (await world.train(model, 2, TOKENS)).json()
        assert loss_of(await world.result(done)) > 0


async def test_a_worker_that_dies_in_the_middle_of_a_replay_costs_no_state(tmp_path: Path) -> None:
    """Many requests are under way then, and they all are lost together: that is one loss."""
    async with open_app(tmp_path / "calm") as world:
        expected = await train_steps(world, await world.model(), 1, 8)
    async with open_app(tmp_path / "killed", engine="toy:latency_s=0.2") as world:
        model = await world.model()
        await train_steps(world, model, 1, 7)
        worker, lane = world.service.workers.pool.members[0], world.service.find_lane(model)
        worker._process.kill()  # type: ignore[attr-defined]
        last = asyncio.create_task(train_steps(world, model, 15, 1))
        num_kills = 0
        while num_kills < 3 and not last.done():
            await asyncio.sleep(0.005)
            if sum(f.request.mode == "replay" for f in lane._flights._all) >= 5:
                generation, num_kills = worker.generation, num_kills + 1
                worker._process.kill()  # type: ignore[attr-defined]
                while worker.generation == generation:
                    await asyncio.sleep(0.005)
        assert num_kills
        assert await last == expected


async def test_lost_state_is_said_and_nothing_else_is_made_up(tmp_path: Path) -> None:
    """A model whose snapshot is gone must not go on from scratch."""
    async with open_app(tmp_path) as world:
        model = await world.model()
        await train_steps(world, model, 1, 2)
        await world.service.park_session(model.split(":")[0])
        shutil.rmtree(tmp_path / "state")
        failed = await world.result((await world.train(model, 5, TOKENS)).json())
        assert failed["category"] == "server"
        assert "could not be restored" in failed["error"]
        assert world.parts.store.models.get(model).corrupted


async def test_a_model_that_was_never_created_says_so_ever_after(tmp_path: Path) -> None:
    async with open_app(tmp_path, models=("toy",), aliases={"gone": "nowhere"}) as world:
        session = await world.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "gone"}
        created = await world.result(await world.ok("create_model", body))
        assert created["category"] == "user"
        model = f"{session}:train:0"
        failed = await world.result((await world.train(model, 1, TOKENS)).json())
        assert "was never created" in failed["error"]
    async with open_app(tmp_path, models=("toy",), aliases={"gone": "nowhere"}) as world:
        failed = await world.result((await world.train(model, 2, TOKENS)).json())
        assert "was never created" in failed["error"]
