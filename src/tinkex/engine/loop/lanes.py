"""The waiting jobs of every adapter, in the order they came.

An adapter's jobs are a lane: only the first of a lane may run, and a lane never waits for another
one. Knows jobs and how passes are packed, not who computes them. Not thread-safe.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple

from tinkex.engine import jobs
from tinkex.engine.loop.compute import Packing


class WaitingJob(NamedTuple):
    """A job of an adapter, and whoever hears of it."""

    order: int
    job: jobs.AdapterJob
    emit: jobs.Emit


class Lanes:
    """WaitingJob jobs by adapter. A lane that runs empty is forgotten."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[WaitingJob]] = {}
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, job: jobs.AdapterJob, emit: jobs.Emit) -> None:
        lane = self._lanes.setdefault(job.adapter_id, deque())
        lane.append(WaitingJob(next(self._order), job, emit))

    def fronts(self, *, besides: Container[str] = ()) -> list[WaitingJob]:
        """The first job of each lane, except of the adapters `besides`."""
        return [lane[0] for name, lane in self._lanes.items() if name not in besides]

    def take(self, first: WaitingJob) -> None:
        """Remove a job from the front of its lane."""
        lane = self._lanes[first.job.adapter_id]
        removed = lane.popleft()
        assert removed is first, "it is not the first of its lane"
        if not lane:
            del self._lanes[first.job.adapter_id]

    def take_pass(
        self,
        first: WaitingJob,
        packing_of: Callable[[str], Packing | None],
        *,
        besides: Container[str],
    ) -> list[WaitingJob]:
        """Remove a training job and the jobs that fit into its last pass beside it.

        More jobs of its own lane come first, then the fronts of other lanes by age. A job joins
        whole or not at all, so it is never split over more passes than it needs alone.
        """
        self.take(first)
        packing = packing_of(first.job.adapter_id)
        if packing is None or not may_share(first.job):
            return [first]
        chosen, room = [first], packing.max_tokens - num_tokens(first.job)
        names = {waiting.job.adapter_id for waiting in self.fronts(besides=besides)}
        own = first.job.adapter_id
        for name in sorted(names, key=lambda name: (name != own, self._lanes[name][0].order)):
            if packing_of(name) != packing:
                continue
            for waiting in list(self._lanes[name]):
                if not may_share(waiting.job) or num_tokens(waiting.job) > room:
                    break
                self.take(waiting)
                chosen.append(waiting)
                room -= num_tokens(waiting.job)
        return chosen

    def cancel(self, job_id: str) -> jobs.Emit | None:
        """Remove a job wherever it waits, and give whoever hears of it; None: it is not here."""
        for name, lane in self._lanes.items():
            for waiting in lane:
                if waiting.job.job_id == job_id:
                    lane.remove(waiting)
                    if not lane:
                        del self._lanes[name]
                    return waiting.emit
        return None

    def clear(self) -> list[WaitingJob]:
        """Remove and give all jobs that wait."""
        lanes, self._lanes = self._lanes, {}
        return [waiting for lane in lanes.values() for waiting in lane]


def may_share(job: jobs.AdapterJob) -> bool:
    """Whether a job is a training job that others may join in a pass."""
    return isinstance(job, jobs.TrainJob) and not job.alone


def num_tokens(job: jobs.AdapterJob) -> int:
    """The tokens of a training job; none of any other."""
    return sum(len(datum.tokens) for datum in job.data) if isinstance(job, jobs.TrainJob) else 0
