"""A teacher of somebody else: read while it is shared, and never through what others asked."""

from __future__ import annotations

from app_world import AppWorld
from wire_client import PROTO, train_body

ANN, BOB = "tml-ann", "tml-bob"


async def _teacher(world: AppWorld) -> str:
    """A checkpoint of Ann's."""
    model = await world.model(key=ANN)
    body = {"model_id": model, "path": "teacher", "seq_id": 1}
    saved = await world.ok("save_weights_for_sampler", body, key=ANN)
    return str((await world.result(saved, key=ANN))["path"])


async def _share(world: AppWorld, path: str, method: str) -> None:
    run, kind, name = path.removeprefix("tinker://").split("/")
    await world.call(method, f"/training_runs/{run}/checkpoints/{kind}/{name}/publish", 204)


def _taught(model: str, seq_id: int, teacher: str) -> bytes:
    config = {"teacher": teacher}
    return train_body(model, seq_id, [1, 2, 3], loss_fn="kl_divergence", config=config)


async def test_a_private_checkpoint_teaches_its_owner_alone(two_keys: AppWorld) -> None:
    path, mine = await _teacher(two_keys), await two_keys.model(key=BOB)
    answer = await two_keys.post("forward_backward", _taught(mine, 1, path), key=BOB, headers=PROTO)
    assert answer.status_code == 400
    assert "No checkpoint" in answer.text
    absent = path.replace("teacher", "absent")
    other = await two_keys.post(
        "forward_backward", _taught(mine, 2, absent), key=BOB, headers=PROTO
    )
    assert (
        other.text.replace("absent", "teacher") == answer.text
    )  # nor does it say that it is there


async def test_a_queued_pass_is_judged_when_its_turn_comes(two_keys: AppWorld) -> None:
    path, mine = await _teacher(two_keys), await two_keys.model(key=BOB)
    await _share(two_keys, path, "POST")
    late = await two_keys.ok("forward_backward", _taught(mine, 3, path), key=BOB, headers=PROTO)
    early = await two_keys.ok("forward_backward", _taught(mine, 1, path), key=BOB, headers=PROTO)
    assert isinstance(await two_keys.result(early, key=BOB), bytes)
    await _share(two_keys, path, "DELETE")
    await two_keys.ok("forward_backward", train_body(mine, 2, [1]), key=BOB, headers=PROTO)
    answer = await two_keys.result(late, key=BOB)  # its logprobs are known from the pass before
    assert "No checkpoint" in answer["error"]


async def test_what_one_user_had_scored_is_scored_again_for_another(two_keys: AppWorld) -> None:
    """The time and the bill of a pass would tell a neighbour which texts were scored before."""
    for key in (ANN, BOB):
        model = await two_keys.model(key=key)
        promise = await two_keys.ok(
            "forward_backward", _taught(model, 1, "toy"), key=key, headers=PROTO
        )
        await two_keys.result(promise, key=key)
    two_keys.service.ends.flush()
    store = two_keys.parts.store
    store.flush()
    for used in await store.call(store.usage.used, "user", 0.0, 10):
        assert used.counts["sampling_prefill"] == 4
        assert "sampling_prefill_cached" not in used.counts
