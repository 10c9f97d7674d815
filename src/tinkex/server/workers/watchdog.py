"""Tell an engine that hangs from one that works.

Every job gets a budget by its size, counted anew whenever the engine gets on: a turn of its thread
(a training pass, a decode step), an answer, a word about its progress. The watchdog looks once a
second at the engine's activity (`engine/heartbeat.py`). Loading a base model has a budget of its
own. A process that does not run at all, not even its thread that only counts, was stopped from
outside or is starved; that is noticed sooner, and no job is failed for it at the first time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkex.engine.heartbeat import Activity
from tinkex.engine.jobs import Job, SampleJob, TrainJob

LATELY_S = 120.0
"""An engine with work that made no turn for this long is not called moving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    turn_s: float = 300.0
    """For one turn of the engine, whatever it does."""
    token_s: float = 0.02
    """More for each token of the job it works on."""
    load_s: float = 3600.0
    """For loading a base model."""
    heartbeat_s: float = 30.0
    """For a process that has work and does not run at all."""


class Watchdog:
    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._activity = Activity()
        self._moved_at = self._heartbeat_at = clock()
        self._num_tokens: dict[str, int] = {}
        self._samples: set[str] = set()

    # ------------------------------------------------------------------------ what it is told

    def posted(self, job: Job) -> None:
        if not self._num_tokens:  # until now there was nothing to get on with
            self.heard()
        self._num_tokens[job.job_id] = _num_tokens(job)
        if isinstance(job, SampleJob):
            self._samples.add(job.job_id)

    def ended(self, job_id: str) -> None:
        self._num_tokens.pop(job_id, None)
        self._samples.discard(job_id)

    def heard(self) -> None:
        self._moved_at = self._clock()

    def note(self, activity: Activity) -> None:
        before = self._activity
        idles = not activity.is_busy and activity.num_heartbeats != before.num_heartbeats
        if activity.num_turns != before.num_turns or idles:
            self.heard()
        # An engine whose counter has not begun has missed no heartbeat.
        counts = activity.num_heartbeats > 0
        if activity.num_heartbeats != before.num_heartbeats or not counts:
            self._heartbeat_at = self._clock()
        self._activity = activity

    # ------------------------------------------------------------------------ what it says

    @property
    def is_moving(self) -> bool:
        quiet_s = self._clock() - self._moved_at
        return not self._num_tokens or self._activity.is_loading or quiet_s < LATELY_S

    @property
    def suspects(self) -> list[str]:
        """The jobs that the engine works on. None when it samples: many share a step there."""
        if self._is_frozen:
            return []
        return [job_id for job_id in self._activity.job_ids if job_id in self._num_tokens]

    @property
    def samples(self) -> list[str]:
        """The samples that the engine has, running or not."""
        return [job_id for job_id in self._num_tokens if job_id in self._samples]

    @property
    def sampling(self) -> list[str]:
        """The samples that may share the step in which the engine hangs; none when it trains."""
        is_shared = self._activity.is_busy and not self._activity.job_ids
        return self.samples if is_shared and not self._is_frozen else []

    @property
    def _is_frozen(self) -> bool:
        """Whether the process has not run for the better part of the time without progress."""
        now = self._clock()
        return now - self._heartbeat_at > max(1.0, (now - self._moved_at) / 2)

    def is_blameless(self, job_id: str) -> bool:
        """A sample may be the reason when nothing better is known; what only waits is not."""
        if self._is_frozen:
            return job_id not in self._activity.job_ids
        return bool(self.suspects) or job_id not in self._samples

    def limit_s(self) -> float:
        if self._activity.is_loading:
            return self._budget.load_s
        working_on = [self._num_tokens.get(job_id, 0) for job_id in self._activity.job_ids]
        return self._budget.turn_s + self._budget.token_s * sum(working_on)

    async def bark(self, look: Callable[[], Activity]) -> str:
        """Look once a second until the engine hangs; says how it shows."""
        self._activity = Activity()
        self.heard()
        self._heartbeat_at = self._clock()
        tick_s = min(1.0, self._budget.turn_s / 4)
        while True:
            slept_at = self._clock()
            await asyncio.sleep(tick_s)
            late_s = self._clock() - slept_at - tick_s
            if late_s > tick_s:  # it is this process that hung: events wait unread
                self._moved_at += late_s
                self._heartbeat_at += late_s
            self.note(look())
            quiet_s = self._clock() - self._moved_at
            if self._num_tokens and quiet_s > self.limit_s():
                return f"no progress in {quiet_s:.0f} s"
            silent_s = min(quiet_s, self._clock() - self._heartbeat_at)
            if self._num_tokens and not self._activity.is_loading:
                if silent_s > self._budget.heartbeat_s:
                    return f"its process has not run for {silent_s:.0f} s"


def _num_tokens(job: Job) -> int:
    if isinstance(job, TrainJob):
        return sum(len(datum.tokens) for datum in job.data)
    return len(job.prompt) if isinstance(job, SampleJob) else 0
