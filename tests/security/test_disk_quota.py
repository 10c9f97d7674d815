"""The quota `disk_bytes` bounds everything that a user has stored, whatever it is called."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_world import AppWorld, open_app
from fuzz import talking_toy
from heavy_bodies import sparse_request
from patience import soon
from wire_client import loss_of, model_body, save_body, train_body

from tinkex.server.files.folders import folder_size
from tinkex.store import sampling

KEYS = ("tml-ann=ann", "tml-bob=bob")
ANN = {"key": "tml-ann"}


def tokens_of(number: int, count: int = 3000) -> list[int]:
    """Far apart, so that the toy's adapter and the journal grow by something."""
    return [(number * 997 + i * 31) % 30_000 for i in range(count)]


async def trained(world: AppWorld, number: int = 0, *, steps: int = 2) -> tuple[str, int]:
    """A model of Ann's with some weights, and its next number."""
    model = await world.model(number=number, **ANN)
    for step in range(steps):
        passed = await world.train(model, 2 * step + 1, tokens_of(step), **ANN)
        assert passed.status_code == 200, passed.text
        await world.result(passed.json(), **ANN)
        await world.result((await world.step(model, 2 * step + 2, **ANN)).json(), **ANN)
    return model, 2 * steps + 1


async def size_of_save(world: AppWorld) -> int:
    """The bytes of a checkpoint of such a model; nothing of it stays."""
    model, seq_id = await trained(world)
    saved = await world.ok("save_weights", save_body(model, seq_id, "first"), **ANN)
    path = (await world.result(saved, **ANN))["path"]
    size = world.service.store.stored.of("ann")["checkpoints"]
    await world.call("DELETE", f"/training_runs/{model}/checkpoints/weights/first", 204)
    assert path
    return size


def limit(world: AppWorld, num_bytes: float) -> None:
    world.parts.quotas._defaults["disk_bytes"] = num_bytes


async def room(world: AppWorld, num_bytes: float) -> None:
    """Let Ann have so many bytes more than she has now."""
    await world.service.ends.caught_up()  # else a result has more bytes reserved than it takes
    limit(world, world.service.store.stored.total("ann") + num_bytes)


