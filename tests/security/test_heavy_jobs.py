"""A small request cannot take a worker's memory or its time from the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_world import AppWorld, open_app
from heavy_bodies import (
    call,
    datum,
    product_loss,
    sparse_datum,
    sparse_request,
    sparse_tensor,
    traced,
)
from patience import soon
from wire_client import PROTO, loss_of, train_body

from tinkex.contract.sparse import BYTES_PER_TOKEN, FLAT_BYTES, MOST_FOR_TOKENS, TIMES_STORED
from tinkex.server.fairness.pauses import FIRST_S, FORGET_S, LONGEST_S, Pauses
from tinkex.server.workers.deaths import KernelKills, cause_of, count_files
from tinkex.wire import tinker_public_pb2 as pb

WIDE = 2**27
TOKENS, HANG = [1, 2, 3, 4], 666


def _sparse_proto(model: str, seq_id: int, columns: int) -> bytes:
    message = pb.ForwardBackwardRequest.FromString(train_body(model, seq_id, [1, 2]))
    for name, stored in (("target_tokens", np.ones(1, "<i8")), ("weights", np.ones(1, "<f4"))):
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.ClearField("dense")
        tensor.sparse_csr.values = stored.tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 1, 1], "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array([0], "<i8").tobytes()
        del tensor.shape[:]
        tensor.shape.extend([2, columns])
    return bytes(message.SerializeToString())


def _pid(world: AppWorld) -> int:
    return int(world.service.workers.pool.members[0].pid)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ memory


async def test_a_few_bytes_that_would_become_gigabytes_are_refused(app_world: AppWorld) -> None:
    """Both generations of the wire, and the worker never hears of it."""
    model = await app_world.model()
    await app_world.facts()
    worker = _pid(app_world)
    for seq_id, (body, headers) in enumerate(
        [(sparse_request(model, 1, WIDE), {}), (_sparse_proto(model, 2, WIDE), PROTO)], start=1
    ):
        answer = await app_world.post("forward_backward", body, headers=headers)
        assert answer.status_code == 400, answer.text
        told = answer.json()["detail"]
        assert "data[0].loss_fn_inputs.target_tokens" in told, told
        assert "shape [2, 134217728] with 1 stored values" in told, told
        sent = 8 + 4 + 2 * 8 * (3 + 1)
        assert str(FLAT_BYTES + BYTES_PER_TOKEN * 2 + TIMES_STORED * sent) in told, told
        assert str(2 * WIDE * (8 + 4)) in told, told
        assert seq_id <= 2
    done = await app_world.ok("forward_backward", sparse_request(model, 3, 8))
    assert loss_of(await app_world.result(done)) > 0, "small sparse inputs train as before"
    assert _pid(app_world) == worker


async def test_inputs_and_datums_are_counted_together(app_world: AppWorld) -> None:
    """Sixty-four datums of which each alone would pass."""
    model = await app_world.model()
    await app_world.facts()
    alone = await app_world.post("forward_backward", sparse_request(model, 1, 2**17))
    assert alone.status_code == 200, alone.text
    many = await app_world.post("forward_backward", sparse_request(model, 2, 2**17, 64))
    assert many.status_code == 400
    assert "sparse inputs of this request (128)" in many.json()["detail"]


async def test_what_tokens_allow_of_wide_inputs_has_an_end(app_world: AppWorld) -> None:
    """A million tokens are a few bytes on the wire, and all inputs are dense at the same time."""
    model = await app_world.model()
    await app_world.facts()
    worker = _pid(app_world)
    columns = MOST_FOR_TOKENS // 12
    message = pb.ForwardBackwardRequest.FromString(_sparse_proto(model, 1, columns))
    plain = pb.ForwardBackwardRequest.FromString(train_body(model, 1, [1] * 32_000)).data[0]
    message.data.extend([plain] * 5)
    assert 5 * 32_000 * BYTES_PER_TOKEN > 2 * columns * (8 + 4), "by the tokens alone it would pass"
    body = bytes(message.SerializeToString())
    answer = await app_world.post("forward_backward", body, headers=PROTO)
    assert answer.status_code == 400, answer.text
    told = answer.json()["detail"]
    assert f"shape [2, {columns}] with 1 stored values" in told
    assert f"{BYTES_PER_TOKEN} for each token (at most {MOST_FOR_TOKENS})" in told
    for tensor in message.data[0].loss_fn_inputs.values():
        tensor.shape[1] = columns // 4
    message.seq_id = 2
    body = bytes(message.SerializeToString())
    answer = await app_world.post("forward_backward", body, headers=PROTO)
    assert "sparse inputs of this datum (2)" in answer.json()["detail"], "others' tokens do not pay"
    assert _pid(app_world) == worker


async def _loss(world: AppWorld, session: str, number: int, traced: Any, **who: Any) -> str:
    body = {"session_id": session, "custom_loss_seq_id": number, **traced}
    promise = await world.ok("create_custom_loss", body, **who)
    return str((await world.result(promise, **who))["loss_id"])


async def test_fourteen_sparse_inputs_of_a_traced_loss_are_refused(app_world: AppWorld) -> None:
    session = await app_world.session()
    model = await app_world.model(session)
    await app_world.facts()
    names = [f"x{number}" for number in range(14)]
    wide_loss = traced(
        [("logprobs", 2), *((name, 2) for name in names)], [call("loss", "torch.sum", "logprobs")]
    )
    loss_id = await _loss(app_world, session, 1, wide_loss)
    worker = _pid(app_world)
    wide = {name: sparse_tensor(WIDE, "float32", 1.0) for name in names}
    given = {
        "data": [sparse_datum(4, **wide)],
        "loss_fn": "custom",
        "loss_fn_config": {"loss_id": loss_id},
    }
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": given}
    answer = await app_world.post("forward_backward", body)
    assert answer.status_code == 400, answer.text
    assert "sparse inputs of this request (15)" in answer.json()["detail"]
    assert _pid(app_world) == worker


# ------------------------------------------------------------------------------------ deaths


async def _trained(world: AppWorld, model: str, first: int) -> float:
    loss = (await world.train(model, first, TOKENS)).json()
    await world.result((await world.step(model, first + 1)).json())
    return loss_of(await world.result(loss))


async def _kill_at_work(world: AppWorld, request_id: str, kernel: Path | None = None) -> None:
    """Kill the worker while it works on a request; with `kernel`, its count of kills grows."""
    worker: Any = world.service.workers.pool.members[0]
    await soon(lambda: worker.is_ready and any(request_id in j for j in worker._look().job_ids))
    pid = worker.pid
    if kernel is not None:
        count = int(kernel.read_text().split()[1])
        kernel.write_text(f"oom_kill {count + 1}\n")
    os.kill(pid, signal.SIGKILL)
    await soon(lambda: worker.pid != pid)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 0\n")
    return file


async def test_a_job_that_the_kernel_ends_for_memory_twice_is_given_up(
    tmp_path: Path, kernel: Path
) -> None:
    async with open_app(tmp_path / "data", engine=f"toy:hang_token={HANG}") as world:
        worker: Any = world.service.workers.pool.members[0]
        worker._kills = KernelKills([kernel])
        worker._kills.look()
        session = await world.session()
        hostile, polite = [await world.model(session, number) for number in range(2)]
        before = await _trained(world, polite, 1)
        heavy = (await world.train(hostile, 1, [HANG, 2, 3])).json()
        for _ in range(2):
            await _kill_at_work(world, heavy["request_id"], kernel)
        failed = await world.result(heavy)
        assert "ran out of memory 2 times while it ran this request" in failed["error"]
        assert await _trained(world, hostile, 2) == before, "its state is as it was"
        assert await _trained(world, polite, 3) < before
        assert worker.generation == 3


async def test_a_job_whose_worker_somebody_kills_is_run_again(tmp_path: Path, kernel: Path) -> None:
    """Without the kernel's count a SIGKILL is an operator's, or a test's."""
    async with open_app(tmp_path / "data", engine=f"toy:hang_token={HANG}") as world:
        worker: Any = world.service.workers.pool.members[0]
        worker._kills = KernelKills([kernel])
        model = await world.model()
        promise = (await world.train(model, 1, [HANG, 2, 3])).json()
        for _ in range(3):
            await _kill_at_work(world, promise["request_id"])
        name = promise["request_id"]
        await soon(lambda: worker.is_ready and any(name in j for j in worker._look().job_ids))
        (lane,) = world.service.lanes
        (request,) = lane.queue.in_order()
        held = request.suspicion
        assert (held.attempts, held.memory_deaths, held.on_trial) == (3, 0, False)


