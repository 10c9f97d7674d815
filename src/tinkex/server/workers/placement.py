"""Which worker a model or a sample goes to, and the lines in front of each worker.

A model stays with one worker for its life; samples of a model's checkpoints go where the model
trains, because its weights are in memory there. Everything else goes to the shortest line.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.server.work.queue import FairGate
from tinkex.server.workers.worker import Worker


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A worker and the two gates before it: one for training, one for samples."""

    worker: Worker
    training: FairGate
    sampling: FairGate


class Placement:
    def __init__(self, workers: Sequence[Worker], *, max_training: int, max_sampling: int) -> None:
        if not workers:
            raise ValueError("a server needs at least one worker")
        self.places = tuple(
            Place(worker, FairGate(max_training), FairGate(max_sampling)) for worker in workers
        )

    def of_model(self, model_id: str) -> Place:
        return self.places[zlib.crc32(model_id.encode()) % len(self.places)]

    def of_sample(self, model_id: str | None) -> Place:
        if model_id is not None:
            return self.of_model(model_id)
        return min(self.places, key=lambda place: place.sampling.num_waiting)

    @property
    def num_sample_places(self) -> int:
        return sum(place.sampling.num_places for place in self.places)

    def trouble(self) -> str:
        """Why not every worker takes jobs and gets on with them; empty when all do."""
        for worker in (place.worker for place in self.places):
            if not worker.is_ready:
                return f"{worker.name} is starting"
            if not worker.is_moving:
                return f"{worker.name} has work and makes no progress"
        return ""
