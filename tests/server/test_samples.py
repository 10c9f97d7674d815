"""Sampling: promises, backpressure, cancelling, batches, streams, and what a restart loses."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from app_world import AppWorld, open_app
from patience import soon, until
from server_process import ServerProcess

import tinkex
from tinkex.server.routes import futures
from tinkex.store import SampleLedger
from tinkex.wire import tinker_public_pb2 as pb


def body_of(sampler: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 4, "seed": seq_id} | fields.pop("params", {})
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": params,
    } | fields


async def open_sampler(world: AppWorld, number: int = 0) -> str:
    session = await world.session()
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "toy"}
    return str((await world.ok("create_sampling_session", body))["sampling_session_id"])


async def test_a_sample_names_its_sequences_and_scores_its_prompt(app_world: AppWorld) -> None:
    sampler = await open_sampler(app_world)
    promise = await app_world.ok(
        "asample", body_of(sampler, 0, num_samples=2, prompt_logprobs=True)
    )
    assert promise["sample_sequence_ids"] == [f"{sampler}:0:0", f"{sampler}:0:1"]
    message = pb.SampleResponse.FromString(await app_world.result(promise))
    assert len(message.sequences) == 2
    assert len(message.prompt_logprobs) == 4 * 3


async def test_old_clients_get_json(app_world: AppWorld) -> None:
    """Clients up to 0.24 read samples as JSON (contract 15)."""
    sampler = await open_sampler(app_world)
    promise = await app_world.ok("asample", body_of(sampler, 0, prompt_logprobs=True))
    response = await app_world.post("retrieve_future", {"request_id": promise["request_id"]})
    answer = response.json()
    assert answer["sequences"][0]["stop_reason"] in ("length", "stop")
    assert answer["prompt_logprobs"][0] is None
    assert all(value < 0 for value in answer["prompt_logprobs"][1:])


async def test_the_same_number_gives_the_same_promise_once(app_world: AppWorld) -> None:
    sampler = await open_sampler(app_world)
    first = await app_world.ok("asample", body_of(sampler, 5))
    assert await app_world.ok("asample", body_of(sampler, 5)) == first
    other = await app_world.post("asample", body_of(sampler, 5, params={"max_tokens": 9}))
    assert other.status_code == 400


@pytest.mark.parametrize("route", ["asample", "asample_batch"])
async def test_a_field_that_nobody_knows_may_be_nested_deeply(
    app_world: AppWorld, route: str
) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"inner": [deep]}
    body = body_of(await open_sampler(app_world), 0)
    text = orjson.dumps(body)[:-1] + b',"unknown":' + json.dumps(deep).encode() + b"}"
    content = text if route == "asample" else b'{"requests":[' + text + b"]}"
    for _ in range(2):  # and so may its repeat
        answer = await app_world.post(route, content, headers={"content-type": "application/json"})
        promise = answer.json()["promises"][0] if route == "asample_batch" else answer.json()
        assert promise["request_id"].endswith(":0"), promise


async def test_a_full_queue_is_429_and_drains(tmp_path: Path) -> None:
    async with open_app(
        tmp_path, max_queued_samples=3, max_running_samples=1, engine="toy:latency_s=1"
    ) as world:
        sampler = await open_sampler(world)
        asked = (world.post("asample", body_of(sampler, n)) for n in range(8))
        answers = await asyncio.gather(*asked)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert refused[0].headers["retry-after"] == "1"
        taken = [answer.json() for answer in answers if answer.status_code == 200]
        assert len(taken) + len(refused) == 8
        for promise in taken:
            await world.result(promise)
        assert (await world.post("asample", body_of(sampler, 100))).status_code == 200


async def test_a_cancelled_sample_frees_its_place_at_once(tmp_path: Path) -> None:
    async with open_app(tmp_path, max_running_samples=1, engine="toy:token_latency_s=0.5") as world:
        sampler = await open_sampler(world)
        slow = await world.ok(
            "asample", body_of(sampler, 0, params={"max_tokens": 1000, "stop": []})
        )
        await asyncio.sleep(0.2)
        quick = await world.ok("asample", body_of(sampler, 1, params={"max_tokens": 1}))
        assert (await world.ok("cancel_future", slow))["status"] == "cancelled"
        await asyncio.wait_for(world.result(quick), 60)
        assert "cancelled" in (await world.result(slow))["error"]


async def test_one_poll_collects_many_samples(app_world: AppWorld) -> None:
    sampler = await open_sampler(app_world)
    for n in range(6):
        await app_world.ok("asample", body_of(sampler, n))
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    cursor, found = 0, set()
    while len(found) < 6:
        answer = await app_world.ok("retrieve_futures", {"target": target, "prev_cursor": cursor})
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        found |= {entry["request_id"] for entry in answer["completions"]}
    assert found == {f"{sampler}:{n}" for n in range(6)}
    await app_world.ok(
        "retrieve_futures",
        {"target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": [*found]},
    )
    gone = await app_world.post("retrieve_future", {"request_id": f"{sampler}:0"})
    assert gone.status_code == 410, "an acknowledged payload is dropped"


async def test_samples_that_end_soon_after_one_another_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_app(tmp_path, engine="toy:token_latency_s=0.02", hold_s=60.0) as world:
        sampler = await open_sampler(world)

        async def gather(seconds: float) -> None:
            assert seconds == futures.GATHER_S
            while world.service.finished_logs.log(sampler, 0).unfinished(1):
                await asyncio.sleep(0.005)

        stand_in = SimpleNamespace(sleep=gather, to_thread=asyncio.to_thread)
        monkeypatch.setattr(futures, "asyncio", stand_in)
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        asked = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
        poll = asyncio.create_task(world.ok("retrieve_futures", asked))
        while world.service.finished_logs.log(sampler, 0).is_of_no_use:  # until the poll is held
            await asyncio.sleep(0.005)
        lengths = {number: {"max_tokens": length} for number, length in enumerate((1, 6))}
        bodies = [body_of(sampler, number, params=each) for number, each in lengths.items()]
        await world.ok("asample_batch", {"requests": bodies})
        found = (await poll)["completions"]
    assert {entry["request_id"] for entry in found} == {f"{sampler}:0", f"{sampler}:1"}


async def test_a_clone_has_a_log_of_its_own(app_world: AppWorld) -> None:
    sampler = await open_sampler(app_world)
    joined = await app_world.ok("join_sampling_session", {"sampling_session_id": sampler})
    clone = joined["client_counter"]
    assert clone == 1
    await app_world.ok("asample", body_of(sampler, clone * 10**9 + 3))
    target = {"sampling_session_id": sampler, "cloned_sampler_id": clone}
    answer = await app_world.ok("retrieve_futures", {"target": target, "prev_cursor": 0})
    assert [entry["request_id"] for entry in answer["completions"]] == [f"{sampler}:1000000003"]
    other = await app_world.ok(
        "retrieve_futures",
        {"target": target | {"cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0},
    )
    assert other["completions"] == []


async def test_a_batch_is_answered_one_by_one_and_collected_inline(app_world: AppWorld) -> None:
    sampler = await open_sampler(app_world)
    requests = [body_of(sampler, n) for n in range(3)]
    requests[1]["prompt"] = {"chunks": []}
    promises = (await app_world.ok("asample_batch", {"requests": requests}))["promises"]
    assert promises[1]["status"] == 400
    assert "at least one token" in promises[1]["error"]
    wanted, cursor = {promises[0]["request_id"], promises[2]["request_id"]}, 0
    while wanted:
        target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
        response = await app_world.post(
            "retrieve_futures", {"target": target, "prev_cursor": cursor, "inline_results": True}
        )
        assert response.headers["content-type"] == "application/x-tinkex-frames"
        (length,) = struct.unpack_from("<I", response.content)
        header, offset = orjson.loads(response.content[4 : 4 + length]), 4 + length
        for entry in header["completions"]:
            payload = response.content[offset : offset + entry["size"]]
            offset += entry["size"]
            assert len(pb.SampleResponse.FromString(payload).sequences) == 1
            wanted.remove(entry["request_id"])
        cursor = header["cursor"]


async def test_a_sample_is_the_same_in_another_batch_and_alone(app_world: AppWorld) -> None:
    """A repeat is known by its bytes, whatever it is sent with."""
    sampler = await open_sampler(app_world)
    first, second, third = (body_of(sampler, n, params={"stop": ["\n"]}) for n in range(3))
    sent = (await app_world.ok("asample_batch", {"requests": [first, second]}))["promises"]
    again = (await app_world.ok("asample_batch", {"requests": [second, third]}))["promises"]
    assert again[0] == sent[1]
    alone = await app_world.ok("asample", first)
    assert alone == {name: sent[0][name] for name in alone}
    other = {"requests": [first | {"num_samples": 2}]}
    assert (await app_world.ok("asample_batch", other))["promises"][0]["status"] == 400


async def test_tokens_stream_while_they_are_made(tmp_path: Path) -> None:
    """R27."""
    async with open_app(tmp_path, engine="toy:token_latency_s=0.02") as world:
        sampler = await open_sampler(world)
        body = body_of(sampler, 0, num_samples=2, params={"max_tokens": 5, "stop": []})
        response = await world.post("sample_stream", body)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [block.split("\n") for block in response.text.strip().split("\n\n")]
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for event in events[:-1]:
            assert event[0] == "event: tokens"
            data = orjson.loads(event[1].removeprefix("data: "))
            tokens[data["sample_index"]] += data["tokens"]
        assert events[-1][0] == "event: done"
        result = orjson.loads(events[-1][1].removeprefix("data: "))
        assert [item["tokens"] for item in result["sequences"]] == [tokens[0], tokens[1]]
        assert result["sequences"][0]["sequence_id"].endswith(":0")
        refused = await world.post("sample_stream", body | {"prompt_alt_tokens_k": 2})
        assert refused.status_code == 400


async def test_a_snapshot_samples_the_same_after_further_training(app_world: AppWorld) -> None:
    model = await app_world.model()
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    saved = await app_world.result(await app_world.ok("save_weights_for_sampler", save))
    sampler = saved["sampling_session_id"]
    before = await app_world.result(await app_world.ok("asample", body_of(sampler, 0)))
    await app_world.result((await app_world.train(model, 2, [1, 2, 3, 4])).json())
    await app_world.result((await app_world.step(model, 3)).json())
    again = body_of(sampler, 1, params={"seed": 0})
    assert await app_world.result(await app_world.ok("asample", again)) == before


async def test_a_run_keeps_the_unnamed_weights_that_were_used_last(tmp_path: Path) -> None:
    """A loop that samples from each step's weights does not fill the disk."""
    async with open_app(tmp_path, max_unnamed_samplers=2) as world:
        model, samplers = await world.model(), []
        for number in range(5):
            save = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
            saved = await world.result(await world.ok("save_weights_for_sampler", save))
            samplers.append(saved["sampling_session_id"])
            first = body_of(samplers[0], number)  # the weights it began with are used all along
            assert await world.result(await world.ok("asample", first))
        kept = {}
        for number, sampler in enumerate(samplers):
            kept[number] = await world.post("asample", body_of(sampler, 99))
        assert [number for number, answer in kept.items() if answer.is_success] == [0, 4]
        assert kept[1].status_code == 410
        assert "save_weights_for_sampler(name)" in kept[1].json()["detail"]
        await world.service.shelf.remove_deleted()
        assert len(list((tmp_path / "ephemeral").iterdir())) == 2
        world.service.store.flush()
        store = world.service.store
        used = await store.call(store.usage.used, "run", 0.0, 100)
        assert {one.model_id for one in used if one.counts.get("sampling_sample")} == {model}


