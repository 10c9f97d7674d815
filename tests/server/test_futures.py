"""Promises: settled once, woken at once, kept as long as somebody may ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app_world import AppWorld, open_app

from tinkex.engine.jobs import Progress
from tinkex.server.work.finished_logs import IDLE_LOG_S, FinishedLog, FinishedLogs
from tinkex.server.work.futures import Outcome, Promise, PromiseTable
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.store import SampleLedger
from tinkex.wire import tinker_public_pb2 as pb


def promise(number: int = 0) -> Promise:
    return Promise(f"r{number}", "ada", "Sample")


async def test_every_waiting_poll_wakes_at_once() -> None:
    made, stopping = promise(), asyncio.Event()
    polls = [asyncio.create_task(made.wait(600, stopping)) for _ in range(50)]
    await asyncio.sleep(0)
    assert made.settle(Outcome(payload=b"1"))
    assert not made.settle(Outcome(payload=b"2")), "the first outcome stays"
    answers = await asyncio.wait_for(asyncio.gather(*polls), 60)
    assert {answer.payload for answer in answers if answer} == {b"1"}


async def test_a_poll_ends_without_an_outcome_when_time_is_up() -> None:
    made = promise()
    assert await made.wait(0.01, asyncio.Event()) is None
    assert made.polls == []


def test_fetched_results_go_after_the_grace_and_others_after_their_time() -> None:
    now = [0.0]
    table = PromiseTable(ttl_s=100, grace_s=10, clock=lambda: now[0])
    for number in range(3):
        made = table.add(promise(number))
        if number < 2:
            made.settle(Outcome(payload=b"x"))
            table.settled(made)
    table.fetched(table.get("r0"))  # type: ignore[arg-type]
    now[0] = 10
    assert table.forget_expired() == 1
    assert table.get("r0") is None
    now[0] = 100
    assert table.forget_expired() == 1
    assert len(table) == 1, "what is not settled is never forgotten"


async def test_a_completion_log_forgets_what_a_cursor_has_passed() -> None:
    log = FinishedLog(start=0)
    for number in range(4):
        log.add(f"r{number}", 1)
    assert [entry.cursor for entry in log.after(0, limit=2)] == [1, 2]
    assert [entry.request_id for entry in log.after(2)] == ["r2", "r3"]
    assert log.after(4) == []
    waiting = asyncio.create_task(log.wait_after(4, 600))
    await asyncio.sleep(0)
    log.add("r4", 1)
    assert [entry.request_id for entry in await asyncio.wait_for(waiting, 60)] == ["r4"]


def test_a_sample_that_took_longer_than_a_log_is_kept_is_still_told(tmp_path: Path) -> None:
    logs = FinishedLogs(SampleLedger(tmp_path / "samples.log"))
    sample = Promise("s:sample:0:5", "u", "Sample")
    logs.promised(sample)
    logs.log("s:sample:0", 0).used_at -= IDLE_LOG_S + 1  # nobody has polled since
    sample.settle(Outcome(payload=b"x"))
    logs.settled(sample)
    logs.forget()
    log = logs.log("s:sample:0", 0)
    assert [entry.request_id for entry in log.after(0)] == ["s:sample:0:5"]
    log.used_at -= IDLE_LOG_S + 1
    logs.forget()
    assert logs.log("s:sample:0", 0) is not log, "after an hour it is forgotten"
    logs.close()


def test_a_cursor_from_before_a_restart_is_behind_every_new_entry() -> None:
    before = FinishedLog()
    before.add("r0", 0)
    after = FinishedLog()
    after.add("r1", 0)
    assert after.after(before.after(0)[-1].cursor)


async def test_large_results_announce_their_size_first(tmp_path: Path) -> None:
    async with open_app(tmp_path, metadata_only_bytes=10) as world:
        model = await world.model()
        made = (await world.train(model, 1, [1, 2, 3])).json()
        await world.service.promise(await user_of(world), made["request_id"])
        body = {"request_id": made["request_id"], "allow_metadata_only": True}
        proto = {"accept": "application/x-protobuf"}
        announced = (await world.post("retrieve_future", body, headers=proto)).json()
        assert announced["status"] == "complete_metadata"
        whole = await world.post(
            "retrieve_future", body | {"allow_metadata_only": False}, headers=proto
        )
        assert len(whole.content) == announced["response_payload_size"]
        assert pb.ForwardBackwardOutput.FromString(whole.content).metrics["loss:sum"] > 0


async def user_of(world: AppWorld):  # type: ignore[no-untyped-def]
    return await world.parts.auth.user_of("tml-test")


async def test_old_clients_get_training_results_as_json(app_world: AppWorld) -> None:
    """Contract 15: clients up to 0.24 read ForwardBackwardOutput as JSON."""
    model = await app_world.model()
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
            "weights": {"data": [1.0, 1.0, 0.0], "dtype": "float32"},
        },
    }
    inner = {"data": [datum, datum], "loss_fn": "cross_entropy"}
    for seq_id, path, name in (
        (1, "forward", "forward_input"),
        (2, "forward_backward", "forward_backward_input"),
    ):
        made = await app_world.ok(path, {"model_id": model, "seq_id": seq_id, name: inner})
        answer = (await app_world.post("retrieve_future", made)).json()
        assert len(answer["loss_fn_outputs"]) == 2
        logprobs = answer["loss_fn_outputs"][0]["logprobs"]
        assert (logprobs["dtype"], logprobs["shape"]) == ("float32", [3])
        assert answer["metrics"]["loss:sum"] > 0
        assert answer["loss_fn_output_type"]


async def test_a_stopping_server_answers_waiting_polls_at_once(tmp_path: Path) -> None:
    async with open_app(tmp_path, hold_s=600, gap_limit_s=600) as world:
        model = await world.model()
        made = (await world.train(model, 5, [1])).json()
        poll = asyncio.create_task(world.post("retrieve_future", made))
        await asyncio.sleep(0.1)
        world.service.begin_stop()
        assert (await asyncio.wait_for(poll, 60)).status_code == 408


async def test_unknown_requests_are_404_and_cancel_is_forgiving(app_world: AppWorld) -> None:
    assert (await app_world.post("retrieve_future", {"request_id": "x"})).status_code == 404
    lost = {"request_id": "s:sample:0:4"}
    assert (await app_world.post("retrieve_future", lost)).status_code == 410
    assert (await app_world.ok("cancel_future", lost))["status"] == "gone"


async def test_a_poll_hears_at_once_how_far_the_model_is_loaded() -> None:
    made = promise()
    request = QueuedRequest(1, promise=made)
    made.reason = lambda: request.progress
    poll = asyncio.create_task(made.wait(600.0, asyncio.Event()))
    await asyncio.sleep(0)
    request.note(Progress(job_id="j", text="running"))
    await asyncio.sleep(0)
    assert not poll.done()
    request.note(Progress(job_id="j", text="loading org/large 40 %"))
    assert await asyncio.wait_for(poll, 60) is None
    assert made.reason() == "loading org/large 40 %"
