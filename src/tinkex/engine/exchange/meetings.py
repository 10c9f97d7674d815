"""The meetings that an engine takes part in, each in a thread of its own.

The engine's thread never waits for another engine: it trains and samples on while gradients that
were put aside are added up here. Jobs of a meeting come straight from whoever submits them, so that
no pass of another tenant makes the others wait; they run in the order in which they came. Whoever
posts them (`server/workers/gradient_exchange.py`) sees to it that all members have the same order.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tinkex.engine import jobs
from tinkex.engine.collectives.process_group import ProcessGroup, join, open_store
from tinkex.engine.exchange.reduction import reduce
from tinkex.engine.optim.resident import ResidentAdapter
from tinkex.errors import EngineError, NotSupportedError

log = logging.getLogger(__name__)
Attempt = Callable[[jobs.Job, jobs.Emit, Callable[[], jobs.Result | None]], None]


class Meetings:
    def __init__(
        self,
        device: torch.device,
        find: Callable[[str], ResidentAdapter],
        attempt: Attempt,
        *,
        refusal: str = "",
    ) -> None:
        """`attempt` runs something for a job and tells how it ended.

        Args:
            refusal: Why this engine can meet nobody; empty when it can.
        """
        self._device, self._find, self._attempt, self._refusal = device, find, attempt, refusal
        self._rooms: dict[str, _Room] = {}
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def submit(self, job: jobs.MeetingJob, emit: jobs.Emit) -> None:
        """From any thread; returns at once."""
        self._attempt(job, emit, partial(self._take, job, emit))

    def _take(self, job: jobs.MeetingJob, emit: jobs.Emit) -> jobs.Result | None:
        if self._refusal:
            raise NotSupportedError(self._refusal)
        match job:
            case jobs.OpenMeetingJob():
                store, place = open_store(job.host)
                with self._lock:
                    self._stores[job.meeting_id] = store
                return jobs.MeetingResult(place=place)
            case jobs.LeaveMeetingJob():
                with self._lock:
                    self._stores.pop(job.meeting_id, None)
                    room = self._rooms.pop(job.meeting_id, None)
                if room is not None:
                    room.close()
                return jobs.AdapterResult()
            case jobs.JoinMeetingJob():
                room = _Room(self._device, job)
                with self._lock:
                    self._rooms[job.meeting_id] = room
                room.put(partial(self._attempt, job, emit, room.join))
            case jobs.ReduceGradientJob():
                with self._lock:
                    found = self._rooms.get(job.meeting_id)
                if found is None:
                    raise EngineError(f"this worker is in no meeting {job.meeting_id}")
                resident = self._find(job.adapter_id)
                found.put(partial(self._attempt, job, emit, partial(found.reduce, resident)))
        return None

    def close(self) -> None:
        with self._lock:
            rooms, self._rooms, self._stores = self._rooms, {}, {}
        for room in rooms.values():
            room.close()


class _Room:
    """One meeting and its thread, which ends with the process wherever it waits."""

    def __init__(self, device: torch.device, job: jobs.JoinMeetingJob) -> None:
        self._device, self._job = device, job
        self._meeting: ProcessGroup | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        name = f"meeting-{job.meeting_id[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)

    def close(self) -> None:
        """Leave when what waits here has ended."""
        self._inbox.put(None)

    def _run(self) -> None:
        """On CUDA with a stream of its own, so that nothing the engine computes waits for it."""
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream()) if is_cuda else contextlib.nullcontext():
            while (work := self._inbox.get()) is not None:
                work()
        if self._meeting is not None:
            self._meeting.close()

    def join(self) -> jobs.AdapterResult:
        job = self._job
        self._meeting = join(
            job.rank,
            job.size,
            self._device,
            job.place,
            timeout_s=job.timeout_s,
            host=job.host,
        )
        return jobs.AdapterResult()

    def reduce(self, resident: ResidentAdapter) -> jobs.GradientResult:
        if self._meeting is None:
            raise EngineError("this worker could not join the meeting")
        began, shared = time.perf_counter(), resident.shared
        if self._device.type == "cuda":  # what was gathered was computed on the engine's stream
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(self._device))
        total = reduce(self._meeting, shared.shards, resident.adapter.flat)
        if total is not None and self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            total.record_stream(torch.cuda.default_stream(self._device))  # where it is used
        shared.total = total
        size_bytes = sum(grad.nbytes for grad in shared.shards.values())
        return jobs.GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)