def assert_final(answer: httpx.Response, *words: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (400, "quota"), answer.text
    assert "retry-after" not in answer.headers
    for word in ("disk quota", *words):
        assert word in answer.json()["detail"]


async def assert_counted(world: AppWorld) -> None:
    store = world.service.store

    def is_equal() -> bool:  # nothing is written between the two when the last end is
        recounted = store.recount_bytes()
        return all(store.stored.of(user) == recounted.get(user, {}) for user in ("ann", "bob"))

    await soon(is_equal, lambda: f"{store.stored.of('ann')} is not {store.recount_bytes()}")


async def test_saves_that_were_queued_together_have_no_more_room_than_one_by_one(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        size = await size_of_save(world)
        model, seq_id = await trained(world, steps=2)
        await room(world, 2.5 * size)
        bodies = [save_body(model, seq_id + n, f"s{n}") for n in range(18)]
        promises = [await world.ok("save_weights", body, **ANN) for body in bodies]
        results = [await world.result(promise, **ANN) for promise in promises]
        failed = [result for result in results if "error" in result]
        assert len(failed) == 16
        assert {result["category"] for result in failed} == {"user"}
        assert "delete some (`tinkex checkpoint delete`)" in failed[0]["error"]
        assert world.service.store.stored.of("ann")["checkpoints"] <= 2.5 * size
        await soon(lambda: folder_size(tmp_path / "checkpoints") <= 2.5 * size)
        await assert_counted(world)


async def test_unnamed_weights_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        size = await size_of_save(world)
        model, seq_id = await trained(world)
        await room(world, 3 * size)
        for n in range(12):
            body = {"model_id": model, "seq_id": seq_id + n, "sampling_session_seq_id": n}
            promise = await world.ok("save_weights_for_sampler", body, **ANN)
            result = await world.result(promise, **ANN)
            assert "sampling_session_id" in result, result
        assert world.service.store.stored.of("ann")["samplers"] <= 3 * size
        await soon(lambda: folder_size(tmp_path / "ephemeral") <= 3 * size)
        await assert_counted(world)


async def test_requests_of_a_user_without_room_are_refused_for_good(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model, seq_id = await trained(world)
        await room(world, 10_000)
        refused = await world.train(model, seq_id, tokens_of(9), **ANN)
        assert_final(refused, "unload models", "requests of models")
        again = await world.train(model, seq_id, tokens_of(9), **ANN)
        assert again.json() == refused.json(), "its number is used, and a repeat is told the same"
        await soon(lambda: world.service.find_lane(model).is_idle)
        await world.ok("unload_model", {"model_id": model}, **ANN)
        after = await trained(world, steps=0)
        passed = await world.train(after[0], after[1], tokens_of(9), **ANN)
        assert passed.status_code == 200, "what was deleted is room again"
        await assert_counted(world)


@pytest.mark.parametrize("form", ["dense", "sparse"])
async def test_results_of_queued_requests_have_room_before_they_are_computed(
    tmp_path: Path, form: str
) -> None:
    """Sparse targets are a few hundred bytes, and their logprobs a number for each cell."""
    async with open_app(tmp_path, api_keys=KEYS, engine="toy:latency_s=0.3") as world:
        model = await world.model(**ANN)
        await room(world, 400_000)
        most = world.service.store.stored.total("ann") + 400_000

        async def send(seq_id: int) -> httpx.Response:
            if form == "dense":
                return await world.train(model, seq_id, tokens_of(seq_id), **ANN)
            body = sparse_request(model, seq_id, columns=1500)
            return await world.post("forward_backward", body, **ANN)

        answers = [await send(seq_id) for seq_id in range(1, 41)]
        taken = [answer.json() for answer in answers if answer.status_code == 200]
        assert 2 <= len(taken) < 40
        assert_final(answers[-1])
        stored = world.service.store.stored
        await soon(lambda: stored.of("ann")["results"] >= len(taken) * 12_000)
        assert stored.total("ann") <= most
        await soon(lambda: not stored._reserved)
        await assert_counted(world)


async def test_a_teachers_logprobs_have_room_before_they_are_computed(tmp_path: Path) -> None:
    """They are kept with the request until the model's state is saved, and told in the result."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        await world.facts()
        model, tokens, config = await world.model(**ANN), tokens_of(1), {"teacher": "toy"}
        outputs = 4 * len(tokens)
        size = len(train_body(model, 1, tokens, config=config)) + 2.5 * outputs
        await room(world, size)
        assert_final(await world.train(model, 1, tokens, config=config, **ANN))
        await room(world, size + outputs)
        passed = await world.train(model, 2, tokens, config=config, **ANN)
        assert passed.status_code == 200, passed.text
        assert loss_of(await world.result(passed.json(), **ANN)) > 0
        await assert_counted(world)


async def test_parked_models_are_bounded(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        models = [(await trained(world))[0] for _ in range(6)]
        await room(world, 500_000)
        for model in models:
            await world.service.park_session(model.split(":")[0])
        stored = world.service.store.stored
        # Folders that had no room go a moment later.
        await soon(lambda: len(list((tmp_path / "state").glob("*/*"))) == 2)
        assert 0 < stored.of("ann")["state"] == folder_size(tmp_path / "state")
        await assert_counted(world)
        assert stored.total("ann") <= world.parts.quotas.limit("ann", "disk_bytes")
        limit(world, 0)
        passed = await world.train(models[-1], 5, tokens_of(1), **ANN)
        loss = await world.result(passed.json(), **ANN)
        assert loss, "a model that had no room for its state is rebuilt from its requests"


async def test_a_load_that_has_no_room_for_its_state_is_refused(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model, seq_id = await trained(world)
        saved = await world.ok("save_weights", save_body(model, seq_id, "first"), **ANN)
        path = (await world.result(saved, **ANN))["path"]
        await room(world, 10_000)
        body = {"session_id": await world.session(**ANN), "model_seq_id": 0, "path": path}
        assert_final(await world.post("load_weights", body, **ANN), "checkpoints")


async def test_a_load_whose_room_is_taken_while_it_waits_fails_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded and not saved, it would be lost with the checkpoint, which its owner may delete."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model, seq_id = await trained(world)
        saved = await world.ok("save_weights", save_body(model, seq_id, "first"), **ANN)
        path = (await world.result(saved, **ANN))["path"]
        passed = (await world.train(model, seq_id + 1, [1, 2], **ANN)).json()
        before = loss_of(await world.result(passed, **ANN))
        body = {"model_id": model, "seq_id": seq_id + 2, "path": path}
        monkeypatch.setattr(world.service.shelf.disk_quota, "require", lambda *_, **__: None)
        await room(world, 2000)
        failed = await world.result(await world.ok("load_weights", body, **ANN), **ANN)
        assert "cannot be kept" in failed["error"]
        assert failed["category"] == "user"
        limit(world, 0)
        passed = (await world.train(model, seq_id + 3, [1, 2], **ANN)).json()
        assert loss_of(await world.result(passed, **ANN)) == before


def loss_body(session_id: str, number: int, length: int = 8) -> dict[str, Any]:
    places = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    call = {"op": "call_function", "name": "loss", "target": "torch.sum"}
    nodes = [*places, call | {"args": [{"ref": "logprobs"}]}]
    output = {"op": "output", "name": "o" * length, "target": "output"}
    output["args"] = [{"tuple": [{"ref": "loss"}, {"dict": {}}]}]
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "l",
        "inputs": [{"name": "logprobs", "rank": 2}],
        "graph": {"format": 1, "nodes": [*nodes, output]},
    }


async def test_traced_losses_count_and_have_a_number_and_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_LOSSES", 4)
    async with open_app(tmp_path, api_keys=KEYS) as world:
        session = await world.session(**ANN)
        for number in range(4):
            await world.ok("create_custom_loss", loss_body(session, number), **ANN)
        await assert_counted(world)
        size = world.service.store.stored.of("ann")["losses"]
        assert size > 4 * 200
        fifth = await world.post("create_custom_loss", loss_body(session, 4), **ANN)
        assert (fifth.status_code, "4 are the most" in fifth.text) == (400, False)
        assert "4 traced losses" in fifth.json()["detail"]
        again = await world.post("create_custom_loss", loss_body(session, 3), **ANN)
        assert again.status_code == 200, "a repeat keeps nothing new"
        monkeypatch.setattr(sampling, "MAX_LOSSES", 100)
        monkeypatch.setattr(sampling, "MAX_LOSS_BYTES", size + 10)
        fifth = await world.post("create_custom_loss", loss_body(session, 4), **ANN)
        assert (fifth.status_code, f"{size} bytes" in fifth.text) == (400, True)
        monkeypatch.setattr(sampling, "MAX_LOSS_BYTES", 10**9)
        await room(world, 10)
        fifth = await world.post("create_custom_loss", loss_body(session, 4), **ANN)
        assert_final(fifth, "traced losses", "end the sessions")
        again = await world.post("create_custom_loss", loss_body(session, 3), **ANN)
        assert again.status_code == 200, "a repeat needs no room"
        store = world.service.store
        await store.call(store.sessions.finish, session, {"type": "client_finished"})
        assert await store.call(store.sampling.forget_losses, time.time() + 1, 0.0) == 4
        assert "losses" not in store.stored.of("ann")


@pytest.mark.parametrize("stream", [False, True])
async def test_recorded_conversations_that_run_together_are_bounded(
    tmp_path: Path, stream: bool
) -> None:
    async with open_app(tmp_path / "d", api_keys=KEYS, **talking_toy(tmp_path / "m")) as world:
        await world.facts()
        await room(world, 200_000)
        user = {"role": "user", "content": "hi " * 1000}

        async def chat(number: int) -> str:
            body = {"model": "toy", "messages": [user], "n": 8, "max_tokens": 4, "stream": stream}
            body |= {"trajectory": f"t{number}"}
            headers = {"authorization": "Bearer tml-ann"}
            return (await world.http.post("/v1/chat/completions", json=body, headers=headers)).text

        told = await asyncio.gather(*map(chat, range(16)))
        refused = [text for text in told if "disk quota" in text]
        stored = world.service.store.stored
        assert 0 < stored.total("ann") <= world.parts.quotas.limit("ann", "disk_bytes")
        assert 0 < len(refused) < 16
        await assert_counted(world)
        assert not stored._reserved


async def test_copies_of_a_public_checkpoint_are_bounded(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        size = await size_of_save(world)
        model, seq_id = await trained(world)
        saved = await world.ok("save_weights", save_body(model, seq_id, "first"), **ANN)
        path = (await world.result(saved, **ANN))["path"]
        await room(world, 2.5 * size)
        copy = {"source_path": path}
        answers = await asyncio.gather(*(world.post("copy_weights", copy, **ANN) for _ in range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [400] * 6
        assert_final(next(a for a in answers if a.status_code == 400), "delete some")
        await assert_counted(world)


async def test_a_restart_counts_the_same(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model, seq_id = await trained(world)
        saved = await world.ok("save_weights", save_body(model, seq_id, "first"), **ANN)
        await world.result(saved, **ANN)
        await world.service.park_session(model.split(":")[0])
        await world.service.ends.caught_up()
        before = world.service.store.stored.of("ann")
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert world.service.store.stored.of("ann") == before
        assert set(before) >= {"checkpoints", "state", "results"}


async def test_sixty_models_at_once_are_no_more_than_the_limit(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, max_user_models=3) as world:
        session = await world.session(**ANN)
        bodies = [model_body(session, number) for number in range(60)]
        answers = await asyncio.gather(*(world.post("create_model", b, **ANN) for b in bodies))
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (3, 57)
        assert world.service.store.models.count_loaded(["ann"]) == {"ann": 3}
        made = bodies[statuses.index(200)]
        again = await world.post("create_model", made, **ANN)
        assert again.status_code == 200, "a repeat makes nothing new, and is not refused"


async def test_sixty_sessions_at_once_are_no_more_than_the_limit(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, max_user_sessions=5) as world:
        body = {"tags": [], "sdk_version": "test"}
        answers = await asyncio.gather(
            *(world.post("create_session", body, **ANN) for _ in range(60))
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 55