async def test_inflight_sessions_outlive_their_own_weights_and_a_restart(tmp_path: Path) -> None:
    """They sample from the newest inflight weights of their run, which alone have to be kept."""
    async with open_app(tmp_path, max_unnamed_samplers=1) as world:
        model, samplers = await world.model(), []
        for number in range(3):
            save = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
            promise = await world.ok("save_weights_for_sampler", save | {"kind": "inflight"})
            samplers.append((await world.result(promise))["sampling_session_id"])
        await world.service.shelf.remove_deleted()
        assert len(list((tmp_path / "ephemeral").iterdir())) == 1
        for number in (3, 4):  # snapshots of the same run do not push it out
            save = {"model_id": model, "seq_id": number + 1, "sampling_session_seq_id": number}
            await world.result(await world.ok("save_weights_for_sampler", save))
        await world.service.shelf.remove_deleted()
        for sampler in samplers:
            assert await world.result(await world.ok("asample", body_of(sampler, 1)))
    async with open_app(tmp_path, max_unnamed_samplers=1) as world:
        for sampler in samplers:
            assert await world.result(await world.ok("asample", body_of(sampler, 2)))


async def test_stability_records_are_refused_with_a_loss_to_use_instead(
    app_world: AppWorld,
) -> None:
    """tinker-cookbook 0.6 asks for them by default; this is the first that its users see."""
    body = body_of(await open_sampler(app_world), 0) | {"record_stability_info": True}
    answer = await app_world.post("asample", body)
    assert answer.status_code == 400
    assert "tinker-cookbook: loss_fn=importance_sampling" in answer.json()["detail"]


