"""Nobody uses more than a budget has, whatever runs side by side; no work is lost at its edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from patience import PATIENCE_S, soon

from tinkex.engine.jobs import Event, Tokens
from tinkex.errors import ConfigError
from tinkex.server.guard.budgets import MAX_OF_USER, BudgetError, Prices, SpendingBudgets
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.problems import ApiError
from tinkex.server.serve import open_store
from tinkex.store import SpendingBudget
from tinkex.types import SampleRequest

KEYS = ("tml-ann=ann", "tml-bob=bob")
SAMPLE = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}, "num_samples": 1}


def _pass(model: str, seq_id: int, num_tokens: int) -> dict[str, Any]:
    tokens = [i % 50 for i in range(num_tokens)]
    array = {"dtype": "int64", "shape": [num_tokens], "data": tokens}
    ones = {"dtype": "float32", "shape": [num_tokens], "data": [1.0] * num_tokens}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": array, "weights": ones},
    }
    data = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": data}


def _sample(max_tokens: int) -> dict[str, Any]:
    return SAMPLE | {"base_model": "toy", "sampling_params": {"max_tokens": max_tokens, "seed": 1}}


async def _call(
    world: AppWorld, method: str, path: str, body: Any = None, *, key: str = "tml-ann"
) -> Any:
    headers = {"X-API-Key": key}
    answer = await world.http.request(method, f"/tinkex/v1/{path}", json=body, headers=headers)
    return answer.status_code, answer.json() if answer.content else None


async def _budget(world: AppWorld, path: str, amount: float, at_edge: str = "refuse") -> None:
    status, info = await _call(
        world, "PUT", f"budgets/{path}", {"amount": amount, "at_edge": at_edge}
    )
    assert status == 200, info


async def _spent(world: AppWorld) -> float:
    """What was spent, once nothing is reserved: a result is told before its part is released."""
    while True:
        _, listed = await _call(world, "GET", "budgets")
        [budget] = listed["budgets"]
        if budget["reserved"] == 0:
            return float(budget["spent"])
        await asyncio.sleep(0.01)


async def test_a_run_trains_up_to_its_budget_and_can_be_saved_at_the_edge(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")

        async def train(seq_id: int, num_tokens: int) -> Any:
            body = _pass(model, seq_id, num_tokens)
            return await world.post("forward_backward", body, key="tml-ann")

        await world.result((await train(1, 90)).json(), key="tml-ann")  # before: does not count
        await _budget(world, f"run/{model}/tokens", 100)
        # All at once: reservations keep the sum below the limit, though none has run yet.
        answers = await asyncio.gather(*(train(seq_id, 40) for seq_id in range(2, 7)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 400, 400, 400]
        refused = next(answer for answer in answers if answer.status_code == 400).json()
        assert refused["code"] == "budget"
        assert "tinkex budget set run" in refused["detail"]
        for answer in answers:
            if answer.status_code == 200:
                await world.result(answer.json(), key="tml-ann")
        assert await _spent(world) == 80
        step = {"model_id": model, "seq_id": 7, "adam_params": {"learning_rate": 0.1}}
        await world.result(await world.ok("optim_step", step, key="tml-ann"), key="tml-ann")
        save = {"model_id": model, "seq_id": 8, "path": "edge"}
        await world.result(await world.ok("save_weights", save, key="tml-ann"), key="tml-ann")
        await world.result((await train(9, 20)).json(), key="tml-ann")  # what is left fits
        assert (await train(10, 1)).status_code == 400
        await _budget(world, f"run/{model}/tokens", 200)
        await world.result((await train(11, 100)).json(), key="tml-ann")
        assert await _spent(world) == 200


async def test_work_that_pauses_goes_on_when_the_budget_is_raised(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        await _budget(world, "user/ann/tokens", 10, "pause")
        promises = [await world.ok("asample", _sample(4), key="tml-ann") for _ in range(3)]
        done = asyncio.gather(*(world.result(one, key="tml-ann") for one in promises))
        await soon(lambda: _reasons(world))
        [first, *_] = _reasons(world)
        assert "paused: the budget of user 'ann' has no room" in first
        assert not done.done()
        answer = await world.post("sample_stream", _sample(8), key="tml-ann")
        assert answer.status_code == 400, "nobody waits for a budget on an open connection"
        await _budget(world, "user/ann/tokens", 100, "pause")
        await asyncio.wait_for(done, PATIENCE_S)
        other = await world.ok("asample", _sample(4), key="tml-bob")
        await world.result(other, key="tml-bob")
        assert await _spent(world) == 21


def _reasons(world: AppWorld) -> list[str]:
    runs = world.parts.service.samples._runs.values()
    return [reason for run in runs if "paused" in (reason := run.reason())]


async def test_removing_a_budget_lets_what_waits_go_on(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        await _budget(world, "user/ann/tokens", 1, "pause")
        promise = await world.ok("asample", _sample(4), key="tml-ann")
        await asyncio.sleep(0.05)
        assert await _call(world, "DELETE", "budgets/user/ann/tokens") == (204, None)
        await world.result(promise, key="tml-ann")
        assert (await _call(world, "GET", "budgets"))[1]["budgets"] == []


async def test_budgets_of_money_and_seconds_and_of_a_key(tmp_path: Path) -> None:
    prices = ("sampling_sample=1000000", "toy:sampling_prefill=2000000")
    async with open_app(tmp_path, api_keys=KEYS, prices=prices) as world:
        await _budget(world, "user/ann/money", 10)  # 3 tokens of a prompt at 2, 4 at 1
        await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
        assert await _spent(world) == 10
        assert (await world.post("asample", _sample(1), key="tml-ann")).status_code == 400
        await _call(world, "DELETE", "budgets/user/ann/money")
        key_id = next(k.key_id for k in world.parts.store.accounts.all_keys() if k.user_id == "ann")
        await _budget(world, f"key/{key_id}/tokens", 7)
        await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
        assert (await world.post("asample", _sample(1), key="tml-ann")).status_code == 400
        await _call(world, "DELETE", f"budgets/key/{key_id}/tokens")
        await _budget(world, "user/ann/device_seconds", 1e-9)
        await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
        assert (await world.post("asample", _sample(1), key="tml-ann")).status_code == 400


async def test_only_owners_and_administrators_set_budgets(tmp_path: Path) -> None:
    amount = {"amount": 5.0}
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")
        for path in (f"budgets/run/{model}/tokens", "budgets/user/ann/tokens"):
            assert (await _call(world, "PUT", path, amount, key="tml-bob"))[0] == 404
            assert (await _call(world, "DELETE", path, key="tml-bob"))[0] == 404
        assert (await _call(world, "PUT", "admin/budgets/user/ann/tokens", amount))[0] == 403
        assert (await _call(world, "GET", "admin/users/ann/budgets"))[0] == 403
        world.parts.store.accounts.ensure_user("root")
        world.parts.store.accounts.add_key("tml-root", "root", role="admin")
        path = f"budgets/run/{model}/tokens"
        status, info = await _call(world, "PUT", f"admin/{path}", amount, key="tml-root")
        assert (status, info.get("by_admin"), info.get("amount")) == (200, True, 5.0), info
        assert (await _call(world, "PUT", path, {"amount": 1e9}))[0] == 403, "not hers to raise"
        assert (await _call(world, "DELETE", path))[0] == 403
        body = _pass(model, 1, 6)
        refused = await world.post("forward_backward", body, key="tml-ann")
        assert "administrator" in refused.json()["detail"]
        listed = await _call(world, "GET", "admin/users/ann/budgets", key="tml-root")
        assert len(listed[1]["budgets"]) == 1
        assert (await _call(world, "DELETE", f"admin/{path}", key="tml-root"))[0] == 204


@pytest.mark.parametrize("ours", ["PUT", "DELETE"])
async def test_nobody_changes_what_an_administrator_sets_at_that_moment(
    tmp_path: Path, ours: str
) -> None:
    """A user who asks again and again finds no moment at which the budget is theirs."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        world.parts.store.accounts.ensure_user("root")
        world.parts.store.accounts.add_key("tml-root", "root", role="admin")
        path, body = "budgets/user/ann/tokens", {"amount": 1e9}
        for _ in range(8):
            await _budget(world, "user/ann/tokens", 1e9)
            calls = [_call(world, ours, path, body if ours == "PUT" else None) for _ in range(8)]
            theirs = _call(world, "PUT", f"admin/{path}", {"amount": 5}, key="tml-root")
            await asyncio.gather(*calls[:4], theirs, *calls[4:])
            (live,) = world.service.budgets.of_user("ann")
            kept = await world.parts.store.call(world.parts.store.budgets.all)
            assert [live.budget] == kept
            assert (live.budget.by_admin, live.budget.amount) == (True, 5)
            status, _ = await _call(world, "DELETE", f"admin/{path}", key="tml-root")
            assert status == 204


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("budgets/user/ann/tokens", {"amount": -1}, 400),
        ("budgets/user/ann/tokens", {"amount": 1e300}, 400),
        ("budgets/user/ann/tokens", {}, 400),
        ("budgets/user/ann/tokens", {"amount": 1, "at_edge": "explode"}, 400),
        ("budgets/user/ann/apples", {"amount": 1}, 400),
        ("budgets/team/ann/tokens", {"amount": 1}, 400),
        ("budgets/key/99999999999999/tokens", {"amount": 1}, 404),
        ("budgets/key/x/tokens", {"amount": 1}, 404),
        ("budgets/key/01/tokens", {"amount": 1}, 404),  # it would limit nothing
        ("budgets/run/none/tokens", {"amount": 1}, 404),
        ("budgets/user/ann/money", {"amount": 1}, 400),
    ],
)
async def test_bad_budgets_are_refused(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert (await _call(world, "PUT", path, body))[0] == status


async def test_a_budget_and_what_was_spent_of_it_outlive_the_server(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        await world.result(await world.ok("asample", _sample(2), key="tml-ann"), key="tml-ann")
        await _budget(world, "user/ann/tokens", 14)
        await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert await _spent(world) == 7
        await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
        assert (await world.post("asample", _sample(1), key="tml-ann")).status_code == 400


async def test_requests_of_before_a_restart_hold_their_part_before_others_are_admitted(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")
        await _budget(world, "user/ann/tokens", 100)
        waiting = await world.ok("forward_backward", _pass(model, 2, 80), key="tml-ann")
    async with open_app(tmp_path, api_keys=KEYS) as world:
        [budget] = (await _call(world, "GET", "budgets"))[1]["budgets"]
        assert (budget["spent"], budget["reserved"]) == (0, 80)
        refused = await world.post("forward_backward", _pass(model, 1, 30), key="tml-ann")
        assert (refused.status_code, refused.json()["code"]) == (400, "budget")
        await world.result(waiting, key="tml-ann")
        assert await _spent(world) == 80
        rest = await world.ok("forward_backward", _pass(model, 3, 20), key="tml-ann")
        await world.result(rest, key="tml-ann")
        assert await _spent(world) == 100


async def test_requests_that_a_budget_paused_wait_after_a_restart_too(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")
        await _budget(world, f"run/{model}/tokens", 50, "pause")
        numbers = range(1, 4)
        bodies = [_pass(model, number, 40) for number in numbers]
        waiting = [await world.ok("forward_backward", body, key="tml-ann") for body in bodies]
        await world.result(waiting[0], key="tml-ann")
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert (lane := world.service.find_lane(model)) is not None
        await soon(lambda: "paused" in lane.doing)
        assert await _spent(world) == 40
        await _budget(world, f"run/{model}/tokens", 130, "pause")
        for promise in waiting:
            await world.result(promise, key="tml-ann")
        assert await _spent(world) == 120


async def test_what_a_sample_used_is_written_before_it_is_told(tmp_path: Path) -> None:
    """A server that is killed right after has counted it."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        await _budget(world, "user/ann/tokens", 100)
        for number in range(1, 6):
            await world.result(await world.ok("asample", _sample(4), key="tml-ann"), key="tml-ann")
            assert sum(world.parts.store.usage.tokens(0).values()) == number * 7


async def _goes_on(world: AppWorld, run: str, before: str) -> None:
    asked = {"continues": {"run_id": before, "step": 1}}
    status, answer = await _call(world, "PUT", f"runs/{run}", asked)
    assert status == 200, answer


async def test_what_a_stream_told_counts_though_its_client_hangs_up(tmp_path: Path) -> None:
    """Else whoever hangs up before the last token would read without end, and pay nothing."""
    async with open_app(tmp_path, api_keys=KEYS, engine="toy:token_latency_s=0.02") as world:
        await world.facts()
        await _budget(world, "user/ann/tokens", 2000)
        asked = SampleRequest.model_validate(
            SAMPLE | {"base_model": "toy", "sampling_params": {"max_tokens": 1000, "stop": []}}
        )
        user = world.parts.store.accounts.get_user("ann")
        assert user is not None
        told: list[Tokens] = []
        tasks: list[asyncio.Task[None]] = []

        def hang_up(event: Event) -> None:
            if isinstance(event, Tokens):
                told.append(event)
                tasks[0].cancel()

        promise, task, _ = await world.service.samples.stream(user, asked, hang_up)
        tasks.append(task)
        await task
        assert promise.outcome is not None
        assert promise.outcome.category == "cancelled"
        num_told = sum(len(event.tokens) for event in told)
        assert 0 < num_told < 1000
        assert await _spent(world) == 3 + num_told
        world.parts.store.flush()
        (used,) = world.parts.store.usage.used("user", 0.0, 10)
        tokens = {kind: n for kind, n in used.counts.items() if kind != "device_seconds"}
        assert tokens == {"sampling_prefill": 3, "sampling_sample": num_told}


async def test_a_budget_of_a_run_holds_for_the_runs_that_go_on_from_it(tmp_path: Path) -> None:
    async def train(world: AppWorld, run: str, seq_id: int, num_tokens: int) -> int:
        answer = await world.post("forward_backward", _pass(run, seq_id, num_tokens), key="tml-ann")
        if answer.status_code == 200:
            await world.result(answer.json(), key="tml-ann")
        return answer.status_code

    async with open_app(tmp_path, api_keys=KEYS) as world:
        first, second, third = [await world.model(key="tml-ann") for _ in range(3)]
        await _budget(world, f"run/{first}/tokens", 100)
        assert await train(world, first, 1, 50) == 200
        assert await train(world, second, 1, 10) == 200  # counts from when they are one run
        await _goes_on(world, second, first)
        assert await _spent(world) == 60
        assert await train(world, second, 2, 50) == 400
        assert await train(world, second, 3, 20) == 200
        await _goes_on(world, third, second)
        assert await train(world, third, 1, 30) == 400
        await _budget(world, f"run/{third}/tokens", 120)  # the same one, by its last segment
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert await _spent(world) == 80
        assert await train(world, third, 2, 50) == 400
        assert await train(world, third, 3, 40) == 200
        assert await train(world, first, 2, 1) == 400
        assert await _call(world, "DELETE", f"budgets/run/{second}/tokens") == (204, None)
        assert await train(world, third, 4, 50) == 200
        await _budget(world, f"run/{third}/tokens", 10)  # of the whole run, from now on
        assert await train(world, first, 3, 6) == 200
        assert await train(world, third, 5, 6) == 400
        assert await _spent(world) == 6


async def test_a_budget_of_a_run_is_set_by_its_name(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")
        assert (await _call(world, "PUT", f"runs/{model}", {"name": "caps"}))[0] == 200
        await _budget(world, "run/caps/tokens", 10)
        [budget] = (await _call(world, "GET", "budgets"))[1]["budgets"]
        assert budget["subject"] == model
        assert (await _call(world, "PUT", "budgets/run/caps/tokens", {"amount": 1}, key="tml-bob"))[
            0
        ] == 404
        assert await _call(world, "DELETE", "budgets/run/caps/tokens") == (204, None)


@pytest.fixture
async def budgets(tmp_path: Path) -> AsyncIterator[SpendingBudgets]:
    store = open_store(ServerConfig(data_dir=tmp_path, engine="toy"))
    yield SpendingBudgets(store, Prices.read(()))
    store.close()


async def test_no_order_of_reserving_spending_and_releasing_passes_a_limit(
    budgets: SpendingBudgets,
) -> None:
    import random

    rng = random.Random(0)
    record: dict[str, Any] = {"pauses": False, "by_admin": False, "set_at": 0.0, "before": {}}
    live = await budgets.put(
        SpendingBudget(
            scope="run", subject="r", unit="tokens", user_id="ann", amount=1000.0, **record
        )
    )
    held: list[tuple[Any, int]] = []
    for _ in range(5000):
        if rng.random() < 0.6:
            most = rng.randrange(1, 60)
            try:
                held.append((budgets.reserve("ann", 1, "r", {"toy training": most}), most))
            except BudgetError:
                assert live.spent + live.reserved + most > 1000
        elif held:
            reservation, most = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.7:
                budgets.count("ann", 1, "r", "toy", {"training": rng.randrange(most + 1)})
            budgets.release(reservation)
            budgets.release(reservation)  # twice is harmless
        assert live.spent + live.reserved <= 1000
    budgets.count("bob", 2, "r", "toy", {"training": 10**6})  # who samples a public checkpoint
    assert live.spent <= 1000
    for reservation, _ in held:
        budgets.release(reservation)
    assert live.reserved == 0


async def test_a_model_has_its_price_by_whatever_name_it_is_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"models": ("toy",), "aliases": {"other": "toy"}}
    prices = ("other:sampling_sample=1000000",)
    async with open_app(tmp_path, api_keys=KEYS, prices=prices, **settings) as world:
        await _budget(world, "user/ann/money", 12)
        for name in ("toy", "other", "toy:peft:64"):
            body = _sample(4) | {"base_model": name}
            await world.result(await world.ok("asample", body, key="tml-ann"), key="tml-ann")
        assert await _spent(world) == 12


async def test_a_user_with_many_budgets_does_not_keep_administrators_from_one(
    budgets: SpendingBudgets,
) -> None:
    record: dict[str, Any] = {"pauses": False, "set_at": 0.0, "before": {}, "amount": 1.0}
    record |= {"unit": "tokens", "user_id": "ann"}
    for number in range(MAX_OF_USER):
        own = SpendingBudget(scope="run", subject=f"{number}", by_admin=False, **record)
        await budgets.put(own)
    with pytest.raises(ApiError):
        await budgets.put(SpendingBudget(scope="run", subject="x", by_admin=False, **record))
    await budgets.put(SpendingBudget(scope="user", subject="ann", by_admin=True, **record))
    with pytest.raises(BudgetError):
        budgets.reserve("ann", 1, None, {"toy training": 2})


@pytest.mark.parametrize("entry", ["training", "apples=1", "training=x", "m:training=-1", "=1"])
def test_a_price_that_is_none_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="--price"):
        Prices.read((entry,))


def test_the_sdk_is_told_at_once_and_its_session_goes_on(toy_server: str) -> None:
    import time

    from datums import datum

    from tinkex import APIStatusError, ServiceClient, TinkerError

    with ServiceClient(base_url=toy_server) as service:
        training = service.create_lora_training_client(
            base_model="tinkex/SmolLM2-135M-Instruct-Q4", rank=4
        ).result()
        rest = service.create_rest_client()
        rest.set_budget("run", training.model_id, 4).result()
        began = time.monotonic()
        with pytest.raises(TinkerError, match="budget of run") as caught:
            training.forward_backward([datum([1, 5, 9, 2, 3, 4, 5])], "cross_entropy").result()
        assert time.monotonic() - began < PATIENCE_S  # trying again takes 300 s
        assert not isinstance(caught.value, APIStatusError) or caught.value.status_code == 400
        rest.set_budget("run", training.model_id, 100).result()
        training.forward_backward([datum([1, 5, 9, 2])], "cross_entropy").result()
        budgets = rest.list_budgets().result().budgets
        [budget] = [b for b in budgets if b.subject == training.model_id]
        assert 0 < budget.spent <= 100
        rest.remove_budget("run", training.model_id).result()
