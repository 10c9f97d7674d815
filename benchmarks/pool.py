"""One worker against a pool of them: samples, steps, an adapter's way, growth; then a real model.

The toy engine has artificial latencies here (a token takes as long as on a real device and a worker
generates eight samples at a time), so that the pool is measured and not this machine's two cores.
The last figures are SmolLM2-135M on the real engine: two workers of one thread share every pass,
against one worker of two threads; and what it takes them to add up the gradients of an adapter of
rank 32 over gloo.

    python benchmarks/pool.py [--no-bar] [--write] [--no-model]
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import report

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.jobs import (
    CreateAdapterJob,
    Job,
    LoraSpec,
    OptimJob,
    OptimResult,
    Result,
    SampleJob,
    SaveAdapterJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.process_worker import ProcessWorker

SAMPLING = "toy:token_latency_s=0.03,max_running=8"
TRAINING = "toy:train_token_latency_s=0.002"
ADAPTER_BYTES = 35_000_000
_ids = map(str, itertools.count())


def member(engine: str, threads: int | None = None) -> ProcessWorker:
    return ProcessWorker(WorkerSpec(engine=engine, threads=threads), name=f"worker-{next(_ids)}")


@asynccontextmanager
async def opened(size: int, engine: str, threads: int | None = None) -> AsyncIterator[Pool]:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        deterministic = engine.startswith("toy")
        members = [member(engine, threads) for _ in range(size)]
        pool = Pool(
            members,
            rendezvous=rendezvous,
            deterministic=deterministic,
            all_reduce_timeout_s=60.0,
        )
        await pool.start()
        await asyncio.gather(*(one.wait_ready() for one in pool.members))
        try:
            yield pool
        finally:
            await pool.close()


async def run(pool: Pool, kind: Callable[..., Job], **fields: Any) -> Result:
    return await pool.post(kind(job_id=next(_ids), **fields))


# ------------------------------------------------------------------------------------ sampling


async def sample(pool: Pool, number: int) -> None:
    await run(
        pool,
        SampleJob,
        base_model="toy",
        adapter_folder=None,
        prompt=np.array([3 + number % 500, 5], dtype=np.int64),
        max_tokens=16,
        stop_tokens=(),
    )


class Load:
    """Somebody who keeps a number of samples under way, whatever the pool does."""

    def __init__(self, pool: Pool, num_open: int) -> None:
        self.num_done = self.num_lost = 0
        self._pool, self._stopped = pool, False
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(num_open)]

    async def _ask(self, first: int) -> None:
        for number in itertools.count(first, len(str(first)) + 100):
            if self._stopped:
                return
            try:
                await sample(self._pool, number)
                self.num_done += 1
            except Exception as exc:
                print(f"lost: {exc}", file=sys.stderr)
                self.num_lost += 1

    async def rate(self, seconds: float) -> float:
        began, before = time.perf_counter(), self.num_done
        await asyncio.sleep(seconds)
        return (self.num_done - before) / (time.perf_counter() - began)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


async def samples_per_s(size: int) -> float:
    async with opened(size, SAMPLING) as pool:
        load = Load(pool, 12 * size)
        await load.rate(1.5)  # all slots are taken by then
        rate = await load.rate(6.0)
        await load.stop()
        assert load.num_lost == 0
        return rate


async def growth() -> tuple[float, float, int]:
    """Samples per second with two members, with two more, and how many were lost on the way."""
    async with opened(2, SAMPLING) as pool:
        load = Load(pool, 48)
        await load.rate(1.5)
        before = await load.rate(6.0)
        new = [member(SAMPLING) for _ in range(2)]
        for one in new:
            await pool.add(one)
        await asyncio.gather(*(one.wait_ready() for one in new))
        await load.rate(1.5)
        after = await load.rate(6.0)
        await load.stop()
        return before, after, load.num_lost


# ------------------------------------------------------------------------------------ training


def batch(num: int, length: int, num_ids: int = 8) -> tuple[TrainDatum, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        TrainDatum(
            tokens=rng.integers(3, 3 + num_ids, length),
            inputs={
                "target_tokens": rng.integers(3, 3 + num_ids, length),
                "weights": np.ones(length, np.float32),
            },
        )
        for _ in range(num)
    )


async def step(pool: Pool, data: tuple[TrainDatum, ...]) -> tuple[TrainResult, OptimResult]:
    job = TrainJob(job_id=next(_ids), adapter_id="a", data=data, loss_fn="cross_entropy")
    params = AdamParams(learning_rate=1e-3)
    passed = pool.post(job)
    stepped = pool.post(OptimJob(job_id=next(_ids), adapter_id="a", params=params))
    result, end = await asyncio.gather(passed, stepped)
    assert isinstance(result, TrainResult)
    assert isinstance(end, OptimResult)
    return result, end


async def share(pool: Pool, base_model: str, data: tuple[TrainDatum, ...], rank: int = 8) -> None:
    """Train until all members share the run."""
    lora = LoraSpec(rank=rank, seed=1)
    await run(pool, CreateAdapterJob, adapter_id="a", base_model=base_model, lora=lora)
    for _ in range(20):  # what a pass takes is measured, then others join
        result, _ = await step(pool, data)
        if result.metrics.get("num_workers:max") == pool.size:
            return
    raise RuntimeError(f"the pass was never split over {pool.size} workers")


async def steps_per_s(
    pool: Pool,
    base_model: str,
    data: tuple[TrainDatum, ...],
    num: int,
    on_begin: Callable[[], None] = lambda: None,
) -> float:
    await share(pool, base_model, data)
    on_begin()
    began = time.perf_counter()
    for _ in range(num):
        await step(pool, data)
    return num / (time.perf_counter() - began)


async def toy_steps_per_s(size: int) -> float:
    async with opened(size, TRAINING) as pool:
        return await steps_per_s(pool, "toy", batch(64, 32), 3 if size == 1 else 12)


async def adapter_everywhere(size: int) -> float:
    """Seconds from the end of a save until every member has sampled from it."""
    async with opened(size, f"toy:adapter_bytes={ADAPTER_BYTES}") as pool:
        await run(
            pool, CreateAdapterJob, adapter_id="a", base_model="toy", lora=LoraSpec(rank=8, seed=1)
        )
        took = []
        for _ in range(5):
            with tempfile.TemporaryDirectory() as parent:
                folder = str(Path(parent) / "saved")
                await run(
                    pool, SaveAdapterJob, adapter_id="a", folder=folder,
                    for_sampling=True, ephemeral=True,
                )  # fmt: skip
                began = time.perf_counter()
                jobs = [
                    one.post(
                        SampleJob(
                            job_id=next(_ids),
                            base_model="toy",
                            adapter_folder=folder,
                            prompt=np.array([3], dtype=np.int64),
                            max_tokens=1,
                        )
                    )
                    for one in pool.members
                ]
                await asyncio.gather(*jobs)
                took.append(time.perf_counter() - began)
        return sorted(took)[2]


async def model_tokens_per_s(size: int, threads: int) -> tuple[float, float]:
    """Tokens a second, and tokens a second of CPU time, which other programs hardly change."""
    from tinkex.engine.model import default_model

    data, num = batch(16, 64, num_ids=1000), 4
    async with opened(size, "torch", threads) as pool:
        spent_s: list[float] = []
        rate = await steps_per_s(
            pool, default_model.NAME, data, num, lambda: spent_s.append(cpu_seconds(pool))
        )
        num_tokens = sum(len(datum.tokens) for datum in data)
        return rate * num_tokens, num * num_tokens / (cpu_seconds(pool) - spent_s[0])


async def reduce_s() -> float:
    """Seconds until two members have each other's gradients of a rank-32 adapter, added up."""
    from tinkex.engine.model import default_model

    async with opened(2, "torch", 1) as pool:
        data = batch(8, 16, num_ids=1000)
        await share(pool, default_model.NAME, data, rank=32)
        took = []
        for _ in range(5):
            _, end = await step(pool, data)
            took.append(end.metrics["reduce_time_s:sum"] + end.metrics["transfer_time_s:sum"])
        return sorted(took)[2]


