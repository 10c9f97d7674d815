"""What the toy has to do, by the time it is due; samples come last, fair between tenants.

Of the samples that are due, the oldest of the tenant who had the fewest tokens goes first. Not
thread-safe: it is the engine's thread's own.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Container
from typing import NamedTuple

from tinkex.engine import jobs


class Due(NamedTuple):
    """Something to do at a time: run a job, or emit an event that a job has already produced."""

    at: float
    order: int  # no two have the same, so nothing behind it is compared
    job: jobs.Job
    emit: jobs.Emit
    event: jobs.Event | None = None


class Agenda:
    def __init__(self) -> None:
        self._later: list[Due] = []  # a heap
        self._samples: dict[str, deque[Due]] = {}  # those whose time has come, by tenant
        self._order = itertools.count()
        self._spent: dict[str, float] = {}  # tokens of each tenant, as a start time (fair queueing)
        self._floor = 0.0

    def add(
        self, at: float, job: jobs.Job, emit: jobs.Emit, event: jobs.Event | None = None
    ) -> None:
        heapq.heappush(self._later, Due(at, next(self._order), job, emit, event))

    def forget(self, job_ids: Container[str]) -> None:
        self._later = [due for due in self._later if due.job.job_id not in job_ids]
        heapq.heapify(self._later)
        samples = {
            tenant: deque(due for due in line if due.job.job_id not in job_ids)
            for tenant, line in self._samples.items()
        }
        self._samples = {tenant: line for tenant, line in samples.items() if line}

    def take(self) -> Due | None:
        """The next thing that is due; None when there is nothing yet."""
        now = time.monotonic()
        while self._later and self._later[0].at <= now:
            due = heapq.heappop(self._later)
            if due.event is not None or not isinstance(due.job, jobs.SampleJob):
                return due
            self._samples.setdefault(due.job.tenant, deque()).append(due)
        return self._take_sample() if self._samples else None

    def _take_sample(self) -> Due:
        tenant = min(self._samples, key=lambda name: (self._had(name), self._samples[name][0]))
        due = self._samples[tenant].popleft()
        if not self._samples[tenant]:
            del self._samples[tenant]
        assert isinstance(due.job, jobs.SampleJob)
        self._floor = self._had(tenant)
        cost = len(due.job.prompt) + due.job.num_samples * (due.job.max_tokens or 256)
        self._spent[tenant] = self._floor + cost
        return due

    def _had(self, tenant: str) -> float:
        return max(self._spent.get(tenant, 0.0), self._floor)

    @property
    def is_due(self) -> bool:
        """Whether `take` would give something now."""
        return bool(self._samples or (self._later and self._later[0].at <= time.monotonic()))

    def idle_s(self) -> float | None:
        """How long nothing is due; None when nothing is planned at all."""
        return max(0.0, self._later[0].at - time.monotonic()) if self._later else None
