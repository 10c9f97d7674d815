"""An estimate is made of what this server measured, and says what it has not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app

WORK = {"base_model": "toy", "rank": 4, "training_tokens": 1000, "steps": 10}
KEYS = ("tml-ann=ann",)


async def _estimate(world: AppWorld, status: int = 200, **asked: Any) -> Any:
    answer = await world.http.post(
        "/tinkex/v1/estimate", json=WORK | asked, headers={"x-api-key": "tml-ann"}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


async def _train(world: AppWorld) -> str:
    model = await world.model(key="tml-ann")
    for number in (1, 3):
        promise = (await world.train(model, number, [1, 2, 3, 4], key="tml-ann")).json()
        step = (await world.step(model, number + 1, key="tml-ann")).json()
        await world.result(promise, key="tml-ann")
        await world.result(step, key="tml-ann")
    return str(model)


async def test_what_was_never_done_here_is_named_and_not_guessed(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        before = await _estimate(world, state_saves=1)
        assert before.get("device_seconds") is None
        assert before["unmeasured"] == [
            "forward_backward on toy",
            "optim_step on toy",
            "save_weights on toy",
        ]
        assert before.get("checkpoint_bytes") is None
        assert not before.get("rates")
        model = await _train(world)
        after = await _estimate(world)
        assert after["unmeasured"] == []
        rates = after["rates"]
        expected = 1000 / rates["forward_backward"] + 10 / rates["optim_step"]
        assert after["device_seconds"] == pytest.approx(expected)
        assert (await _estimate(world, sample_tokens=5))["unmeasured"] == ["sample on toy"]
        save = {"model_id": model, "seq_id": 5, "path": "a"}
        promise = await world.ok("save_weights", save, key="tml-ann")
        await world.result(promise, key="tml-ann")
        one, two = [(await _estimate(world, state_saves=n))["checkpoint_bytes"] for n in (1, 2)]
        assert two == 2 * one > 0
        assert (await _estimate(world, state_saves=1, rank=8))["checkpoint_bytes"] == 2 * one
    async with open_app(tmp_path, api_keys=KEYS) as world:  # kept over a restart
        assert (await _estimate(world, state_saves=1)).get("device_seconds") is not None


async def test_money_and_what_is_left_of_budgets(tmp_path: Path) -> None:
    prices = ("training=1000000", "sampling_sample=2000000")
    async with open_app(tmp_path, api_keys=KEYS, prices=prices) as world:
        run = await world.model(key="tml-ann")
        for path, amount in (("user/ann/tokens", 1500), (f"run/{run}/money", 900)):
            url = f"/tinkex/v1/budgets/{path}"
            headers = {"x-api-key": "tml-ann"}
            await world.http.put(url, json={"amount": amount}, headers=headers)
        scored = {"toy": 100, "toy:peft:64": 200}
        told = await _estimate(world, sample_tokens=100, scored_tokens=scored)
        assert told["money"] == 1200
        [outlook] = told["budgets"]
        assert (outlook["left"], outlook["needed"], outlook["is_passed"]) == (1500, 1400, False)
        told = await _estimate(world, sample_tokens=501, run_id=run)
        assert [(one["needed"], one["is_passed"]) for one in told["budgets"]] == [
            (1501, True),
            (2002, True),
        ]


async def test_wrong_work_is_refused(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, models=("toy",)) as world:
        assert "no base model 'none'" in (await _estimate(world, 400, base_model="none"))["detail"]
        assert "none" in (await _estimate(world, 400, scored_tokens={"none": 1}))["detail"]
        await world.facts()
        for too_long in (
            {"base_model": "toy:peft:99999"},
            {"scored_tokens": {"toy:peft:99999": 1}},
        ):
            assert (
                "asks for a context of 99999" in (await _estimate(world, 400, **too_long))["detail"]
            )
        await _estimate(world, 400, training_tokens=-1)
        await _estimate(world, 400, rank=0)
        await _estimate(world, 404, run_id="other:train:0")
