"""One lane per model: requests run in seq_id order, each exactly once, whatever dies meanwhile.

A lane takes requests in any order and runs them in one: `push` puts a request at its number, and a
single task drives the lane while it has something to do. A few jobs are sent ahead, so that the
engine never idles between two of them, but results are published strictly in order. When the
worker dies, or a job fails in a way that may have left the state half changed, everything not yet
published is taken back, the state is restored (`model_state`) and the lane goes on from there.

Who waits for whom: a client waits for a `Promise`; the promise is settled by the lane; the lane
waits for a place at the worker (`queue.FairGate`) and then for the worker. What a request means is
its operation's business, which numbers are taken the inbox's; nobody else writes these fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tinkex.engine.jobs import Job, Result, TrainJob
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.fairness.pauses import Pauses
from tinkex.server.process import disk
from tinkex.server.process.off_loop import off_loop
from tinkex.server.work import replay
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.flights import Flight, Flights
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.inbox import Inbox
from tinkex.server.work.model_state import ModelState
from tinkex.server.work.operation import Conclusion, Operation, OperationRun
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.store import JournalRow, Model, NewRow, UsageCount

logger = logging.getLogger(__name__)

MAX_AHEAD = 8
"""Compute jobs of one lane that the worker may hold together: enough that it never waits for the
next, few enough that little is computed twice when it dies."""
MAX_HELD_BYTES = 64_000_000
"""Bodies of one lane kept in memory; those beyond wait in the journal."""
MAX_ATTEMPTS = 5
"""A request that was running this many times when its worker died is to blame."""
MAX_MEMORY_DEATHS = 2
"""One whose worker died for lack of memory is run once more, alone: it takes everybody's worker."""


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
        self.deps = deps
        self._operations = operations
        self.inbox = Inbox(self)
        self._project_id = project_id
        self._state = state
        self._requests: dict[int, QueuedRequest] = {}
        # The number whose turn it is. A replay sets it back, so it may be behind `_applied_seq`.
        self._next_seq = 0
        self._applied_seq = -1  # the last number whose effect is in the state and published
        self._last_seq = -1  # the highest number that has arrived
        self._broken: Outcome | None = None  # what every request is answered: the state is lost
        self._snapshot_due = False  # nothing more is sent until the snapshot is begun
        self._stopped: Outcome | None = None  # what everything accepted is answered: it was ended
        self._held_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._flights = Flights(
            model.user_id,
            deps.workers,
            deps.open_work,
            placement=lambda: state.placement,
            on_ended=self._wake.set,
        )
        self._gap_timer: asyncio.TimerHandle | None = None
        self._num_launched = 0
        self._lost_replays = replay.LostReplays()
        self._exclusive = asyncio.Lock()

    # ------------------------------------------------------------------------ for the outside

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._exclusive.locked()

    @property
    def doing(self) -> str:
        """Why the oldest request is not done, in words; empty when there is none."""
        oldest = min(self._requests, default=None)
        return "" if oldest is None else self._reason(self._requests[oldest])

    @property
    def num_waiting(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that the worker holds."""
        return self._flights.num_running

    @property
    def newest_seq(self) -> int:
        """The highest number that is taken."""
        return max(self._last_seq, self._next_seq - 1)

    def has_seen(self, seq_id: int) -> bool:
        """Whether a number waits or has ended, so that the journal knows what became of it."""
        past = seq_id < self._next_seq or seq_id <= self._applied_seq
        return past or seq_id in self._requests

    async def open(self) -> None:
        """Queue what the journal holds for a lane that was just made; runs nothing by itself.

        A lane whose requests all ended needs no worker yet: it restores when the next one comes.
        """
        start, rows = await self._state.journaled()
        ended = [row.seq_id for row in rows if row.state in ("done", "failed")]
        # Ends may reach the journal out of order (a full disk): an accepted request may be behind
        # one that ended. It runs in its place when the state is restored, see `_queue_replay`.
        self._applied_seq = max([start, *ended])
        for row in rows:
            if row.seq_id == 0 and row.state == "failed":
                self._broken = self._never_created(row.error or "")
            if row.state == "accepted":
                self._requests[row.seq_id] = self._revived(row)
            elif row.state == "refused" and row.seq_id > self._applied_seq:
                self._requests[row.seq_id] = QueuedRequest(row.seq_id, mode="skip")
        self._next_seq = min([self._applied_seq + 1, *self._requests])
        self._last_seq = max([self._applied_seq, *self._requests])

    def push(self, row: NewRow, operation: Operation[Any], asked: Any) -> Promise:
        """Queue a request at its number. The inbox has made sure that the number is free.

        It counts as open work already, until it is told how it ended.
        """
        seq_id = row.seq_id
        request = QueuedRequest(
            seq_id, operation, row.request_id, row.body, asked=asked, key_id=row.key_id
        )
        promise = self._promise(request, self.model.user_id)
        self._held_bytes += request.held_bytes
        # Never the one whose turn it is: it would be read back at once.
        if self._held_bytes > MAX_HELD_BYTES and seq_id > self._next_seq:
            self._held_bytes -= request.held_bytes
            request.let_go()
            request.spilled = True
        self._requests[seq_id] = request
        self._last_seq = max(self._last_seq, seq_id)
        self.kick()
        return promise

    def skip(self, seq_id: int) -> None:
        """Count the number of a request that was refused."""
        self._requests[seq_id] = QueuedRequest(seq_id, mode="skip")
        self._last_seq = max(self._last_seq, seq_id)
        self.kick()

    def kick(self) -> None:
        """Go on, if there is something to do."""
        self._wake.set()
        # Nothing waits between the look and the task, so there is one driver at a time.
        if self._task is None and self._next_seq in self._requests:
            self._task = asyncio.create_task(self._drive(), name=f"lane-{self.model.model_id}")
        self._watch_gap()

    async def park(self, *, save: bool = True) -> bool:
        """Save the state and free its memory. False when the lane is busy, before or after."""
        if self._requests:
            return False
        seq_id = self._next_seq - 1
        keep = save and self._broken is None
        if not await self._run_alone(lambda: self._state.park(seq_id, keep=keep)):
            return False
        # A request that came while the state was saved has set the lane going again: it must stay.
        return self.is_idle and not self._requests

    def stop(self, outcome: Outcome) -> int:
        """End everything accepted and not done with `outcome`; gives how many requests that is.

        What they had changed already is undone. The lane goes on with what comes after.
        """
        count = sum(request.mode == "run" for request in self._requests.values())
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
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._flights.land()
        await self._state.give_up_snapshot()

    # ------------------------------------------------------------------------ why it waits

    def _promise(self, request: QueuedRequest, user_id: str) -> Promise:
        assert request.operation is not None
        promise = self.deps.results.promise(request.request_id, user_id, request.operation.name)
        promise.reason = lambda: self._reason(request)
        request.promise = promise
        return promise

    def _reason(self, request: QueuedRequest) -> str:
        """Why `request` is not done, for a person."""
        if not self.deps.workers.pool.is_ready:
            return "the worker is starting"
        if self._state.obstacle:
            return self._state.obstacle
        if self._state.is_restoring:
            return f"restoring the model's state; {self._ahead(request)} requests ahead"
        if not request.started_at and (pause := self._pauses.reason(self.model.user_id)):
            return pause
        if request.mode == "run" and self._flights.holds(request):
            if not request.started_at:
                waiting = self.deps.workers.training.ahead_of(self.model.user_id)
                return f"waiting for a free worker; about {waiting} requests ahead"
            return request.progress or "running"
        if self._next_seq not in self._requests and not self._flights:
            return (
                f"waiting for seq_id {self._next_seq} of {self.model.model_id}, which has not "
                f"arrived; {len(self._requests)} later requests wait for it"
            )
        head = self._flights.head
        progress = head.request.progress if head is not None else ""
        return f"{self._ahead(request)} requests ahead" + (f"; {progress}" if progress else "")

    @property
    def _pauses(self) -> Pauses:
        return self.deps.open_work.pauses

    def _ahead(self, request: QueuedRequest) -> int:
        return sum(1 for seq_id in self._requests if seq_id < request.seq_id)

    # ------------------------------------------------------------------------ the driver

    async def _drive(self) -> None:
        """Make sure the state is there, send what may go, publish the head when it is done."""
        try:
            async with self._exclusive:
                while self._has_work:
                    if self._stopped is not None:
                        await self._give_up(self._stopped)
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
        waits = self._next_seq in self._requests
        return waits or self._snapshot_due or self._stopped is not None

    async def _prepare(self) -> None:
        """Have the state in the worker, and begin a snapshot of it when one is due."""
        if not self._state.is_here:
            await self._restore()
        # A snapshot is the state between two requests: what was sent has ended, and nothing is
        # posted before it. Jobs of one model run in the order in which they are posted.
        if self._snapshot_due and not self._flights:
            self._snapshot_due = False
            # Not the last applied number: in the middle of a replay the state is an older one.
            await self._state.begin_snapshot(self._next_seq - 1)

    async def _restore(self) -> None:
        await self._take_back(blame=True)
        self._snapshot_due = False  # of a state that is gone; the replay counts anew
        start, rows = await self._state.restore()
        if self._state.loss:
            self._lose_state(self._state.loss)
        self._queue_replay(start, rows)

    def _queue_replay(self, start: int, rows: Iterable[JournalRow]) -> None:
        """Put what followed the snapshot back into the lane, up to what was published."""
        applied = self._applied_seq
        waiting = {n: request for n, request in self._requests.items() if request.mode == "run"}
        ahead = {n: request for n, request in self._requests.items() if n > applied}
        replays = replay.replays_of(rows, self._operations, through=applied)
        # What waits goes on top: where the journal lost an end, a request that nobody was told of
        # stands among the replays, and its client is told this time.
        self._requests = ahead | replays | waiting
        self._requests |= replay.skips_between(self._requests, after=start, through=applied)
        self._next_seq = start + 1
        if replays:
            model_id = self.model.model_id
            logger.info("%s: replaying %d requests after %d", model_id, len(replays), start)

    def _revived(self, row: JournalRow) -> QueuedRequest:
        """An accepted request from the journal, with a promise that can be polled again."""
        operation = self._operations[row.kind]
        request = QueuedRequest(
            row.seq_id, operation, row.request_id, row.body or b"", key_id=row.key_id
        )
        self._promise(request, row.user_id)
        self.deps.open_work.begin(self.model.user_id)
        self._held_bytes += request.held_bytes
        return request

    async def _fill(self) -> None:
        """Send requests in order, up to `MAX_AHEAD`; a barrier goes alone."""
        while len(self._flights) < MAX_AHEAD and not (self._snapshot_due and self._flights):
            last = self._flights.newest
            request = self._requests.get(last.through_seq + 1 if last else self._next_seq)
            if request is None:
                return
            # What runs alone, or is answered without running, waits for the end of all before it.
            alone = request.mode == "skip" or self._broken is not None or request.is_barrier
            if last is not None and (alone or last.is_barrier):
                return
            if request.mode == "skip":
                self._retire(request)
                continue
            job = self._broken or await self._job(request)
            if isinstance(job, Outcome):  # of a barrier, or all is lost: nothing is under way
                self._settle(request, job)
            else:
                # An error too: those before it are under way, and ends are told in order.
                self._flights.send(request, job)

    async def _job(self, request: QueuedRequest) -> Job | Outcome | InvalidInputError | EngineError:
        """What the engine runs; the outcome, or an error, when there is nothing to run."""
        assert request.operation is not None
        self._num_launched += 1
        try:
            asked = await self._asked(request, request.operation)
            job = await request.operation.job(asked, self._turn(request))
            is_replay = request.mode == "replay"
            if isinstance(job, TrainJob) and (request.runs_alone or is_replay):
                job = replace(job, alone=request.runs_alone, is_replay=is_replay)
        except InvalidInputError as exc:
            return exc
        except Exception as exc:  # no room for a folder, no answer from the database
            logger.exception("%s cannot be run", request.request_id)
            return EngineError(disk.describe(exc))
        if not isinstance(job, Outcome):
            request.job = job
        return job

    async def _asked(self, request: QueuedRequest, operation: Operation[Any]) -> Any:
        """What its `check` gave on arrival, read again where it was not kept."""
        if request.spilled:
            row = await self.deps.store.call(self.deps.store.journal.get, request.request_id)
            if row is None or row.body is None:
                raise InvalidInputError(f"the body of {request.request_id} left the journal")
            request.body, request.spilled = row.body, False
        if request.asked is None:
            size = len(request.body)
            request.asked = await off_loop(size, operation.unpack, request.body, self.model)
        return request.asked

    def _turn(self, request: QueuedRequest) -> OperationRun:
        return OperationRun(
            model=self.model,
            project_id=self._project_id,
            key_id=request.key_id,
            request_id=request.request_id,
            job_id=f"{request.request_id}#{self._num_launched}",
        )

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
            if request.mode == "replay":
                self._lose_state(f"{request.request_id} ran before and is refused now: {exc}")
            self._flights.drop_head()
            self._settle(request, Outcome(error=str(exc), category="user"))
        except EngineError as exc:
            await self._distrust(request, exc)
        else:
            await self._conclude(request, result)

    async def _conclude(self, request: QueuedRequest, result: Result) -> None:
        operation, job = request.operation, request.job
        assert operation is not None
        assert job is not None
        ended_at = time.time()
        compute_s = ended_at - request.started_at
        if request.mode == "replay":
            self._flights.drop_head()
            self._retire(request)
            self._snapshot_due |= self._state.note(operation, compute_s, request.size_bytes)
            return
        part, key_id = operation.part_of_step, request.key_id
        self.deps.curves.worked(self.model, key_id, part, request.started_at, ended_at)
        try:
            concluded = await operation.conclude(request.asked, self._turn(request), job, result)
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
            results = self.deps.results
            results.record(request.request_id, concluded.outcome, request.started_at)
            self._applied_seq = request.seq_id
            self._snapshot_due = False
            await self._state.snapshot(request.seq_id)
        self._settle(request, concluded.outcome, concluded.usage)

    def _settle(
        self, request: QueuedRequest, outcome: Outcome, usage: tuple[UsageCount, ...] = ()
    ) -> None:
        """Publish an outcome and move on to the next number."""
        self._retire(request)
        if request.mode != "run":
            return
        self._lost_replays.forget()
        if request.seq_id == 0 and not outcome.ok:
            self._broken = self._never_created(outcome.error)
        promise = self._let_go(request, ok=outcome.ok)
        self.deps.results.settle(promise, outcome, request.started_at, usage)

    def _let_go(self, request: QueuedRequest, *, ok: bool) -> Promise:
        """It has ended and is no open work any more; gives who is to be told."""
        self._clean_up(request, ok=ok)
        self._held_bytes -= request.held_bytes
        request.let_go()
        self.deps.open_work.end(self.model.user_id)
        assert request.promise is not None
        return request.promise

    def _clean_up(self, request: QueuedRequest, *, ok: bool) -> None:
        if request.operation is not None and request.job is not None:
            request.operation.cleanup(request.job, ok=ok)
            request.job = None

    def _retire(self, request: QueuedRequest) -> None:
        self._requests.pop(request.seq_id, None)
        self._held_bytes -= request.held_bytes
        request.held_bytes = 0
        self._next_seq = request.through_seq + 1
        # A replay retires numbers that were applied before.
        self._applied_seq = max(self._applied_seq, request.through_seq)

    # ------------------------------------------------------------------------ what goes wrong

    async def _distrust(self, request: QueuedRequest, exc: EngineError) -> None:
        """The engine failed in the middle: the request failed, and state it changed is restored."""
        if exc.is_to_blame:
            self._pauses.blame(self.model.user_id)
        self._flights.drop_head()
        error = disk.trouble(exc) or str(exc)
        self._settle(request, Outcome(error=error, category="server"))
        if self._lost_replays.is_hopeless(request):
            self._lose_state(error)
        if request.operation is not None and request.operation.changes_state:
            # What was sent after it ran, or will run, on a state that it may have half changed.
            self._state.distrust()
            await self._take_back(blame=False)

    async def _take_back(self, *, blame: bool) -> None:
        """Give up everything sent and not published; it will be sent again."""
        flights = await self._flights.land()
        suspects = [flight.request for flight in flights if blame and flight.is_suspect]
        if suspects and self._lost_replays.is_hopeless(suspects[0]):  # the others hardly began
            self._lose_state("the worker died")
        for request in suspects:
            request.attempts += 1
        for flight in flights:
            request = flight.request
            self._clean_up(request, ok=False)
            request.started_at, request.progress = 0.0, ""
            is_last = blame and flight.loss is not None and self._note_death(request, flight.loss)
            if is_last or request.attempts >= MAX_ATTEMPTS:
                self._blame(request)

    def _note_death(self, request: QueuedRequest, loss: WorkerLostError) -> bool:
        """Count a death that is known to come from the work itself; True when it was the last."""
        if not loss.cause:
            return False
        if loss.is_to_blame:
            self._pauses.blame(self.model.user_id)
        request.runs_alone = True
        request.memory_deaths += loss.cause == "memory"
        # What ran before is not given up: without it the state would be another one.
        is_new = request.mode == "run"
        return is_new and loss.was_alone and request.memory_deaths >= MAX_MEMORY_DEATHS

    def _lose_state(self, reason: str) -> None:
        logger.error("the state of %s is lost: %s", self.model.model_id, reason)
        error = f"The state of {self.model.model_id} could not be restored: {reason}"
        self._broken = Outcome(error=error, category="server")

    def _never_created(self, reason: str) -> Outcome:
        error = f"{self.model.model_id} was never created: {reason}"
        return Outcome(error=error, category="user")

    def _blame(self, request: QueuedRequest) -> None:
        times = request.attempts
        message = f"The worker died {times} times while it ran this request; it was given up."
        if request.memory_deaths:
            message = (
                f"The worker ran out of memory {request.memory_deaths} times while it ran this "
                "request, and the kernel ended it; it was given up. Send fewer or shorter datums "
                "at a time."
            )
        logger.error("%s: %s", request.request_id, message)
        if request.mode == "run":
            promise = self._let_go(request, ok=False)
            outcome = Outcome(error=message, category="server")
            self.deps.results.settle(promise, outcome, request.started_at)
        request.mode = "skip"

    async def _give_up(self, outcome: Outcome) -> None:
        """End what waits and what runs; state that the latter may have changed is restored."""
        self._stopped = None
        if self._flights.num_running:  # what waits for a place has changed nothing
            self._state.distrust()
        await self._flights.land()
        self._fail_all(outcome)

    def _fail_all(self, outcome: Outcome) -> None:
        for request in [self._requests[seq_id] for seq_id in sorted(self._requests)]:
            self._settle(request, outcome)

    # ------------------------------------------------------------------------ gaps

    def _watch_gap(self) -> None:
        waits = bool(self._requests) and self._next_seq not in self._requests
        has_gap = waits and self._task is None
        if not has_gap and self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        elif has_gap and self._gap_timer is None:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(self.deps.config.gap_limit_s, self._fail_gap)

    def _fail_gap(self) -> None:
        self._gap_timer = None
        if not self._requests or self._next_seq in self._requests:
            return
        # Never listed: a gap may be of any length.
        missing = range(self._next_seq, min(self._requests))
        shown = ", ".join(str(n) for n in missing[:5]) + (", ..." if len(missing) > 5 else "")
        self._fail_all(
            Outcome(
                error=f"seq_id {shown} of {self.model.model_id} did not arrive within "
                f"{self.deps.config.gap_limit_s:g} s, so the requests after it were not run. "
                "Number requests without gaps, and send this one again under a new number.",
                category="user",
            )
        )
