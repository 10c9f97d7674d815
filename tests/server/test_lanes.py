"""Order and idempotency: one lane per model, in seq_id order, each number once."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app_world import AppWorld, open_app
from patience import soon
from wire_client import PROTO, loss_of, train_body

from tinkex.errors import InvalidInputError
from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.budgets import Prices, SpendingBudgets
from tinkex.server.work.flights import Flights
from tinkex.server.work.futures import Outcome
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.inbox import Inbox
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.queued_request import QueuedRequest

TOKENS = [1, 2, 3, 4]


async def test_chunks_run_in_number_order_whichever_arrives_first(app_world: AppWorld) -> None:
    """Stock clients post chunk 1 last (contract 5.3)."""
    model = await app_world.model()
    last = (await app_world.step(model, 4)).json()
    third = (await app_world.train(model, 3, TOKENS)).json()
    second = (await app_world.train(model, 2, TOKENS)).json()
    first = (await app_world.train(model, 1, TOKENS)).json()
    losses = [loss_of(await app_world.result(promise)) for promise in (first, second, third)]
    assert losses[0] == losses[1] == losses[2], "the step ran before a chunk"
    assert (await app_world.result(last))["metrics"]["step:max"] == 1.0
    after = (await app_world.train(model, 5, TOKENS)).json()
    assert loss_of(await app_world.result(after)) < losses[0]


async def test_a_repeat_gets_the_same_promise_and_runs_once(app_world: AppWorld) -> None:
    model = await app_world.model()
    repeats = await asyncio.gather(*(app_world.train(model, 1, TOKENS) for _ in range(5)))
    assert len({response.json()["request_id"] for response in repeats}) == 1
    steps = await asyncio.gather(*(app_world.step(model, 2) for _ in range(5)))
    assert (await app_world.result(steps[0].json()))["metrics"]["step:max"] == 1.0
    again = (await app_world.step(model, 2)).json()
    assert again == steps[0].json()
    assert (await app_world.result(again))["metrics"]["step:max"] == 1.0


async def test_another_body_under_a_used_number_is_refused(app_world: AppWorld) -> None:
    model = await app_world.model()
    await app_world.train(model, 1, TOKENS)
    response = await app_world.train(model, 1, [9, 9])
    assert response.status_code == 400
    assert response.json()["code"] == "seq_conflict"
    assert (await app_world.step(model, 1)).status_code == 400


async def test_a_refused_request_consumes_its_number(app_world: AppWorld) -> None:
    """R11: an error in one call leaves the client usable."""
    model = await app_world.model()
    await app_world.facts()
    refused = await app_world.train(model, 1, [10**6])
    assert refused.status_code == 400
    assert "outside the vocabulary" in refused.json()["detail"]
    assert (await app_world.train(model, 1, [10**6])).json() == refused.json()
    done = (await app_world.train(model, 2, TOKENS)).json()
    assert loss_of(await app_world.result(done)) > 0


async def test_a_request_the_engine_refuses_does_not_stop_the_lane(app_world: AppWorld) -> None:
    model = await app_world.model()
    body = {"model_id": model, "seq_id": 1, "path": "x"}
    await app_world.result(await app_world.ok("save_weights", body))
    again = await app_world.ok("save_weights", body | {"seq_id": 2})
    failed = await app_world.result(again)
    assert failed["category"] == "user"
    assert "exists already" in failed["error"]
    done = (await app_world.train(model, 3, TOKENS)).json()
    assert loss_of(await app_world.result(done)) > 0


async def test_a_gap_is_the_reason_of_waiting_and_then_an_error(tmp_path: Path) -> None:
    async with open_app(tmp_path, gap_limit_s=600, hold_s=0.3) as world:
        model = await world.model()
        waiting = (await world.train(model, 3, TOKENS)).json()
        poll = await world.post("retrieve_future", {"request_id": waiting["request_id"]})
        assert poll.status_code == 408
        assert "waiting for seq_id 1" in poll.json()["queue_state_reason"]
        assert poll.json()["queue_state"] == "paused_capacity"
        world.service.find_lane(model).gap_timer.expire()  # ten minutes have passed
        failed = await world.result(waiting)
        assert failed["category"] == "user"
        assert "seq_id 1, 2" in failed["error"]
        late = await world.train(model, 1, TOKENS)
        assert late.status_code == 400
        assert "too late" in late.json()["detail"]
        done = (await world.train(model, 4, TOKENS)).json()
        assert loss_of(await world.result(done)) > 0


async def test_requests_without_a_number_run_in_order_of_arrival(app_world: AppWorld) -> None:
    model = await app_world.model()
    first = (await app_world.train(model, 0, TOKENS)).json()  # 0 is how protobuf says "none"
    step = await app_world.ok("optim_step", {"model_id": model, "adam_params": {}})
    assert loss_of(await app_world.result(first)) > 0
    assert (await app_world.result(step))["metrics"]["step:max"] == 1.0


async def test_a_number_that_our_own_trouble_freed_is_given_to_the_next(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the numbers would stop the model."""
    model = await app_world.model()
    with monkeypatch.context() as patched:
        patched.setattr(type(app_world.service.store.journal), "append", _no_room)
        failed = await app_world.post("optim_step", {"model_id": model, "adam_params": {}})
        assert failed.status_code == 507
    step = await app_world.ok("optim_step", {"model_id": model, "adam_params": {}})
    assert step["request_id"] == f"{model}:1"
    assert (await app_world.result(step))["metrics"]["step:max"] == 1.0


