"""Pools of child processes, or of engines in this process, and a run to put through them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.jobs import (
    CreateAdapterJob,
    Done,
    Engine,
    Event,
    Failed,
    Job,
    LoraSpec,
    OptimJob,
    OptimResult,
    Result,
    SaveAdapterJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.workers import placement
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.process_worker import ProcessWorker
from tinkex.server.workers.worker import OnEvent, Worker

TOY = "toy:train_token_latency_s=1e-7"
_numbers = itertools.count()


class EngineWorker:
    """A member without a process of its own: starts at once, dies when told to."""

    def __init__(self, make: Callable[[], Engine], name: str) -> None:
        self.name, self.generation, self.refusal = name, 0, ""
        self.is_ready = self.is_moving = False
        self.held_bytes: dict[str, int] = {}
        self.utilisation = 0.0
        self.address = ""
        self._make = make
        self._engine: Engine | None = None
        self._pending: dict[str, asyncio.Future[Result]] = {}

    async def start(self) -> None:
        self._engine = await asyncio.to_thread(self._make)
        self.generation += 1
        self.is_ready = self.is_moving = True

    async def wait_ready(self) -> None:
        assert self.is_ready

    async def die(self) -> None:
        """Lose everything and come back."""
        self.is_ready = False
        assert self._engine is not None
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(WorkerLostError(f"{self.name} died"))
                future.exception()
        await asyncio.to_thread(self._engine.close)
        await self.start()

    def post(self, job: Job, on_event: OnEvent | None = None) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        if not self.is_ready:
            future.set_exception(WorkerLostError(f"{self.name} is starting"))
            return future
        self._pending[job.job_id] = future
        assert self._engine is not None
        self._engine.submit(job, lambda e: loop.call_soon_threadsafe(self._take, e, on_event))
        return future

    def _take(self, event: Event, on_event: OnEvent | None) -> None:
        if isinstance(event, Done | Failed):
            future = self._pending.pop(event.job_id, None)
            if future is None or future.done():
                return
            if isinstance(event, Done):
                future.set_result(event.result)
            elif event.category == "cancelled":
                future.cancel()
            else:
                kind = InvalidInputError if event.category == "user" else EngineError
                future.set_exception(kind(event.message))
        elif on_event is not None:
            on_event(event)

    def cancel(self, job_id: str) -> None:
        assert self._engine is not None
        self._engine.cancel(job_id)

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)


def child(engine: str = "toy", **spec: Any) -> ProcessWorker:
    return ProcessWorker(WorkerSpec(engine=engine, **spec), name=f"worker-{next(_numbers)}")


def torch_member(deterministic: bool, **options: Any) -> EngineWorker:
    from tinkex.engine.torch.config import EngineConfig
    from tinkex.engine.torch.engine import TorchEngine

    config = EngineConfig(device="cpu", deterministic=deterministic, **options)
    return EngineWorker(lambda: TorchEngine(config), f"engine-{next(_numbers)}")


@asynccontextmanager
async def opened(
    members: Sequence[Worker],
    rendezvous: Path | None = None,
    *,
    deterministic: bool = True,
    all_reduce_timeout_s: float = 60.0,
) -> AsyncIterator[Pool]:
    pool = Pool(
        members,
        rendezvous=rendezvous,
        deterministic=deterministic,
        all_reduce_timeout_s=all_reduce_timeout_s,
    )
    await pool.start()
    try:
        await asyncio.gather(*(member.wait_ready() for member in pool.members))
        yield pool
    finally:
        await pool.close()


def always_split(monkeypatch: Any) -> None:
    """Passes that take microseconds are split as if they took minutes."""
    monkeypatch.setattr(placement, "PART_S", -1e6)


def datums(rng: np.random.Generator, num: int, vocab: int = 97) -> tuple[TrainDatum, ...]:
    data = []
    for _ in range(num):
        length = int(rng.integers(2, 24))
        inputs: dict[str, Any] = {
            "target_tokens": rng.integers(3, vocab, length),
            "weights": rng.normal(size=length).astype(np.float32),
        }
        data.append(TrainDatum(tokens=rng.integers(3, vocab, length), inputs=inputs))
    return tuple(data)


class Run:
    """One adapter's jobs, posted in order; `seen` is all that a client would have been told."""

    def __init__(self, pool: Pool, base_model: str, adapter_id: str = "a", seed: int = 0) -> None:
        self.pool, self.base_model, self.adapter_id = pool, base_model, adapter_id
        self.rng = np.random.default_rng(seed)
        self.seen: list[Any] = []
        self.most_workers = 0.0

    async def post(self, kind: Callable[..., Job], **fields: Any) -> Any:
        number = next(_numbers)
        return await self.pool.post(
            kind(job_id=f"{self.adapter_id}-{number}", adapter_id=self.adapter_id, **fields)
        )

    async def create(self) -> None:
        lora = LoraSpec(rank=4, seed=1, alpha=8.0)
        await self.post(CreateAdapterJob, base_model=self.base_model, lora=lora)

    async def train(self, num: int = 9, **fields: Any) -> TrainResult:
        fields = {"loss_fn": "cross_entropy"} | fields
        if "data" not in fields:
            fields["data"] = datums(self.rng, num)
        result: TrainResult = await self.post(TrainJob, **fields)
        self.most_workers = max(self.most_workers, result.metrics.get("num_workers:max", 1))
        outputs = [output["logprobs"].tobytes() for output in result.outputs]
        told = {k: v for k, v in result.metrics.items() if "time" not in k and "num_w" not in k}
        self.seen.append((outputs, told, result.num_tokens))
        return result

    async def step(self, rate: float = 0.02) -> OptimResult:
        params = AdamParams(learning_rate=rate, grad_clip_norm=1.0, weight_decay=0.01)
        result: OptimResult = await self.post(OptimJob, params=params)
        self.seen.append({k: v for k, v in result.metrics.items() if "time" not in k})
        return result

    async def saved(self, folder: Path, **options: Any) -> str:
        """A hash of all weights and moments that a save holds."""
        await self.post(SaveAdapterJob, folder=str(folder), with_optimizer=True, **options)
        return hash_of(folder)

    async def steps(self, num: int) -> None:
        """Steps of one, two and three passes each, large and small."""
        for number in range(num):
            for _ in range(1 + number % 3):
                await self.train(int(self.rng.integers(1, 14)))
            await self.step()

    async def until_shared(self, by: int) -> None:
        """Go forward until so many members share the adapter."""
        data = datums(np.random.default_rng(0), 2 * by)
        for _ in range(1000):
            if len(self.pool.place(self.adapter_id).leases) >= by:
                return
            await self.train(data=data, backward=False)
            self.seen.pop()
            await asyncio.sleep(0.01)
        raise AssertionError(f"nobody came to share {self.adapter_id}")


def hash_of(folder: Path) -> str:
    content = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            content.update(file.read_bytes())
        elif file.suffix == ".npz":
            with np.load(file) as arrays:
                for name in sorted(arrays):
                    content.update(arrays[name].tobytes())
    return content.hexdigest()
