"""One lane per model: requests run in seq_id order, each exactly once, whatever dies meanwhile.

Requests stand in a queue by number (`request_queue`), and a single task drives the lane while it
has something to do. A few jobs are sent ahead, so that the engine never idles between two of them,
but results are published strictly in order. When the worker dies, or a job fails in a way that may
have left the state half changed, everything not yet published is taken back, the state is restored
(`model_state`) and the lane goes on from there.

Who waits for whom: a client waits for a `Promise`; the promise is settled by the lane; the lane
waits for a slot at the worker (`FairGate`) and then for the worker. A request is judged, numbered
and journaled before it comes here (`inbox`); what it means is its operation's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from tinkex.engine.jobs import Result
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.fairness.pauses import Pauses
from tinkex.server.guard.budgets import Reservation
from tinkex.server.process import disk
from tinkex.server.work import replay
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.flights import Flight, Flights
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.gap_timer import GapTimer
from tinkex.server.work.job_builder import JobBuilder
from tinkex.server.work.metering import count_request
from tinkex.server.work.model_state import ModelState
from tinkex.server.work.operation import Conclusion, Operation
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.server.work.request_queue import RequestQueue
from tinkex.store import JournalRow, Model, NewRow, UsageCount

logger = logging.getLogger(__name__)

MAX_AHEAD = 8
"""Compute jobs of one lane that the worker may hold together: enough that it never waits for the
next, few enough that little is computed twice when it dies."""


class Lane:
    def __init__(
        self,
        model: Model,
        project_id: str | None,
        state: ModelState,
        operations: Mapping[str, Operation[Any]],
        deps: Dependencies,
    ) -> None:
        self.model = model
        self._deps = deps
        self._operations = operations
        self.queue = RequestQueue()
        self._jobs = JobBuilder(deps.store, project_id)
        self._state = state
        self._broken: Outcome | None = None  # what every request is answered: the state is lost
        self._snapshot_due = False  # nothing more is sent until the snapshot is begun
        self._stopped: Outcome | None = None  # what everything accepted is answered: it was ended
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._flights = Flights(
            model.user_id,
            deps.workers,
            deps.open_work,
            placement=lambda: state.placement,
            on_ended=self._wake.set,
        )
        self.gap_timer = GapTimer(
            self.queue, model.model_id, deps.config.gap_limit_s, self._fail_all
        )
        self._lost_replays = replay.LostReplays()
        self._exclusive = asyncio.Lock()

    # ------------------------------------------------------------------------ for the outside

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._exclusive.locked()

    @property
    def doing(self) -> str:
        """Why the oldest request is not done, in words; empty when there is none."""
        oldest = self.queue.oldest
        return "" if oldest is None else self._reason(oldest)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_running(self) -> int:
        """Requests that the worker holds."""
        return self._flights.num_running

    async def open(self) -> None:
        """Queue what the journal holds for a lane that was just made; runs nothing by itself.

        A lane whose requests all ended needs no worker yet: it restores when the next one comes.
        """
        snapshot_seq, rows = await self._state.journaled()
        requests = []
        for row in rows:
            if row.seq_id == 0 and row.state == "failed":
                self._broken = self._never_created(row.error or "")
            if row.state == "accepted":
                requests.append(await self._revived(row))
            elif row.state == "refused":
                requests.append(QueuedRequest(row.seq_id, mode="skip"))
        ended = [row.seq_id for row in rows if row.state in ("done", "failed")]
        self.queue.load(snapshot_seq, ended, requests)

    def push(
        self, row: NewRow, operation: Operation[Any], checked: Any, reservation: Reservation
    ) -> Promise:
        """Queue a request at its number. The inbox has made sure that the number is free.

        It counts as open work already, until it is told how it ended.
        """
        request = QueuedRequest(
            row.seq_id,
            operation,
            row.request_id,
            row.body,
            checked=checked,
            key_id=row.key_id,
            reservation=reservation,
        )
        promise = self._promise(request, self.model.user_id)
        self.queue.put(request)
        self.kick()
        return promise

    def skip(self, seq_id: int) -> None:
        """Count the number of a request that was refused."""
        self.queue.skip(seq_id)
        self.kick()

    def kick(self) -> None:
        """Go on, if there is something to do."""
        self._wake.set()
        # Nothing waits between the look and the task, so there is one driver at a time.
        if self._task is None and self.queue.head is not None:
            self._task = asyncio.create_task(self._drive(), name=f"lane-{self.model.model_id}")
        self.gap_timer.watch(is_idle=self._task is None)

    async def park(self, *, save: bool = True) -> bool:
        """Save the state and free its memory. False when the lane is busy, before or after."""
        if self.queue:
            return False
        seq_id = self.queue.numbers.next - 1
        keep = save and self._broken is None
        if not await self._run_alone(lambda: self._state.park(seq_id, keep=keep)):
            return False
        # A request that came while the state was saved has set the lane going again: it must stay.
        return self.is_idle and not self.queue

    def stop(self, outcome: Outcome) -> int:
        """End everything accepted and not done with `outcome`; gives how many requests that is.

        What they had changed already is undone. The lane goes on with what comes after.
        """
        count = self.queue.num_unfinished
        if self._task is None:
            self._fail_all(outcome)
        else:
            self._stopped = outcome
            self._wake.set()
        return count

    async def discard(self) -> bool:
        """Forget the state for good, snapshot included. False when the lane is busy."""
        return await self._run_alone(self._state.discard)

    async def _run_alone(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Run something while no request is under way. False, and nothing done, when one is."""
        if not self.is_idle:
            return False
        async with self._exclusive:
            await action()
        self.kick()
        return True

    async def close(self) -> None:
        self.gap_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._flights.land()
        await self._state.give_up_snapshot()

    # ------------------------------------------------------------------------ why it waits

    def _promise(self, request: QueuedRequest, user_id: str) -> Promise:
        assert request.operation is not None
        promise = self._deps.results.promise(request.request_id, user_id, request.operation.name)
        promise.reason = lambda: self._reason(request)
        request.promise = promise
        return promise

    def _reason(self, request: QueuedRequest) -> str:
        """Why `request` is not done, for a person."""
        if not self._deps.workers.pool.is_ready:
            return "the worker is starting"
        if self._state.obstacle:
            return self._state.obstacle
        if self._state.is_restoring:
            return f"restoring the model's state; {self.queue.num_ahead(request)} requests ahead"
        if not request.started_at:
            pause = self._pauses.reason(self.model.user_id) or request.reservation.reason
            if pause:
                return pause
        if request.mode == "run" and self._flights.holds(request):
            if not request.started_at:
                waiting = self._deps.workers.training.ahead_of(self.model.user_id)
                return f"waiting for a free worker; about {waiting} requests ahead"
            return request.progress or "running"
        if self.queue.head is None and not self._flights:
            return self.gap_timer.reason
        head = self._flights.head
        progress = head.request.progress if head is not None else ""
        ahead = f"{self.queue.num_ahead(request)} requests ahead"
        return f"{ahead}; {progress}" if progress else ahead

    @property
    def _pauses(self) -> Pauses:
        return self._deps.open_work.pauses

    # ------------------------------------------------------------------------ the driver

    async def _drive(self) -> None:
        """Make sure the state is there, send what may go, publish the head when it is done."""
        try:
            async with self._exclusive:
                while self._has_work:
                    if self._stopped is not None:
                        await self._stop_all(self._stopped)
                        continue
                    try:
                        await self._prepare()
                        await self._fill()
                        if (head := self._flights.head) is not None:
                            await self._publish(head)
                    except WorkerLostError:
                        await self._take_back(blame=True)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            logger.exception("lane %s failed", self.model.model_id)
            await self._flights.land()
            self._state.distrust()  # what was under way may have changed it
            self._fail_all(Outcome(error=disk.describe(exc), category="server"))
        finally:
            self._task = None
        # What came while this task ended found a task there, and started none.
        self.kick()

    @property
    def _has_work(self) -> bool:
        is_waiting = self.queue.head is not None
        return is_waiting or self._snapshot_due or self._stopped is not None

    async def _prepare(self) -> None:
        """Have the state in the worker, and begin a snapshot of it when one is due."""
        if not self._state.is_here:
            await self._restore()
        # A snapshot is the state between two requests: what was sent has ended, and nothing is
        # posted before it. Jobs of one model run in the order in which they are posted.
        if self._snapshot_due and not self._flights:
            self._snapshot_due = False
            # Not the last applied number: in the middle of a replay the state is an older one.
            await self._state.begin_snapshot(self.queue.numbers.next - 1)

    async def _restore(self) -> None:
        await self._take_back(blame=True)
        self._snapshot_due = False  # of a state that is gone; the replay counts anew
        snapshot_seq, rows = await self._state.restore()
        if self._state.loss:
            self._lose_state(self._state.loss)
        # Every number up to `applied` was published: those requests run again for their effect on
        # the state only, and nobody is told of them a second time.
        applied = self.queue.numbers.applied
        replays = replay.replays_of(rows, self._operations, through=applied)
        self.queue.go_back(snapshot_seq, replays)
        if replays:
            run_id, num = self.model.model_id, len(replays)
            logger.info("%s: replaying %d requests after %d", run_id, num, snapshot_seq)

    async def _revived(self, row: JournalRow) -> QueuedRequest:
        """An accepted request from the journal, with a promise that can be polled again."""
        operation = self._operations[row.kind]
        request = QueuedRequest(
            row.seq_id, operation, row.request_id, row.body or b"", key_id=row.key_id
        )
        self._promise(request, row.user_id)
        self._deps.open_work.begin(self.model.user_id)
        budgets, whose = self._deps.open_work.budgets, (row.user_id, row.key_id, row.model_id)
        if budgets.hold_for(*whose):
            spends = await self._jobs.spends(request, self.model)
            request.reservation = budgets.reserve(*whose, spends, is_admitted=True)
        return request

    async def _fill(self) -> None:
        """Send requests in order, up to `MAX_AHEAD`; a barrier goes alone."""
        while len(self._flights) < MAX_AHEAD and not (self._snapshot_due and self._flights):
            last = self._flights.newest
            request = self.queue.find(last.through_seq + 1) if last else self.queue.head
            if request is None:
                return
            # What runs alone, or is answered without running, waits for the end of all before it.
            alone = request.mode == "skip" or self._broken is not None or request.is_barrier
            if last is not None and (alone or last.is_barrier):
                return
            if request.mode == "skip":
                self.queue.retire(request)
            elif self._broken is not None:
                self._settle(request, self._broken)
            else:
                job = await self._jobs.build(request, self.model)
                self._flights.send(request, job, partial(self._jobs.complete, request, self.model))

    # ------------------------------------------------------------------------ ends

    async def _publish(self, flight: Flight) -> None:
        """Wait for the oldest of what was sent, and tell how it ended."""
        while not flight.task.done():
            if self._stopped is not None:
                return
            # Cleared before `_fill`, which may wait: an end in the meantime sets it again.
            self._wake.clear()
            await self._fill()
            if not flight.task.done():
                await self._wake.wait()
        request = flight.request
        try:
            result = flight.task.result()
        except WorkerLostError:
            raise
        except InvalidInputError as exc:
            result = Outcome(error=str(exc), category="user")
        except EngineError as exc:
            await self._distrust(request, exc)
            return
        if not isinstance(result, Outcome):
            await self._conclude(request, result)
        elif result.category == "server":
            await self._distrust(request, EngineError(result.error))
        else:
            if request.mode == "replay":
                reason = f"{request.request_id} ran before and is refused now: {result.error}"
                self._lose_state(reason)
            self._flights.drop_head()
            self._settle(request, result)

    async def _conclude(self, request: QueuedRequest, result: Result) -> None:
        operation, job = request.operation, request.job
        assert operation is not None
        assert job is not None
        ended_at = time.time()
        compute_s = ended_at - request.started_at
        if request.mode == "replay":
            self._flights.drop_head()
            self.queue.retire(request)
            self._snapshot_due |= self._state.note(operation, compute_s, request.size_bytes)
            return
        count_request(self._deps, self.model, request, ended_at)
        try:
            run = self._jobs.run_of(request, self.model)
            concluded = await operation.conclude(request.checked, run, job, result)
        except InvalidInputError as exc:
            concluded = Conclusion(outcome=Outcome(error=str(exc), category="user"))
        except Exception as exc:  # the job ran, but what it made cannot be kept
            logger.exception("%s cannot be ended", request.request_id)
            await self._distrust(request, EngineError(disk.describe(exc)))
            return
        self._flights.drop_head()
        self.model = concluded.model or self.model
        # Only what ended well is counted: a replay runs nothing else.
        if concluded.outcome.ok:
            self._snapshot_due |= self._state.note(operation, compute_s, request.size_bytes)
            self._snapshot_due |= operation.is_snapshot_forced
        if self._snapshot_due and request.is_barrier:
            # Before anybody knows of it: what the request depended on may go as soon as they do.
            # Its end goes to the journal first, without what it used: a snapshot that covers a
            # request takes the request's body, and one without an end would be run again.
            results = self._deps.results
            results.record(request.request_id, concluded.outcome, request.started_at)
            self.queue.numbers.apply(request.seq_id)
            self._snapshot_due = False
            unsaved = await self._state.snapshot(request.seq_id)
            if unsaved and operation.is_snapshot_forced:
                # Without it a crash would need what the request depended on, which may be gone.
                self._state.distrust()
                error = f"The state that it makes cannot be kept: {unsaved} Nothing was changed."
                concluded = Conclusion(outcome=Outcome(error=error, category="user"))
        self._settle(request, concluded.outcome, concluded.usage)

    def _settle(
        self, request: QueuedRequest, outcome: Outcome, usage: tuple[UsageCount, ...] = ()
    ) -> None:
        """Publish an outcome and move on to the next number."""
        self.queue.retire(request)
        if request.mode != "run":
            return
        self._lost_replays.forget()
        if request.seq_id == 0 and not outcome.ok:
            self._broken = self._never_created(outcome.error)
        promise = self._let_go(request, ok=outcome.ok)
        self._deps.results.settle(promise, outcome, request.started_at, usage)

    def _let_go(self, request: QueuedRequest, *, ok: bool) -> Promise:
        """Free what a request that has ended holds; gives the promise to be settled."""
        self._clean_up(request, ok=ok)
        self.queue.release(request)
        self._deps.open_work.end(self.model.user_id)
        self._deps.open_work.budgets.release(request.reservation)
        assert request.promise is not None
        return request.promise

    def _clean_up(self, request: QueuedRequest, *, ok: bool) -> None:
        if request.operation is not None and request.job is not None:
            request.operation.cleanup(request.job, ok=ok)
            request.job = None

    # ------------------------------------------------------------------------ what goes wrong

    async def _distrust(self, request: QueuedRequest, exc: EngineError) -> None:
        """The engine failed in the middle: the request failed, and state it changed is restored."""
        if exc.is_to_blame:
            self._blame(request, "stuck")
        self._flights.drop_head()
        error = disk.trouble(exc) or str(exc)
        self._settle(request, Outcome(error=error, category="server"))
        if self._lost_replays.is_hopeless(request):
            self._lose_state(error)
        if request.operation is not None and request.operation.changes_state:
            # What was sent after it ran, or will run, on a state that it may have half changed.
            self._state.distrust()
            await self._take_back(blame=False)

    def _blame(self, request: QueuedRequest, cause: str) -> None:
        self._pauses.blame(self.model.user_id, cause=cause, request_id=request.request_id)

    async def _take_back(self, *, blame: bool) -> None:
        """Give up everything sent and not published; it will be sent again."""
        flights = await self._flights.land()
        suspects = [flight.request for flight in flights if blame and flight.is_suspect]
        if suspects and self._lost_replays.is_hopeless(suspects[0]):  # the others hardly began
            self._lose_state("the worker died")
        for request in suspects:
            request.suspicion.attempts += 1
        for flight in flights:
            request = flight.request
            self._clean_up(request, ok=False)
            request.started_at, request.progress = 0.0, ""
            loss = flight.loss if blame else None
            if loss is not None and loss.is_to_blame:
                self._blame(request, loss.cause)
            is_last = loss is not None and request.suspicion.note(loss)
            # A replay is not given up for that: without it the state would be another one.
            if (is_last and request.mode == "run") or request.suspicion.is_hopeless:
                self._give_up_on(request)

    def _lose_state(self, reason: str) -> None:
        logger.error("the state of %s is lost: %s", self.model.model_id, reason)
        error = f"The state of {self.model.model_id} could not be restored: {reason}"
        self._broken = Outcome(error=error, category="server")

    def _never_created(self, reason: str) -> Outcome:
        error = f"{self.model.model_id} was never created: {reason}"
        return Outcome(error=error, category="user")

    def _give_up_on(self, request: QueuedRequest) -> None:
        logger.error("%s: %s", request.request_id, request.why_given_up)
        if request.mode == "run":
            promise = self._let_go(request, ok=False)
            outcome = Outcome(error=request.why_given_up, category="server")
            self._deps.results.settle(promise, outcome, request.started_at)
        request.mode = "skip"

    async def _stop_all(self, outcome: Outcome) -> None:
        """End what waits and what runs; state that the latter may have changed is restored."""
        self._stopped = None
        if self._flights.num_running:  # what waits for a slot has changed nothing
            self._state.distrust()
        await self._flights.land()
        self._fail_all(outcome)

    def _fail_all(self, outcome: Outcome) -> None:
        for request in self.queue.in_order():
            self._settle(request, outcome)