def cpu_seconds(pool: Pool) -> float:
    """What the members took so far."""
    ticks = 0
    for one in pool.members:
        assert isinstance(one, ProcessWorker)
        fields = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(with_model: bool) -> list[report.Figure]:
    one, eight = await samples_per_s(1), await samples_per_s(8)
    figures = [
        report.Figure(
            name="pool_samples_8_workers", ours=eight, peer=one, unit="samples/s", bar=7.0,
            note="toy, 0.03 s a token, 8 at a time; peer: one worker",
        )
    ]  # fmt: skip
    one, eight = await toy_steps_per_s(1), await toy_steps_per_s(8)
    figures.append(
        report.Figure(
            name="pool_steps_8_workers", ours=eight, peer=one, unit="steps/s", bar=6.0,
            note="toy, 2048 tokens of 2 ms; peer: one worker",
        )
    )  # fmt: skip
    figures.append(
        report.Figure(
            name="pool_adapter_on_8_workers", ours=await adapter_everywhere(8), unit="s", bar=0.2,
            note="from the end of a save of 35 MB until all have sampled from it",
        )
    )  # fmt: skip
    before, after, num_lost = await growth()
    figures += [
        report.Figure(
            name="pool_grows_2_to_4", ours=after, peer=before, unit="samples/s", bar=1.8,
            note="under load; peer: before",
        ),
        report.Figure(name="pool_growth_lost", ours=num_lost, unit="errors", bar=0),
    ]  # fmt: skip
    if with_model:
        ours, peers = [], []
        for _ in range(2):
            peers.append(await model_tokens_per_s(1, 2))
            ours.append(await model_tokens_per_s(2, 1))
        names = ("pool_smollm2_2x1_thread", "pool_smollm2_2x1_thread_cpu")
        for place, (name, unit) in enumerate(zip(names, ("tokens/s", "tokens/CPU s"), strict=True)):
            figures.append(
                report.Figure(
                    name=name, ours=max(pair[place] for pair in ours),
                    peer=max(pair[place] for pair in peers), unit=unit,
                    bar=1.0, note="SmolLM2-135M on the CPU; peer: one worker of two threads",
                )
            )  # fmt: skip
        figures.append(
            report.Figure(
                name="pool_reduce_gloo", ours=await reduce_s(), unit="s",
                note="2 workers, SmolLM2-135M, rank 32, median of 5 steps",
            )
        )  # fmt: skip
    return figures


if __name__ == "__main__":
    sys.exit(report.finish("pool", asyncio.run(measure("--no-model" not in sys.argv))))
