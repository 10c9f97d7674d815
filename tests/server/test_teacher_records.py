"""What a teacher leaves behind: use that is billed, logprobs that are kept, runs that come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from app_world import AppWorld
from server_process import ServerProcess
from wire_client import PROTO, WireClient, loss_of, train_body

from tinkex.server.jobs.score_cache import ScoreCache
from tinkex.wire import tinker_public_pb2 as pb

TOKENS = [3, 4, 5, 6, 7]
TAUGHT = {"loss_fn": "kl_divergence", "config": {"teacher": "toy"}}


async def usage(world: AppWorld) -> dict[str, float]:
    world.service.ends.flush()
    store = world.parts.store
    store.flush()
    (used,) = await store.call(store.usage.used, "user", 0.0, 10)
    return dict(used.counts)


async def test_a_teacher_is_billed_as_prefill_once_and_then_as_cached(app_world: AppWorld) -> None:
    model = await app_world.model()
    results = []
    for seq_id in (1, 2):
        promise = await app_world.train(model, seq_id, TOKENS, **TAUGHT)
        results.append(await app_world.result(promise.json()))
    used = await usage(app_world)
    assert used["training"] == 2 * len(TOKENS)
    assert used["sampling_prefill"] == len(TOKENS) + 1  # and the last target
    assert used["sampling_prefill_cached"] == len(TOKENS) + 1
    assert "sampling_sample" not in used
    first, second = (pb.ForwardBackwardOutput.FromString(each) for each in results)
    assert first.loss_fn_outputs == second.loss_fn_outputs


def test_the_cache_forgets_what_was_unused_for_longest() -> None:
    cache = ScoreCache(room_bytes=3000)
    for name in (b"a", b"b"):
        cache.put(name, np.zeros(250, np.float32))
    assert cache.get(b"a") is not None
    cache.put(b"c", np.zeros(250, np.float32))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert cache.size_bytes <= 3000


async def test_a_teacher_that_is_gone_when_its_turn_comes_fails_that_request_alone(
    app_world: AppWorld,
) -> None:
    model = await app_world.model()
    saved = await app_world.ok(
        "save_weights_for_sampler", {"model_id": model, "path": "t", "seq_id": 1}
    )
    path = (await app_world.result(saved))["path"]
    taught = train_body(model, 3, TOKENS, loss_fn="kl_divergence", config={"teacher": path})
    promise = await app_world.ok("forward_backward", taught, headers=PROTO)  # waits for number 2
    run, kind, name = path.removeprefix("tinker://").split("/")
    await app_world.call(
        "DELETE", f"/training_runs/{run}/checkpoints/{kind}/{name}", 204, key="tml-test"
    )
    await app_world.train(model, 2, TOKENS)
    answer = await app_world.result(promise)
    assert "No checkpoint" in answer["error"]
    assert answer["category"] == "user"
    after = await app_world.train(model, 4, TOKENS)
    assert loss_of(await app_world.result(after.json()))


# ---------------------------------------------------------------------------------- kills

FLAGS = ("--engine", "toy:latency_s=0.01", "--deterministic", "--snapshot-every", "1000")


def taught_run(server: ServerProcess, disturb: Callable[[str], None]) -> list[float]:
    """Twelve steps with a teacher that is deleted in the middle; gives the losses."""
    client = WireClient(server.base_url)
    try:
        session = client.session()
        elder = client.model(session, number=0)
        client.result(client.train(elder, 1, [9, 8, 7, 6]))
        client.result(client.step(elder, 2, learning_rate=0.5))
        body = {"model_id": elder, "path": "elder", "seq_id": 3}
        path = client.result(client.ok("save_weights_for_sampler", body))["path"]
        model, losses = client.model(session, number=1), []
        for step in range(12):
            if step == 6:
                run, kind, name = path.removeprefix("tinker://").split("/")
                url = f"{server.base_url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
                assert client.http.delete(url, headers={"x-api-key": "tml-x"}).status_code == 204
                disturb("after the teacher is gone")
            taught = {
                "loss_fn": "kl_divergence",
                "config": {"teacher": path if step < 6 else "toy"},
            }
            tokens = [(step * 5 + i) % 50 for i in range(8)]
            promise = client.train(model, 2 * step + 1, tokens, **taught)
            done = client.step(model, 2 * step + 2, learning_rate=0.1)
            if step in (3, 9):
                disturb("in the middle")
            losses.append(loss_of(client.result(promise)))
            client.result(done)
        return losses
    finally:
        client.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with ServerProcess(tmp_path_factory.mktemp("calm"), *FLAGS) as server:
        return taught_run(server, lambda when: None)


def test_a_taught_run_goes_on_bit_for_bit_when_its_worker_is_killed(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    with ServerProcess(tmp_path, *FLAGS) as server:
        assert taught_run(server, lambda when: server.kill_worker()) == undisturbed
        assert "replaying" in server.log


def test_a_taught_run_goes_on_bit_for_bit_when_the_server_is_killed(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """The journal holds what the teacher said: its checkpoint is deleted by then."""
    with ServerProcess(tmp_path, *FLAGS) as server:

        def restart(when: str) -> None:
            server.kill()
            server.start()

        assert taught_run(server, restart) == undisturbed
        assert "replaying" in server.log
