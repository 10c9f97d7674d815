"""MinT's `forward_backward_reverse_kl`: its messages, its place in the order, what it computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from wire_client import loss_of, optim_body, save_body

from tinkex.server.work.request_queue import Numbering

PATH = "mint/forward_backward_reverse_kl"
KEYS = ("tml-ann=ann", "tml-bob=bob", "tml-test=ann")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with open_app(tmp_path, api_keys=KEYS) as opened:
        yield opened


def text(tokens: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def tensor(values: list[Any], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def kl_datum(
    targets: list[int], student: list[int], reference: list[int] | None = None
) -> dict[str, Any]:
    return {
        "student_input": text(student),
        "reference_input": text(reference or student),
        "target_tokens": tensor(targets, "int64"),
        "weights": tensor([1.0] * len(targets), "float32"),
    }


async def taught(world: AppWorld, model: str, path: str, *data: Any, **more: Any) -> Any:
    body = {"model_id": model, "reference_model_path": path, "data": list(data), "seq_id": None}
    return await world.result(await world.ok(PATH, body, **more))


async def teacher(world: AppWorld) -> str:
    model = await world.model()
    await world.result((await world.train(model, 1, [3, 4, 5, 6])).json())
    await world.result(await world.ok("optim_step", optim_body(model, 2)))
    body = save_body(model, 3, "teacher")
    return str((await world.result(await world.ok("save_weights", body)))["path"])


def test_numbers_move_behind_requests_that_have_none() -> None:
    numbering = Numbering([4, 5, 9])
    assert [numbering.place(n) for n in range(1, 9)] == [1, 2, 3, 6, 7, 8, 10, 11]
    assert [n for n in range(12) if n in numbering] == [4, 5, 9]
    numbering.take_back(9)
    assert numbering.place(7) == 9


async def test_the_gradient_is_that_of_the_loss_with_a_teacher(world: AppWorld) -> None:
    """With one context for both; the loss of a datum is the half square of the gap, summed."""
    path, (one, two) = await teacher(world), [await world.model() for _ in range(2)]
    answer = await taught(world, one, path, kl_datum([4, 5, 6], [3]))
    assert answer["type"] == "mint_forward_backward_reverse_kl"
    assert answer["metrics"]["num_tokens:sum"] == 3
    loss = answer["outputs"][0]["loss"]["data"][0]
    assert loss > 0
    config = {"teacher": path}
    # [3, 4, 5] -> [4, 5, 6]: `train` predicts each token by itself, so the body is written here.
    body = {
        "model_id": two,
        "seq_id": 1,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": text([3, 4, 5]),
                    "loss_fn_inputs": {
                        "target_tokens": tensor([4, 5, 6], "int64"),
                        "weights": tensor([1.0] * 3, "float32"),
                    },
                }
            ],
            "loss_fn": "reverse_kl",
            "loss_fn_config": config,
        },
    }
    by_hand = await world.result(await world.ok("forward_backward", body))
    assert loss_of(by_hand) == pytest.approx(loss, rel=1e-3)  # of float32 logprobs
    after = []
    for model, first in ((one, 1), (two, 2)):
        await world.result(await world.ok("optim_step", optim_body(model, first)))
        done = await world.result((await world.train(model, first + 1, [3, 4, 5, 6])).json())
        after.append(loss_of(done))
    assert after[0] == after[1]


async def test_the_reference_reads_its_own_context(world: AppWorld) -> None:
    """The toy predicts from the last token, so another one before the targets is another loss."""
    path, model = await teacher(world), await world.model()
    same = await taught(world, model, path, kl_datum([4, 5], [9, 3]))
    longer = await taught(world, model, path, kl_datum([4, 5], [9, 3], [7, 8, 9, 3]))
    other = await taught(world, model, path, kl_datum([4, 5], [9, 3], [7, 8, 9]))
    assert longer["outputs"] == same["outputs"]
    assert other["outputs"] != same["outputs"]


async def test_the_clients_own_numbers_go_on_as_if_it_had_not_been_there(tmp_path: Path) -> None:
    """MinT's client does not count these calls; repeats and restarts find every place again."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        path, model = await teacher(world), await world.model()
        datum = kl_datum([4, 5, 6], [3])
        await world.result((await world.train(model, 1, [3, 4])).json())
        await taught(world, model, path, datum)
        await taught(world, model, path, datum)
        step = await world.ok("optim_step", optim_body(model, 2))
        done = await world.result(step)
        assert done["metrics"]["step:max"] == 1
        again = await world.ok("optim_step", optim_body(model, 2))
        assert again["request_id"] == step["request_id"]
        first = await world.train(model, 1, [3, 4])
        assert first.json()["request_id"] == f"{model}:1"
    async with open_app(tmp_path, api_keys=KEYS) as world:
        again = await world.ok("optim_step", optim_body(model, 2))
        assert again["request_id"] == step["request_id"]
        await taught(world, model, path, datum)
        done = await world.result(await world.ok("optim_step", optim_body(model, 3)))
        assert done["metrics"]["step:max"] == 2


async def test_a_repeat_with_its_idempotency_key_is_gathered_once(world: AppWorld) -> None:
    path, model = await teacher(world), await world.model()
    body = {"model_id": model, "reference_model_path": path, "data": [kl_datum([4, 5], [3])]}
    keyed = {"headers": {"x-idempotency-key": "k"}}
    promises = [await world.ok(PATH, body, **keyed) for _ in range(2)]
    assert promises[0]["request_id"] == promises[1]["request_id"]
    other = await world.ok(PATH, body, headers={"x-idempotency-key": "l"})
    assert other["request_id"] != promises[0]["request_id"]
    # A header has up to 64 KiB, and thousands of keys are remembered.
    long = {"headers": {"x-idempotency-key": "m" * 60_000}}
    promises = [await world.ok(PATH, body, **long) for _ in range(2)]
    assert promises[0]["request_id"] == promises[1]["request_id"]
    assert {len(key) for key in world.service._inboxes[model]._places} == {16}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.5}, "temperature 1, got 0.5"),
        ({"reference_model_path": "mint://x"}, "reference_model_path"),
        ({"reference_model_path": "tinker://x/weights/y"}, "No checkpoint"),
        ({"data": []}, "data"),
        ({"data": [kl_datum([], [3])]}, "target_tokens"),
        ({"data": [kl_datum([4], [3], [10**9])]}, "reference_input"),
        ({"data": [{**kl_datum([4], [3]), "weights": tensor([1.0, 1.0], "float32")}]}, "weights"),
    ],
)
async def test_what_is_wrong_is_named_and_the_run_goes_on(
    world: AppWorld, change: dict[str, Any], said: str
) -> None:
    await world.facts()
    path, model = await teacher(world), await world.model()
    body = {"model_id": model, "reference_model_path": path, "data": [kl_datum([4], [3])]}
    answer = await world.post(PATH, {**body, **change})
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.text
    await world.result((await world.train(model, 1, [3, 4])).json())
    done = await world.result(await world.ok("optim_step", optim_body(model, 2)))
    assert done["metrics"]["step:max"] == 1


async def test_somebody_elses_checkpoint_teaches_nobody(world: AppWorld) -> None:
    path = await teacher(world)
    theirs = await world.model(key="tml-bob")
    body = {"model_id": theirs, "reference_model_path": path, "data": [kl_datum([4], [3])]}
    answer = await world.post(PATH, body, key="tml-bob")
    assert answer.status_code in (400, 404), answer.text
