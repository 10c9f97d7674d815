"""Simulated time: an engine whose jobs and tokens take as long as on a device.

A job is handed to the engine inside when it is due, and each of its events to the receiver when
that is due. Jobs of one adapter wait for each other, training passes of all adapters too; other
jobs take their time side by side. One thread hands on and tells, so the events of a job keep their
order and a job that was cancelled says nothing more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tinkex.engine import jobs
from tinkex.engine.reports import cancelled, tell
from tinkex.engine.toy.config import ToyConfig


class _Due(NamedTuple):
    at: float
    order: int  # no two have the same, so nothing behind it is compared
    job_id: str
    action: Callable[[], None]


class SlowEngine:
    """See `jobs.Engine`."""

    def __init__(self, engine: jobs.Engine, config: ToyConfig) -> None:
        self.heartbeat = engine.heartbeat
        self._engine, self._config = engine, config
        self._later: list[_Due] = []  # a heap
        self._order = itertools.count()
        self._live: dict[str, jobs.Emit] = {}
        """Receivers of the jobs that have no end yet."""
        self._lane_free_at: dict[str, float] = {}
        self._device_free_at = 0.0
        self._slots: list[float] = [0.0] * config.max_running  # a heap: when each is free
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="toy-latency", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------- jobs.Engine

    def submit(self, job: jobs.Job, emit: jobs.Emit) -> None:
        with self._wake:
            if not self._closed:
                at = self._starts_at(job)
                receive = partial(self._receive, job, at, [])
                self._put(at, job.job_id, partial(self._engine.submit, job, receive))
                self._live[job.job_id] = emit
                return
        tell(emit, cancelled(job.job_id))

    def cancel(self, job_id: str) -> None:
        with self._wake:
            self._later = [due for due in self._later if due.job_id != job_id]
            heapq.heapify(self._later)
            self._put(0.0, job_id, partial(self._cancel_now, job_id))

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._engine.close()

    # ------------------------------------------------------------------------------------ times

    def _starts_at(self, job: jobs.Job) -> float:
        """When a job that comes now is due: after those before it, which it waits for."""
        lane = job.adapter_id if isinstance(job, jobs.AdapterJob) else ""
        at = max(time.monotonic(), self._lane_free_at.get(lane, 0.0)) + self._config.latency_s
        if isinstance(job, jobs.TrainJob) and self._config.train_token_latency_s:
            num_tokens = sum(len(datum.tokens) for datum in job.data)
            at = max(at, self._device_free_at) + self._config.train_token_latency_s * num_tokens
            self._device_free_at = at
        if lane:
            self._lane_free_at[lane] = at
        return at

    def _sample_starts_at(self, at: float, num_tokens: int) -> float:
        """When a sample of that length gets a slot, which it keeps until it ends."""
        if not self._slots:
            return at
        at = max(at, heapq.heappop(self._slots))
        heapq.heappush(self._slots, at + self._config.token_latency_s * num_tokens)
        return at

    def _receive(
        self, job: jobs.Job, at: float, tokens: list[jobs.Tokens], event: jobs.Event
    ) -> None:
        """Take an event of a job that began `at`; keep the tokens until their times are known."""
        if isinstance(event, jobs.Tokens):
            tokens.append(event)
            return
        with self._wake:
            if isinstance(event, jobs.Done) and isinstance(event.result, jobs.SampleResult):
                self._put_sample(at, tokens, event, event.result)
            else:
                self._put(at, job.job_id, partial(self._tell, event))

    def _put_sample(
        self, at: float, tokens: list[jobs.Tokens], done: jobs.Done, result: jobs.SampleResult
    ) -> None:
        """Tell each token at its time, and the end with the last one."""
        token_s, job_id = self._config.token_latency_s, done.job_id
        lengths = [len(sequence.tokens) for sequence in result.sequences]
        starts = [self._sample_starts_at(at, length) for length in lengths]
        num_told: Counter[int] = Counter()
        for event in tokens:
            num_told[event.sample_index] += 1
            token_at = starts[event.sample_index] + token_s * num_told[event.sample_index]
            self._put(token_at, job_id, partial(self._tell, event))
        ends = [start + token_s * num for start, num in zip(starts, lengths, strict=True)]
        self._put(max([at, *ends]), job_id, partial(self._tell, done))

    # ----------------------------------------------------------------------------------- thread

    def _put(self, at: float, job_id: str, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, _Due(at, next(self._order), job_id, action))
        self._wake.notify()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()
        for job_id in list(self._live):
            self._tell(cancelled(job_id))

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next thing that is due; None when the engine is closed."""
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                if self._later and self._later[0].at <= now:
                    self._lane_free_at = {k: at for k, at in self._lane_free_at.items() if at > now}
                    return heapq.heappop(self._later).action
                self._wake.wait(self._later[0].at - now if self._later else None)
        return None

    def _cancel_now(self, job_id: str) -> None:
        """End a job. On this thread, so the engine has heard of it when it hears of its end."""
        self._engine.cancel(job_id)
        self._tell(cancelled(job_id))

    def _tell(self, event: jobs.Event) -> None:
        """Hand an event to its receiver, unless the job has ended."""
        is_end = isinstance(event, jobs.Done | jobs.Failed)
        emit = self._live.pop(event.job_id, None) if is_end else self._live.get(event.job_id)
        if emit is not None:
            tell(emit, event)
