"""The requests of one lane that were sent to the worker, or are about to be, in their order.

A request waits for a slot, which is fair between users; jobs of one lane are posted in the order
in which they were sent here. What is sent, published or taken back, and when, the lane decides.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkex.engine.jobs import Job, Result
from tinkex.errors import WorkerLostError
from tinkex.server.work.futures import Outcome
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.server.workers.placement import Placement


@dataclass(slots=True)
class Flight:
    request: QueuedRequest
    task: asyncio.Task[Result | Outcome]
    posted: asyncio.Future[None]
    """Done when the worker has the job, or never will have it."""

    @property
    def loss(self) -> WorkerLostError | None:
        """How it was lost with its worker, if it was."""
        if not self.task.done() or self.task.cancelled():
            return None
        error = self.task.exception()
        return error if isinstance(error, WorkerLostError) else None

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ended the worker: it was there, and had not ended well."""
        task = self.task
        if not self.request.started_at:
            return False
        if not task.done() or task.cancelled():
            return True
        # The worker held it when it was lost; the watchdog may know that it only waited there.
        error = task.exception()
        return error is not None and not getattr(error, "is_blameless", False)


class Flights:
    def __init__(
        self,
        user_id: str,
        workers: GatedPool,
        open_work: OpenWork,
        *,
        placement: Callable[[], Placement | None],
        on_ended: Callable[[], None],
    ) -> None:
        """`placement` tells where the lane's state is in memory when a job is posted."""
        self._user_id, self._workers, self._open_work = user_id, workers, open_work
        self._placement, self._on_ended = placement, on_ended
        self._all: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def head(self) -> Flight | None:
        """The oldest one."""
        return self._all[0] if self._all else None

    @property
    def newest(self) -> QueuedRequest | None:
        return self._all[-1].request if self._all else None

    @property
    def num_running(self) -> int:
        """How many requests the worker holds."""
        return sum(bool(flight.request.started_at) for flight in self._all)

    def holds(self, request: QueuedRequest) -> bool:
        return any(flight.request is request for flight in self._all)

    def send(
        self,
        request: QueuedRequest,
        job: Job | Outcome,
        complete: Callable[[Job], Awaitable[Job]],
    ) -> None:
        """Run a job in its turn; an outcome, where there is none to run, waits for its turn too.

        `complete` computes what a job needs before it is posted, while those before it run.
        """
        after = self._all[-1].posted if self._all else None
        posted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(request, job, complete, after, posted))
        task.add_done_callback(lambda _: self._on_ended())
        self._all.append(Flight(request, task, posted))

    async def _run(
        self,
        request: QueuedRequest,
        job: Job | Outcome,
        complete: Callable[[Job], Awaitable[Job]],
        after: asyncio.Future[None] | None,
        posted: asyncio.Future[None],
    ) -> Result | Outcome:
        try:
            if after is not None:  # gates are fair between users, but never within one lane
                await asyncio.shield(after)  # it is the other's, and outlives this one
            # Only now: the one behind waits for this one alone, and would overtake those before.
            if isinstance(job, Outcome):
                return job
            await self._open_work.budgets.wait(request.reservation)
            job = await complete(job)
            cost = max(1, request.size_bytes)
            is_suspect = request.suspicion.on_trial
            line = self._workers.trials if is_suspect else self._workers.training
            async with self._open_work.slot(self._user_id), line.slot(self._user_id, cost):
                # Asked for now: a state that was lost while the job waited may be elsewhere.
                if (placement := self._placement()) is None:
                    raise WorkerLostError("the state is not in memory")
                answer = placement.post(job, request.note)
                posted.set_result(None)
                request.started_at = time.time()
                return await answer
        finally:
            # It has no job, or was taken back before it had a slot: the next one goes on.
            if not posted.done():
                posted.set_result(None)

    def drop_head(self) -> None:
        self._all.popleft()

    async def land(self) -> list[Flight]:
        """Give up all of them, and wait until none runs any more here; gives what they were."""
        flights, self._all = list(self._all), deque()
        for flight in flights:
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)
        return flights
