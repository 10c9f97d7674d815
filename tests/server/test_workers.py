"""Workers: children that may die without taking anything but time, one per device group."""

from __future__ import annotations

import asyncio
import os
import pickle
from typing import Any

import numpy as np
import pytest
from patience import soon

from tinkex.engine.jobs import DescribeModelJob, ModelInfo, SampleJob
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.workers.child import SMALL_ARRAY_BYTES, WorkerSpec, dumps
from tinkex.server.workers.lease import Lease
from tinkex.server.workers.process_worker import ProcessWorker
from tinkex.server.workers.worker import run


def describe(job_id: str = "d") -> DescribeModelJob:
    return DescribeModelJob(job_id=job_id, base_model="toy")


async def started(engine: str = "toy", **spec: Any) -> ProcessWorker:
    worker = ProcessWorker(WorkerSpec(engine=engine, **spec))
    await worker.start()
    return worker


async def test_a_dead_child_fails_its_jobs_and_is_replaced() -> None:
    worker = await started("toy:latency_s=600")
    await worker.wait_ready()
    first, pid = worker.generation, worker.pid
    job = asyncio.create_task(run(worker, describe()))
    await soon(lambda: worker._pending)
    os.kill(pid, 9)
    with pytest.raises(WorkerLostError):
        await job
    await worker.wait_ready()
    assert worker.generation == first + 1
    assert worker.pid != pid
    with pytest.raises(WorkerLostError):
        await Lease(worker, first).post(describe("again"))
    await worker.close()


async def test_jobs_wait_for_a_child_that_is_still_starting() -> None:
    worker = await started()
    info = await run(worker, describe())
    assert isinstance(info, ModelInfo)
    await worker.close()


async def test_a_users_mistake_comes_back_as_one() -> None:
    worker = await started(models=("known",))
    with pytest.raises(InvalidInputError, match="no base model 'toy'"):
        await run(worker, describe())
    await worker.close()


async def test_cancelling_reaches_the_engine() -> None:
    import numpy as np

    worker = await started("toy:token_latency_s=1")
    await worker.wait_ready()
    job = SampleJob(
        job_id="s",
        base_model="toy",
        adapter_folder=None,
        prompt=np.array([1], dtype=np.int64),
        max_tokens=500,
        stop_tokens=(),
    )
    task = asyncio.create_task(run(worker, job))
    await soon(lambda: worker._pending)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker._pending == {}
    assert isinstance(await asyncio.wait_for(run(worker, describe()), 60), ModelInfo)
    await worker.close()


async def test_a_child_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    worker = ProcessWorker(WorkerSpec(engine="toy"), start_timeout_s=0.5)
    await worker.start()
    with pytest.raises(EngineError, match="right after its start"):
        await run(worker, describe())
    await worker.close()


ARRAYS = [
    np.arange(4),
    np.array(3),
    np.empty((0, 2), np.float32),
    np.ones((2, 3), np.float16),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(8)[::2],
    np.frombuffer(b"1234", np.uint8),
    np.array([1, 2], ">i4"),
    np.array(["a", "bc"]),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]),
    np.arange(SMALL_ARRAY_BYTES),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_an_array_comes_through_the_pipe_as_it_is(array: np.ndarray[Any, Any]) -> None:
    found = pickle.loads(dumps({"x": array}))["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()
    assert found.flags.writeable