async def test_a_training_checkpoint_can_be_sampled(app_world: AppWorld) -> None:
    model = await app_world.model()
    saved = await app_world.result(
        await app_world.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    )
    body = body_of("", 0)
    del body["sampling_session_id"], body["seq_id"]
    promise = await app_world.ok("asample", body | {"model_path": saved["path"]})
    assert pb.SampleResponse.FromString(await app_world.result(promise)).sequences


async def test_samples_lost_by_a_restart_are_reported_and_gone(tmp_path: Path) -> None:
    """A waiting client is told at once, and asks again (contract 4.2, 410)."""
    async with open_app(tmp_path, engine="toy:token_latency_s=5") as world:
        sampler = await open_sampler(world)
        promise = await world.ok("asample", body_of(sampler, 7))
    async with open_app(tmp_path) as world:
        target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
        answer = await world.ok("retrieve_futures", {"target": target, "prev_cursor": 0})
        assert [entry["request_id"] for entry in answer["completions"]] == [promise["request_id"]]
        assert (await world.post("retrieve_future", promise)).status_code == 410
        assert await world.result(await world.ok("asample", body_of(sampler, 8)))


def test_the_ledger_forgets_what_was_handed_out(tmp_path: Path) -> None:
    ledger = SampleLedger(tmp_path / "samples.log")
    ledger.MAX_BYTES = 200
    for n in range(50):
        ledger.promised(f"s:{n}")
        if n % 2:
            ledger.handed_out([f"s:{n}"])
    ledger.close()
    again = SampleLedger(tmp_path / "samples.log")
    again.close()
    assert again.lost == [f"s:{n}" for n in range(0, 50, 2)]


