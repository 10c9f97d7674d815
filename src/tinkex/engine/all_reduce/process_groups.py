"""The process groups that an engine is in, each with a thread of its own.

The engine's thread never waits for another engine: it trains and samples on while gradients that
were put aside are added up here. Jobs of a group come straight from whoever submits them, so that
no pass of another tenant makes the others wait; they run in the order in which they came. Whoever
posts them (`server/workers/gradient_groups.py`) sees to it that all ranks have the same order.
Knows jobs and threads; how ranks reach each other, torch or toy, it is given.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tinkex.engine import jobs
from tinkex.engine.reports import attempt
from tinkex.errors import EngineError


class Reducer(Protocol):
    """A rank of a process group that has formed. Called by one thread."""

    def reduce(self, adapter_id: str, root: int | None) -> int:
        """See `jobs.ReduceGradientJob`; gives the bytes that were put aside here."""
        ...

    def close(self) -> None: ...


Join = Callable[[jobs.JoinGroupJob, Any], Reducer]
"""Joins a group; is given the store, if it was opened here."""


class ProcessGroups:
    def __init__(self, join: Join, open_store: Callable[[str], tuple[Any, str]]) -> None:
        """`open_store` makes a store on a host of this machine, and gives it with its address."""
        self._join, self._open_store = join, open_store
        self._groups: dict[str, _Membership] = {}
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def submit(self, job: jobs.GroupJob, emit: jobs.Emit) -> None:
        """From any thread; returns at once."""
        attempt(job, emit, partial(self._take, job, emit))

    def _take(self, job: jobs.GroupJob, emit: jobs.Emit) -> jobs.Result | None:
        match job:
            case jobs.OpenStoreJob():
                store, address = self._open_store(job.host)
                with self._lock:
                    self._stores[job.group_id] = store
                return jobs.StoreResult(address=address)
            case jobs.LeaveGroupJob():
                with self._lock:
                    self._stores.pop(job.group_id, None)
                    left = self._groups.pop(job.group_id, None)
                if left is not None:
                    left.close()
                return jobs.AdapterResult()
            case jobs.JoinGroupJob():
                with self._lock:
                    join = partial(self._join, job, self._stores.get(job.group_id))
                    membership = self._groups[job.group_id] = _Membership(join, job.group_id)
                membership.put(partial(attempt, job, emit, membership.join))
            case jobs.ReduceGradientJob():
                with self._lock:
                    joined = self._groups.get(job.group_id)
                if joined is None:
                    raise EngineError(f"this worker is in no process group {job.group_id}")
                joined.put(partial(attempt, job, emit, partial(joined.reduce, job)))
        return None

    def close(self) -> None:
        with self._lock:
            groups, self._groups, self._stores = self._groups, {}, {}
        for membership in groups.values():
            membership.close()


class _Membership:
    """A process group and its thread, which ends with the process wherever it waits."""

    def __init__(self, join: Callable[[], Reducer], group_id: str) -> None:
        self._join = join
        self._reducer: Reducer | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        name = f"process-group-{group_id[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)

    def close(self) -> None:
        """Leave when what waits here has ended."""
        self._inbox.put(None)

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            work()
        if self._reducer is not None:
            self._reducer.close()

    def join(self) -> jobs.AdapterResult:
        self._reducer = self._join()
        return jobs.AdapterResult()

    def reduce(self, job: jobs.ReduceGradientJob) -> jobs.GradientResult:
        if self._reducer is None:
            raise EngineError("this worker could not join the process group")
        began = time.perf_counter()
        size_bytes = self._reducer.reduce(job.adapter_id, job.root)
        return jobs.GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)
