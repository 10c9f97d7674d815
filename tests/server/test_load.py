"""Under load: nothing is lost, nothing is doubled, and heartbeats stay quick."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_http import Connection
from server_process import ServerProcess
from wire_client import loss_of, model_body, optim_body, train_body

from tinkex.wire import tinker_public_pb2 as pb

PROTO = "application/x-protobuf"


def beat(port: int, session_id: str, started: Any, stop: Any, answers: Any) -> None:
    """Heartbeats from a process of their own, so that only the server can delay them."""

    async def main() -> list[float]:
        connection, times = Connection(port), []
        while not stop.is_set():
            at = time.perf_counter()
            await connection.ok("session_heartbeat", {"session_id": session_id})
            times.append(time.perf_counter() - at)
            started.set()
            await asyncio.sleep(0.02)
        connection.close()
        return times

    answers.put(asyncio.run(main()))


async def train(port: int, num_steps: int) -> list[float]:
    connection = Connection(port)
    session = (await connection.ok("create_session", {"sdk_version": "load", "tags": []}))[
        "session_id"
    ]
    await connection.settled(await connection.ok("create_model", model_body(session)))
    model, losses = f"{session}:train:0", []
    for step in range(num_steps):
        data = train_body(model, 2 * step + 1, [1, 2, 3, 4])
        first = await connection.ok("forward_backward", data, kind=PROTO)
        second = await connection.ok("optim_step", optim_body(model, 2 * step + 2, 0.05))
        losses.append(loss_of(await connection.settled(first, accept=PROTO)))
        await connection.settled(second)
    connection.close()
    return losses


def sample_body(sampler: str, number: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": [1, 2, number % 1000], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 8, "seed": number},
    }


async def submit(port: int, sampler: str, numbers: list[int]) -> None:
    """One connection's share of the samples; 429 is a wait, not an error."""
    connection = Connection(port)
    for number in numbers:
        while (await connection.post("asample", sample_body(sampler, number)))[0] == 429:
            await asyncio.sleep(0.2)
    connection.close()


async def collect(port: int, sampler: str, num_samples: int) -> dict[str, bytes]:
    """What a stock client does: one poller says what is ready, a few connections fetch it."""
    poller, fetchers = Connection(port), [Connection(port) for _ in range(50)]
    target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
    cursor, found, done, times_seen = 0, {}, [], 0
    while len(found) < num_samples:
        body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": done}
        answer = await poller.ok("retrieve_futures", body)
        cursor = answer["cursor"]
        ready = [{"request_id": entry["request_id"]} for entry in answer["completions"]]
        times_seen += len(ready)
        done = [promise["request_id"] for promise in ready]

        async def fetch(connection: Connection, share: list[dict[str, Any]]) -> None:
            for promise in share:
                found[promise["request_id"]] = await connection.settled(promise, accept=PROTO)

        await asyncio.gather(*(fetch(c, ready[i::50]) for i, c in enumerate(fetchers)))
    assert times_seen == num_samples, "a completion was reported twice"
    for connection in (poller, *fetchers):
        connection.close()
    return found


async def load(port: int, num_samples: int, num_trainers: int, num_steps: int) -> list[float]:
    connection = Connection(port)
    session = (await connection.ok("create_session", {"sdk_version": "load", "tags": []}))[
        "session_id"
    ]
    opened = await connection.ok(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"},
    )
    sampler = opened["sampling_session_id"]
    await train(port, 1)  # the first model loads code on both sides
    context = multiprocessing.get_context("spawn")
    started, stop, answers = context.Event(), context.Event(), context.Queue()
    beating = context.Process(target=beat, args=(port, session, started, stop, answers))
    beating.start()
    assert await asyncio.to_thread(started.wait, 100)
    # A stock client submits at most 400 at a time (contract 6.3).
    shares = [list(range(i, num_samples, 400)) for i in range(min(400, num_samples))]
    submitting = asyncio.gather(*(submit(port, sampler, share) for share in shares))
    trainers = asyncio.gather(*(train(port, num_steps) for _ in range(num_trainers)))
    found, losses, _ = await asyncio.gather(
        collect(port, sampler, num_samples), trainers, submitting
    )
    stop.set()
    times: list[float] = await asyncio.to_thread(answers.get, timeout=100)
    beating.join()
    connection.close()
    assert set(found) == {f"{sampler}:{number}" for number in range(num_samples)}
    assert all(pb.SampleResponse.FromString(payload).sequences for payload in found.values())
    assert all(each == losses[0] for each in losses), "trainers disturb each other"
    assert losses[0][-1] < losses[0][0]
    return times


def run_load(
    folder: Path, num_samples: int, num_trainers: int, num_steps: int
) -> tuple[float, float]:
    """The median and the 99th percentile of the seconds that a heartbeat took."""
    with ServerProcess(folder, "--engine", "toy") as server:
        times = asyncio.run(load(server.port, num_samples, num_trainers, num_steps))
    p50, p99 = (float(np.quantile(times, share)) for share in (0.5, 0.99))
    print(f"heartbeat p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, n {len(times)}")
    assert len(times) > 5, "heartbeats were answered all the while"
    return p50, p99


def test_two_hundred_samples_and_eight_trainers_lose_nothing(tmp_path: Path) -> None:
    """And heartbeats are not late: a client gives one 10 s (contract 3.4), and 99 of 100 take half.

    It was 11 ms on two idle cores (2026-11-18) and 0.2 s at a load of 12.
    """
    p50, p99 = run_load(tmp_path, 200, 8, 5)
    assert p50 <= p99 < 5


@pytest.mark.slow
def test_two_thousand_samples_and_32_trainers_leave_heartbeats_quick(tmp_path: Path) -> None:
    assert run_load(tmp_path, 2000, 32, 20)[1] < 0.2