async def test_worker_death_does_not_lose_a_sample(tmp_path: Path) -> None:
    async with open_app(tmp_path, engine="toy:token_latency_s=0.2") as world:
        sampler = await open_sampler(world)
        promise = await world.ok("asample", body_of(sampler, 0))
        await asyncio.sleep(0.3)
        world.service.workers.pool.members[0]._process.kill()  # type: ignore[union-attr]
        assert pb.SampleResponse.FromString(await world.result(promise)).sequences


def test_a_ledger_without_room_promises_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    """Half a line, as a full disk leaves it, must not run into the next one."""
    ledger = SampleLedger(tmp_path / "samples.log")
    ledger.promised("s:1")
    real, ledger._file = ledger._file, HalfWriter(ledger._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        ledger.promised("s:2")
    ledger.handed_out(["s:1"])  # cannot be noted either, and hurts nobody
    ledger._file = real
    ledger.promised("s:3")
    ledger.close()
    again = SampleLedger(tmp_path / "samples.log")
    again.close()
    assert again.lost == ["s:1", "s:3"]


class HalfWriter:
    """A file on a disk that takes three more bytes of each write."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return int(self._file.write(data[:3]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


async def test_a_poll_that_found_nothing_says_why_each_sample_waits(tmp_path: Path) -> None:
    settings = {"max_running_samples": 1, "engine": "toy:token_latency_s=0.2", "hold_s": 0.3}
    async with open_app(tmp_path, **settings) as world:
        await world.model()  # loads the base model
        session = await open_sampler(world)
        for number in range(3):
            await world.ok("asample", body_of(session, number, params={"max_tokens": 1000}))
        first = world.service.finished_logs.log(session, 0).unfinished(1)[0]
        await soon(lambda: first.reason() == "sampling", first.reason)
        target = {"type": "sampling_session", "sampling_session_id": session}
        poll = await world.post("retrieve_futures", {"target": target, "inline_results": True})
        (size,) = struct.unpack_from("<I", poll.content)
        header = orjson.loads(poll.content[4 : 4 + size])
        assert header["completions"] == []
        reasons = [(e["queue_state"], e["queue_state_reason"]) for e in header["waiting"]]
        assert [e["request_id"] for e in header["waiting"]] == [f"{session}:{n}" for n in range(3)]
        assert reasons[0] == ("active", "sampling")
        assert reasons[2][0] == "paused_capacity"
        assert "samples ahead" in reasons[2][1]
        await world.ok("cancel_future", {"request_id": f"{session}:0"})
        poll = await world.post("retrieve_futures", {"target": target, "inline_results": True})
        waiting = world.service.finished_logs.log(session, 0).unfinished(9)
        assert [p.request_id for p in waiting] == [f"{session}:1", f"{session}:2"]
        # The place that was freed is given on a moment later.
        await soon(lambda: waiting[1].reason() == "next in line", waiting[1].reason)


def test_the_status_of_a_waiting_sample_says_why(tmp_path: Path) -> None:
    """Samples are unordered: one of the three runs, whichever came first, and the others wait."""
    settings = tmp_path / "settings.toml"
    settings.write_text("hold_s = 0.5\nmax_running_samples = 1\n")
    flags = ("--engine", "toy:token_latency_s=1.0", "--config", str(settings))
    with ServerProcess(tmp_path, *flags) as server:
        with tinkex.ServiceClient(base_url=server.base_url) as service:
            sampler = service.create_sampling_client(base_model="toy")
            prompt = tinkex.types.ModelInput.from_ints([1, 2])
            sampler.sample(prompt, 1, tinkex.types.SamplingParams(max_tokens=1)).result()
            params = tinkex.types.SamplingParams(max_tokens=200)  # none ends while we look
            futures = [sampler.sample(prompt, 1, params) for _ in range(3)]
            until(
                lambda: _one_runs_and_two_wait(futures),
                lambda: [future.status() for future in futures],
            )
            for future in futures:
                future.cancel()


def _one_runs_and_two_wait(futures: list[Any]) -> bool:
    reasons = [str(future.status().reason) for future in futures]
    waiting = [reason for reason in reasons if "samples ahead" in reason]
    return reasons.count("sampling") == 1 and len(waiting) == 2