def test_the_kernels_count_is_found_in_either_kind_of_control_group(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    listing = proc / "self" / "cgroup"
    assert count_files(proc, groups) == [proc / "vmstat"]
    listing.write_text("0::/a.slice/b\n")
    (groups / "a.slice" / "b").mkdir(parents=True)
    second = groups / "a.slice" / "b" / "memory.events"
    second.write_text("low 0\noom 1\noom_kill 3\noom_group_kill 9\n")
    assert count_files(proc, groups) == [second]
    listing.write_text("9:cpu,cpuacct:/x\n4:memory:/of/the/host\n0::/\n")
    (groups / "memory").mkdir()
    first = groups / "memory" / "memory.oom_control"
    first.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert count_files(proc, groups) == [first]
    kills = KernelKills([second])
    kills.look()
    assert cause_of(-signal.SIGKILL, is_ours=False, kills=kills) == ""
    second.write_text("oom_kill 4\n")
    assert cause_of(-signal.SIGKILL, is_ours=False, kills=kills) == "memory"
    assert cause_of(-signal.SIGKILL, is_ours=True, kills=kills) == ""
    assert cause_of(-signal.SIGTERM, is_ours=False, kills=kills) == ""
    assert cause_of(-signal.SIGSEGV, is_ours=False, kills=kills) == "crash"
    assert cause_of(1, is_ours=False, kills=kills) == "crash"
    assert cause_of(0, is_ours=False, kills=kills) == ""
    assert cause_of(os.EX_TEMPFAIL, is_ours=False, kills=kills) == "", (
        "a rank of its group was lost"
    )


# ------------------------------------------------------------------------------------ time


async def test_a_traced_loss_of_too_much_work_is_refused_with_its_numbers(
    app_world: AppWorld,
) -> None:
    session = await app_world.session()
    model = await app_world.model(session)
    await app_world.facts()
    worker = _pid(app_world)
    loss_id = await _loss(app_world, session, 1, product_loss(30, 8192))
    given = {
        "data": [datum()] * 256,
        "loss_fn": "custom",
        "loss_fn_config": {"loss_id": loss_id},
    }
    body = {"model_id": model, "seq_id": 1, "forward_backward_input": given}
    answer = await app_world.post("forward_backward", body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["detail"]
    assert "data[0]: the custom loss takes" in told
    assert int(told.split("takes ")[1].split()[0]) > 30 * 2 * 1024 * 8192 * 1024
    assert "(most: 4294967296)" in told
    assert _pid(app_world) == worker


async def test_who_was_to_blame_twice_waits_while_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.fairness.pauses.FIRST_S", 3600.0)
    monkeypatch.setattr("tinkex.server.fairness.pauses.LONGEST_S", 3600.0)
    async with open_app(
        tmp_path,
        engine=f"toy:hang_token={HANG}",
        stuck_after_s=5.0,
        hold_s=0.05,
        api_keys=("tml-ann=ann", "tml-bob=bob"),
    ) as world:
        ann, bob = "tml-ann", "tml-bob"
        hostile, polite = await world.model(key=ann), await world.model(key=bob)
        pauses = world.service.open_work.pauses
        for seq_id in (1, 2):
            assert pauses.left_s("ann") == 0, "once is bad luck"
            stuck = (await world.train(hostile, seq_id, [HANG, 2], key=ann)).json()
            assert "did not get on" in (await world.result(stuck, key=ann))["error"]
        waiting = (await world.train(hostile, 3, TOKENS, key=ann)).json()
        sampler = await world.ok(
            "create_sampling_session",
            {
                "session_id": await world.session(key=ann),
                "sampling_session_seq_id": 0,
                "base_model": "toy",
            },
            key=ann,
        )
        asked = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 2},
        }
        sampling = await world.ok("asample", asked, key=ann)
        for seq_id in range(1, 6):
            promise = (await world.train(polite, seq_id, TOKENS, key=bob)).json()
            assert loss_of(await world.result(promise, key=bob)) > 0
        for promise in (waiting, sampling):
            body = {"request_id": promise["request_id"]}
            answer = await world.post("retrieve_future", body, key=ann)
            assert answer.status_code == 408, answer.text
            told = answer.json()["queue_state_reason"]
            assert "jobs of this account ended a worker 2 times" in told


def test_pauses_double_and_are_forgotten() -> None:
    now = [0.0]
    pauses = Pauses(clock=lambda: now[0])
    pauses.blame("eve")
    assert pauses.left_s("eve") == 0
    for times in range(12):
        pauses.blame("eve")
        assert pauses.left_s("eve") == min(FIRST_S * 2**times, LONGEST_S)
        assert pauses.left_s("ann") == 0
    now[0] += FORGET_S
    pauses.blame("eve")
    assert pauses.left_s("eve") == 0