def _no_room(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_request_that_is_cut_off_frees_its_number_and_may_be_sent_again(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a repeat would wait for ever, and the user would have one request more under way."""
    model = await app_world.model()
    service, under_way, repeated = app_world.service, asyncio.Event(), asyncio.Event()
    stuck: Future[bool] = Future()
    again = Inbox._again

    def append(_: Any) -> Future[bool]:
        under_way.set()
        return stuck

    async def noted(*args: Any) -> Any:
        repeated.set()
        return await again(*args)

    with monkeypatch.context() as patched:
        patched.setattr(service.store.journal, "append", append)
        patched.setattr(Inbox, "_again", noted)
        first = asyncio.create_task(app_world.train(model, 1, TOKENS))
        await under_way.wait()
        repeat = asyncio.create_task(app_world.train(model, 1, TOKENS))
        await repeated.wait()
        first.cancel()
        answer = await asyncio.wait_for(repeat, 60)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    promise = (await app_world.train(model, 1, TOKENS)).json()
    assert loss_of(await app_world.result(promise)) > 0
    await soon(lambda: not service.open_work.by_user)


async def test_creating_a_model_twice_gives_the_same_promise(app_world: AppWorld) -> None:
    session = await app_world.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy"}
    first, again = (
        await app_world.ok("create_model", body),
        await app_world.ok("create_model", body),
    )
    assert first == again
    assert (await app_world.result(first))["model_id"] == f"{session}:train:0"


async def test_a_retried_unnamed_save_may_carry_a_new_sampler_number(app_world: AppWorld) -> None:
    """Contract 3.5: the counter is taken inside the retried function."""
    model = await app_world.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    first = await app_world.ok("save_weights_for_sampler", body)
    again = await app_world.ok("save_weights_for_sampler", body | {"sampling_session_seq_id": 1})
    assert first == again
    result = await app_world.result(first)
    assert result["sampling_session_id"].endswith(":sample:0")


async def test_models_of_other_users_do_not_exist(tmp_path: Path) -> None:
    keys = ("tml-ada=ada", "tml-bob=bob")
    async with open_app(tmp_path, api_keys=keys) as world:
        model = await world.model(key="tml-ada")
        body = train_body(model, 1, TOKENS)
        foreign = await world.post("forward_backward", body, key="tml-bob", headers=PROTO)
        absent = await world.post(
            "forward_backward",
            train_body("nowhere:train:0", 1, TOKENS),
            key="tml-bob",
            headers=PROTO,
        )
        assert foreign.status_code == absent.status_code == 404
        own = await world.ok("forward_backward", body, key="tml-ada", headers=PROTO)
        poll = await world.post("retrieve_future", {"request_id": own["request_id"]}, key="tml-bob")
        assert poll.status_code == 404
        assert (await world.post("retrieve_future", {}, key="tml-nobody")).status_code == 401


@pytest.mark.parametrize("kind", ["loss", "engine"])
async def test_one_model_never_sees_the_mistakes_of_another(app_world: AppWorld, kind: str) -> None:
    session = await app_world.session()
    model, other = [await app_world.model(session, number) for number in range(2)]
    before = loss_of(await app_world.result((await app_world.train(model, 1, TOKENS)).json()))
    wrong: Any = {"loss": {"loss_fn": "nonsense"}, "engine": {"weights": [float("nan")] * 4}}[kind]
    assert (await app_world.train(other, 1, TOKENS, **wrong)).status_code == 400
    await app_world.result((await app_world.train(other, 2, TOKENS)).json())
    await app_world.result((await app_world.step(other, 3)).json())
    after = loss_of(await app_world.result((await app_world.train(model, 2, TOKENS)).json()))
    assert after == before


async def test_bodies_beyond_the_bound_wait_in_the_journal(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may queue more than fits in memory; order and results stay the same."""
    monkeypatch.setattr("tinkex.server.work.request_queue.MAX_HELD_BYTES", 200)
    model = await app_world.model()
    numbers = list(range(2, 12))
    promises = [(await app_world.train(model, n, list(range(n)))).json() for n in numbers]
    lane = app_world.service.find_lane(model)
    assert sum(request.spilled for request in lane.queue.in_order()) > 5
    assert lane.queue._held_bytes <= 400
    await app_world.train(model, 1, TOKENS)
    losses = [loss_of(await app_world.result(promise)) for promise in promises]
    assert len(set(losses)) == len(numbers)
    assert lane.queue._held_bytes == 0


async def test_large_results_leave_the_memory_and_can_still_be_fetched(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.work.results.LARGE_RESULT_BYTES", 10)
    model = await app_world.model()
    promise = (await app_world.train(model, 1, TOKENS)).json()
    await soon(lambda: app_world.service.promises.get(promise["request_id"]) is None)
    assert loss_of(await app_world.result(promise)) > 0


async def test_a_request_refused_on_its_way_to_the_worker_keeps_its_place(tmp_path: Path) -> None:
    """It is sent ahead behind others; its error must not overtake their results."""
    async with open_app(tmp_path, engine="toy:latency_s=0.2") as world:
        model = await world.model()
        operation = world.service.operations["forward_backward"]
        job = operation.job

        async def refuse_second(asked: Any, turn: Any) -> Any:
            if turn.request_id.endswith(":2"):
                raise InvalidInputError("gone")
            return await job(asked, turn)

        operation.job = refuse_second  # type: ignore[method-assign]
        promises = [(await world.train(model, n, TOKENS)).json() for n in (1, 2)]
        promises.append((await world.step(model, 3)).json())
        assert loss_of(await world.result(promises[0])) > 0
        assert (await world.result(promises[1]))["error"] == "gone"
        assert (await world.result(promises[2]))["metrics"]["step:max"] == 1.0


async def test_a_request_that_cannot_run_lets_nobody_overtake_those_before_it() -> None:
    """Jobs of one lane are posted in order, also when one of them never becomes a job."""
    posted: list[str] = []

    def post(job: str, *_: object) -> asyncio.Future[str]:
        posted.append(job)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answer.set_result(job)
        return answer

    async def complete(job: str) -> str:
        return job

    gates = FairGate(1), FairGate(1), FairGate(1)
    workers = GatedPool(SimpleNamespace(), *gates)  # type: ignore[arg-type]
    open_work = OpenWork(  # type: ignore[arg-type]
        SimpleNamespace(limit=lambda *_: 0), SpendingBudgets(None, Prices({}))
    )
    flights = Flights(
        "ann",
        workers,
        open_work,
        placement=lambda: SimpleNamespace(post=post),
        on_ended=lambda: None,
    )
    await workers.training.acquire("ben", 1.0)
    for number, job in enumerate(("first", "second", Outcome(error="no", category="user"), "last")):
        flights.send(QueuedRequest(number), job, complete)  # type: ignore[arg-type]
    for _ in range(10):  # whoever may stand in line does
        await asyncio.sleep(0)
    workers.training.release("ben")
    await asyncio.gather(*(flight.task for flight in flights._all), return_exceptions=True)
    assert posted == ["first", "second", "last"]
