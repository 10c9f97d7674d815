"""One key cannot starve the others: of places, of the queue, of memory for results."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_world import AppWorld, open_app
from fastapi import Request, Response
from patience import soon

from tinkex.engine.jobs import SampleJob
from tinkex.engine.sample.checks import check_sample_job
from tinkex.engine.sample.kv_cache import BlockPool
from tinkex.engine.sample.scheduler import Scheduler, SchedulerConfig, Seq
from tinkex.errors import InvalidInputError
from tinkex.server.fairness.gate import FairGate
from tinkex.server.files.disk_quota import DiskQuota
from tinkex.server.process.disk import Room
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.kept_results import KeptResults
from tinkex.store import User
from tinkex.store.stored_bytes import StoredBytes
from tinkex.wire import requests
from tinkex.wire.requests import Opened

KEYS = ("tml-ann=ann", "tml-bob=bob")
HOG, POLITE = "tml-ann", "tml-bob"


def _seq(num_tokens: int, tenant: str, first: int = 0) -> Seq:
    tokens = list(range(first, first + num_tokens))
    return Seq(version="", tokens=tokens, num_reusable=num_tokens, tenant=tenant)


def _step(scheduler: Scheduler) -> list[Seq]:
    plan = scheduler.plan()
    for chunk in plan:
        is_complete = chunk.completes
        scheduler.done(chunk)
        if is_complete:
            chunk.seq.tokens.append(0)
    return [chunk.seq for chunk in plan]


async def _sampler(world: AppWorld, key: str) -> str:
    asked = {
        "session_id": await world.session(key=key),
        "sampling_session_seq_id": 0,
        "base_model": "toy",
    }
    made = await world.ok("create_sampling_session", asked, key=key)
    return str(made["sampling_session_id"])


def _sample(session: str, seq_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": session,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": changes.pop("max_tokens", 8), "stop": []},
        "num_samples": 1,
        **changes,
    }


# ------------------------------------------------------------------------------------ places


async def test_a_newcomer_finds_a_place_while_another_holds_all_it_may() -> None:
    gate = FairGate(16)
    hog = [asyncio.create_task(gate.acquire("hog", 1000)) for _ in range(40)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in hog) == 14
    await asyncio.wait_for(gate.acquire("polite", 1), 60)
    for task in hog:
        task.cancel()
    await asyncio.gather(*hog, return_exceptions=True)


def test_a_newcomer_runs_in_the_next_pass_while_another_fills_the_sampler() -> None:
    scheduler = Scheduler(SchedulerConfig(max_running=16), BlockPool(4096, 4))
    for n in range(100):
        scheduler.add(_seq(6, "hog", first=100 * n))
    _step(scheduler)
    assert len(scheduler.running) == 16, "a tenant alone has everything"
    late = _seq(3, "polite", first=50_000)
    scheduler.add(late)
    assert late in _step(scheduler)
    assert len(scheduler.running) == 16


def test_a_newcomer_gets_memory_while_another_holds_it_all() -> None:
    scheduler = Scheduler(SchedulerConfig(max_running=64), BlockPool(32, 4))
    for n in range(20):
        scheduler.add(_seq(6, "hog", first=100 * n))
    for _ in range(20):
        _step(scheduler)
    late = _seq(3, "polite", first=50_000)
    scheduler.add(late)
    assert late in _step(scheduler)
    for _ in range(20):
        assert late in _step(scheduler), "nor is it the one that gives way"


def test_tenants_do_not_take_each_others_place_for_ever() -> None:
    for max_running, num_blocks in ((1, 64), (2, 64), (64, 8)):
        scheduler = Scheduler(SchedulerConfig(max_running=max_running), BlockPool(num_blocks, 4))
        for n in range(12):
            scheduler.add(_seq(6, f"tenant{n % 3}", first=100 * n))
        for _ in range(20):
            assert _step(scheduler)
        assert scheduler.num_preempted < 60


def test_a_cached_prompt_says_nothing_to_another_tenant() -> None:
    scheduler = Scheduler(SchedulerConfig(), BlockPool(64, 4))
    scheduler.add(_seq(12, "ann"))
    _step(scheduler)
    own, other = _seq(12, "ann"), _seq(12, "bob")
    scheduler.add(own)
    scheduler.add(other)
    _step(scheduler)
    assert (own.num_hit, other.num_hit) == (8, 0)


async def test_the_toy_says_nothing_either(two_keys: AppWorld) -> None:
    from tinkex.wire import tinker_public_pb2 as pb

    hits = []
    for key in (HOG, HOG, POLITE):
        session = await _sampler(two_keys, key)
        prompt = {"chunks": [{"tokens": [5] * 200, "type": "encoded_text"}]}
        promise = await two_keys.ok("asample", _sample(session, 1, prompt=prompt), key=key)
        raw = await two_keys.result(promise, key=key)
        hits.append(pb.SampleResponse.FromString(raw).prompt_cache_hit_tokens)
    assert hits[1] > 0
    assert (hits[0], hits[2]) == (0, 0)


# ------------------------------------------------------------------------------------ the queue


async def test_a_full_queue_lets_a_small_user_in(tmp_path: Path) -> None:
    settings = {"max_queued_samples": 40, "max_running_samples": 8, "engine": "toy:latency_s=1"}
    async with open_app(tmp_path, api_keys=KEYS, **settings) as world:
        hog, polite = await _sampler(world, HOG), await _sampler(world, POLITE)
        flood = [world.post("asample", _sample(hog, n), key=HOG) for n in range(1, 80)]
        statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
        assert 429 in statuses
        promise = await world.ok("asample", _sample(polite, 1), key=POLITE)
        assert isinstance(await world.result(promise, key=POLITE), bytes)
        assert world.service.finished_logs.log(hog, 0).unfinished(99), (
            "it did not stand behind all of them"
        )


# ------------------------------------------------------------------------------------ results


async def test_a_result_that_would_be_huge_is_refused_in_its_own_terms(two_keys: AppWorld) -> None:
    await two_keys.facts()
    session = await _sampler(two_keys, HOG)
    huge = _sample(session, 1, num_samples=1000, max_tokens=200, topk_sample_logprobs=20)
    assert (await two_keys.post("asample", huge, key=HOG)).status_code == 200
    object.__setattr__(two_keys.service.config, "max_sample_bytes", 1_000_000)
    answer = await two_keys.post("asample", huge | {"seq_id": 2}, key=HOG)
    assert answer.status_code == 400
    assert "num_samples 1000 x max_tokens 200" in answer.json()["detail"]
    alternatives = _sample(session, 3, prompt_alt_tokens_k=1000)
    alternatives["prompt"] = {"chunks": [{"tokens": [1] * 130, "type": "encoded_text"}]}
    answer = await two_keys.post("asample", alternatives, key=HOG)
    assert (answer.status_code, answer.json()["path"]) == (400, "num_samples")


async def test_draws_that_would_hold_up_everybody_are_refused_by_name(two_keys: AppWorld) -> None:
    """Each reads a row of the vocabulary, and all of a stretch of the prompt are one pass."""
    await two_keys.facts()
    body = _sample(await _sampler(two_keys, HOG), 1, prompt_alt_tokens_k=1024)
    body["prompt"] = {"chunks": [{"tokens": [1] * 200, "type": "encoded_text"}]}
    answer = await two_keys.post("asample", body, key=HOG)
    assert (answer.status_code, answer.json()["path"]) == (400, "prompt_alt_tokens_k")
    assert "203776 draws of a token, the limit is 131072" in answer.json()["detail"]
    job = SampleJob(
        job_id="j",
        base_model="toy",
        adapter_folder=None,
        prompt=np.ones(200, np.int64),
        prompt_alt_tokens_k=1024,
    )
    with pytest.raises(InvalidInputError, match="draws of a token"):
        check_sample_job(job, 16)


def _promise(kept: KeptResults, user: str, number: int, size: int) -> Promise:
    promise = Promise(f"{user}:{number}", user, "Sample", on_settle=kept.keep, on_drop=kept.drop)
    promise.settle(Outcome(kind="sample", payload=bytes([number % 256]) * size))
    return promise


async def test_results_beyond_the_memory_go_to_disk_and_come_back(tmp_path: Path) -> None:
    stored = StoredBytes()
    kept = KeptResults(
        tmp_path / "results",
        memory_bytes=400_000,
        disk_quota=DiskQuota(stored, limit=lambda user_id: 0),
        room=Room(tmp_path, 0),
    )
    promises = [_promise(kept, "ann", n, 10_000) for n in range(100)]
    while kept._writing:
        await asyncio.gather(*kept._writing)
    assert kept.memory_bytes <= 110_000
    assert kept.kept_bytes == 1_000_000
    assert stored.total("ann") == 900_000
    for n, promise in enumerate(promises):
        assert promise.outcome is not None
        assert promise.outcome.size_bytes == 10_000
        assert promise.outcome.content() == bytes([n]) * 10_000
        kept.drop(promise)
    assert (kept.memory_bytes, kept.kept_bytes, stored.total("ann")) == (0, 0, 0)
    await soon(lambda: list((tmp_path / "results").iterdir()) == [])


async def test_who_does_not_fetch_is_not_given_more(tmp_path: Path) -> None:
    settings = {"max_kept_result_bytes": 40_000, "max_user_result_bytes": 100_000}
    async with open_app(tmp_path, api_keys=KEYS, **settings) as world:
        hog, polite = await _sampler(world, HOG), await _sampler(world, POLITE)
        promises, status = [], 200
        for number in range(1, 60):
            body = _sample(hog, number, num_samples=8, max_tokens=100)
            answer = await world.post("asample", body, key=HOG)
            if (status := answer.status_code) != 200:
                break
            promises.append(answer.json())
            while world.service.samples._runs:
                await asyncio.sleep(0.01)
        assert status == 429
        assert "Fetch them" in answer.json()["detail"]
        promise = await world.ok("asample", _sample(polite, 1), key=POLITE)
        assert isinstance(await world.result(promise, key=POLITE), bytes)
        for promise in promises:
            assert isinstance(await world.result(promise, key=HOG), bytes)


async def test_results_that_nobody_fetches_are_on_the_disk_quota_of_their_user(
    tmp_path: Path,
) -> None:
    """They filled the disk in `benchmarks/soak.py --attackers`, and nobody could train any more."""
    settings = {"max_kept_result_bytes": 40_000, "max_user_disk_bytes": 100_000}
    async with open_app(tmp_path, api_keys=KEYS, **settings) as world:
        hog, polite = await _sampler(world, HOG), await _sampler(world, POLITE)
        bodies = [_sample(hog, n, num_samples=8, max_tokens=100) for n in range(1, 200)]
        answers = [await world.post("asample", body, key=HOG) for body in bodies]
        accepted = [answer for answer in answers if answer.status_code == 200]
        assert 1 <= len(accepted) < 30
        refused = answers[-1]
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "Fetch results before you ask" in refused.json()["detail"]
        while world.service.samples._runs or world.service.kept._writing:
            await asyncio.sleep(0.01)
        files = list((tmp_path / "results").iterdir())
        assert 0 < sum(file.stat().st_size for file in files) <= 100_000
        promise = await world.ok("asample", _sample(polite, 1), key=POLITE)
        assert isinstance(await world.result(promise, key=POLITE), bytes)
        for answer in accepted:
            assert isinstance(await world.result(answer.json(), key=HOG), bytes)


async def test_results_do_not_take_the_last_room_of_the_disk(tmp_path: Path) -> None:
    room = Room(tmp_path, 1000, free_bytes=lambda folder: 999)
    stored = StoredBytes()
    kept = KeptResults(
        tmp_path / "results",
        memory_bytes=40_000,
        disk_quota=DiskQuota(stored, limit=lambda user_id: 0),
        room=room,
    )
    promise = _promise(kept, "ann", 1, 20_000)
    while kept._writing:
        await asyncio.gather(*kept._writing)
    assert (kept.memory_bytes, stored.total("ann")) == (20_000, 0)
    assert not (tmp_path / "results").exists()
    kept.drop(promise)
    assert kept.memory_bytes == 0


# ------------------------------------------------------------------------------------ API time


async def test_a_newcomers_request_is_read_before_the_crowd_of_another(
    two_keys: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who submits much at once waits behind who submits little, whatever came first."""
    door = two_keys.app
    monkeypatch.setattr(door, "_turns", FairGate(1))
    read: list[str] = []
    may_go = asyncio.Event()

    async def hold(request: Request, user: User) -> Response:
        await may_go.wait()
        read.append(user.user_id)
        return Response(b"{}")

    monkeypatch.setitem(door._endpoints, "/api/v1/forward_backward", hold)
    crowd = [
        asyncio.create_task(two_keys.post("forward_backward", b"x" * 1000, key="tml-bob"))
        for _ in range(10)
    ]
    while door._turns.num_waiting < 9:
        await asyncio.sleep(0)
    small = asyncio.create_task(two_keys.post("forward_backward", b"x", key="tml-ann"))
    while door._turns.num_waiting < 10:
        await asyncio.sleep(0)
    may_go.set()
    await asyncio.gather(*crowd, small)
    assert read.index("ann") <= 2


async def test_a_large_body_is_parsed_off_the_event_loop(
    app_world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, threading.Thread] = {}
    parse = requests.open_body

    def noted(name: str, raw: bytes, content_type: str | None) -> Opened:
        threads[len(raw)] = threading.current_thread()
        return parse(name, raw, content_type)

    monkeypatch.setattr(requests, "open_body", noted)
    for body in (b'{"a": 1}', b'{"a": [' + b"[]," * 100_000 + b"[]]}"):
        answer = await app_world.post(
            "forward_backward", body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert (threads[len(body)] is threading.current_thread()) == (len(body) < 100)
