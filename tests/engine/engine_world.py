"""An engine under test and the jobs that it is given: `World` submits, a `Ticket` waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from datums import train_datum

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs

VOCAB = 97
ENDS = (jobs.Done, jobs.Failed)


class Ticket:
    """A submitted job: its events, and its end."""

    def __init__(self, world: World, job: jobs.Job) -> None:
        self.job, self.world = job, world
        self.events: list[jobs.Event] = []
        self._ended = threading.Event()
        world.engine.submit(job, self._on_event)

    def _on_event(self, event: jobs.Event) -> None:
        self.events.append(event)
        if isinstance(event, ENDS):
            self.world.ended.append(self.job.job_id)
            self._ended.set()

    def wait(self) -> Any:
        """The event that ended the job."""
        assert self._ended.wait(200), f"{self.job} did not end"
        assert sum(isinstance(event, ENDS) for event in self.events) == 1
        return self.events[-1]

    def ends_within(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    @property
    def result(self) -> Any:
        assert isinstance(self.wait(), jobs.Done), self.wait()
        return self.wait().result


class World:
    """An engine, and the jobs that it is given."""

    def __init__(self, engine: jobs.Engine, base: str) -> None:
        self.engine, self.base = engine, base
        self.ended: list[str] = []
        self.count = 0

    def put(self, kind: type, **fields: Any) -> Ticket:
        self.count += 1
        return Ticket(self, kind(job_id=f"{kind.__name__}{self.count}", **fields))

    def create(self, adapter_id: str = "a", **lora: Any) -> Ticket:
        spec = jobs.LoraSpec(**({"rank": 4, "seed": 0} | lora))
        return self.put(
            jobs.CreateAdapterJob, adapter_id=adapter_id, base_model=self.base, lora=spec
        )

    def train(self, adapter_id: str = "a", data: Any = None, **fields: Any) -> Ticket:
        data = data if data is not None else (random_datum(12),)
        fields = {"loss_fn": "cross_entropy"} | fields
        return self.put(jobs.TrainJob, adapter_id=adapter_id, data=data, **fields)

    def step(self, adapter_id: str = "a", lr: float = 0.01) -> Ticket:
        params = AdamParams(learning_rate=lr)
        return self.put(jobs.OptimJob, adapter_id=adapter_id, params=params)

    def save(self, folder: Path, adapter_id: str = "a", **fields: Any) -> Ticket:
        return self.put(jobs.SaveAdapterJob, adapter_id=adapter_id, folder=str(folder), **fields)

    def load(self, folder: Path, adapter_id: str = "a") -> Ticket:
        return self.put(
            jobs.LoadAdapterJob,
            adapter_id=adapter_id,
            base_model=self.base,
            folder=str(folder),
            with_optimizer=True,
        )

    def sample(self, folder: Path | None = None, **fields: Any) -> Ticket:
        defaults = {"prompt": np.array([3, 4, 5]), "max_tokens": 8, "stop_tokens": ()}
        return self.put(
            jobs.SampleJob,
            base_model=self.base,
            adapter_folder=None if folder is None else str(folder),
            **(defaults | fields),
        )

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """The engine's thread is kept busy; what is submitted meanwhile waits together."""
        gate, held = threading.Event(), threading.Event()

        def emit(event: jobs.Event) -> None:
            held.set()
            assert gate.wait(200)

        self.engine.submit(jobs.DescribeModelJob(job_id="held", base_model=self.base), emit)
        assert held.wait(200)
        try:
            yield
        finally:
            gate.set()


def random_datum(length: int, seed: int = 0) -> jobs.TrainDatum:
    return train_datum(np.random.default_rng(seed).integers(2, VOCAB, length + 1))
