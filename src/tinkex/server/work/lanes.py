"""One lane per model: requests run in seq_id order, each exactly once, whatever dies meanwhile.

A lane admits requests in any order and runs them in one: `push` puts an `Op` at its number, a
single task drives the lane while it has something to do. A few compute jobs are sent ahead, so that
the engine never idles between two of them, but results are published strictly in order. When the
worker dies, or a job fails in a way that may have left the state half changed, everything not yet
published is taken back, the state is restored (`recovery`) and the lane goes on from there.

Who waits for whom: a client waits for a `Promise`; the promise is settled by the lane; the lane
waits for a place at the worker (`queue.FairGate`) and then for the worker. What a request means is
the business of `operations`; the lane only sees jobs and outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tinkex.engine.jobs import Event, Job, Progress, Result
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.files import disk
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.workers.placement import Place
from tinkex.store import UsageCount

logger = logging.getLogger(__name__)

MAX_AHEAD = 8
"""Compute jobs of one lane that the worker may hold together."""
MAX_HELD_BYTES = 64_000_000
"""Bodies of one lane kept in memory; those beyond wait in the journal."""
MAX_ATTEMPTS = 5
"""A request that was running this many times when its worker died is to blame."""

Mode = Literal["run", "replay", "skip"]


@dataclass(slots=True, eq=False)
class Op:
    """One numbered request of a model."""

    seq_id: int
    kind: str
    request_id: str
    body: bytes
    promise: Promise | None = None
    mode: Mode = "run"
    """`replay`: run for its effect on the state only. `skip`: only its number counts."""
    cost: float = 1.0
    attempts: int = 0
    decoded: Any = None
    """The request as decoded at its arrival, so that `prepare` need not decode it again."""
    usage: tuple[UsageCount, ...] = ()
    spilled: bool = False
    """The body is in the journal only, because too many wait; `prepare` reads it back."""
    held_bytes: int = 0
    started_at: float = 0.0
    progress: str = ""
    through_seq: int = -1
    """The last number it stands for: one `skip` covers a whole range. -1: its own only."""

    def __post_init__(self) -> None:
        self.through_seq = max(self.through_seq, self.seq_id)


class Operations(Protocol):
    """What the lane must know about the meaning of requests."""

    def is_barrier(self, op: Op) -> bool:
        """True when the op must run alone, and its outcome must be recorded before the next."""

    def changes_state(self, op: Op) -> bool:
        """True when a failure may leave the model half changed."""

    async def prepare(self, op: Op, job_id: str) -> Job | Outcome:
        """The job to run, or the outcome when there is nothing left to compute."""

    async def conclude(self, op: Op, result: Result) -> Outcome: ...

    def record(self, op: Op, outcome: Outcome, then: Callable[[], None] | None = None) -> None:
        """Journal the end of an op, and call `then` once it is durable. Must not block."""


class Recovery(Protocol):
    async def restore(self, lane: Lane) -> None:
        """Bring the worker's memory to the last snapshot and queue the replay of what followed."""

    def note(self, lane: Lane, op: Op, compute_s: float) -> bool:
        """Count an op that ended well; True when a snapshot is due."""

    async def snapshot(self, lane: Lane, seq_id: int) -> None:
        """Save the state, which is the one after `seq_id`, and wait until that is durable."""

    async def begin_snapshot(self, lane: Lane, seq_id: int) -> None:
        """Have it saved while the lane goes on. Both are called with no op under way."""

    async def give_up_snapshot(self, lane: Lane) -> None:
        """Stop waiting for it: the lane closes."""


@dataclass(slots=True)
class _Flight:
    op: Op
    task: asyncio.Task[Result]
    sent: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Lane:
    model_id: str
    session_id: str
    user_id: str
    base_model: str
    place: Place
    operations: Operations
    recovery: Recovery
    gap_limit_s: float
    next_seq: int = 0
    applied_seq: int = -1
    """The last number whose effect is in the worker's memory and published."""
    last_seq: int = -1
    """The highest number that has arrived."""
    generation: int = -1
    """The worker's generation that holds this model's state; -1: none does."""
    broken: Outcome | None = None
    """What every request is answered: the model was never created, or its state is lost."""
    restoring: bool = False
    obstacle: str = ""
    """What keeps the state from being restored, for a person."""
    snapshot_due: bool = False
    """Nothing more is sent until the snapshot is begun."""
    ops: dict[int, Op] = field(default_factory=dict)
    held_bytes: int = 0
    """Bodies of waiting requests in memory."""
    used_at: float = field(default_factory=time.monotonic)
    _flights: deque[_Flight] = field(default_factory=deque)
    _task: asyncio.Task[None] | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _gap_timer: asyncio.TimerHandle | None = None
    _num_launched: int = 0
    _num_lost_replays: int = 0
    _exclusive: asyncio.Lock = field(default_factory=asyncio.Lock)

    # ------------------------------------------------------------------------ for the outside

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._exclusive.locked()

    @property
    def num_waiting(self) -> int:
        return len(self.ops)

    def push(self, op: Op) -> None:
        """Queue an op at its number. The caller has made sure that the number is free."""
        self.ops[op.seq_id] = op
        self.last_seq = max(self.last_seq, op.seq_id)
        op.held_bytes = len(op.body)
        self.held_bytes += op.held_bytes
        if self.held_bytes > MAX_HELD_BYTES and op.seq_id > self.next_seq:
            self._spill(op)
        if op.promise is not None:
            op.promise.reason = lambda: self.reason(op)
        self.used_at = time.monotonic()
        self.kick()

    def _spill(self, op: Op) -> None:
        self.held_bytes -= op.held_bytes
        op.body, op.decoded, op.spilled, op.held_bytes = b"", None, True, 0

    def kick(self) -> None:
        """Go on, if there is something to do."""
        self._wake.set()
        if self._task is None and self.next_seq in self.ops:
            self._task = asyncio.create_task(self._drive(), name=f"lane-{self.model_id}")
        self._watch_gap()

    def reason(self, op: Op) -> str:
        """Why `op` is not done, for a person."""
        if not self.place.worker.is_ready:
            return "the worker is starting"
        if self.obstacle:
            return self.obstacle
        if self.restoring:
            return f"restoring the model's state; {self._ahead(op)} requests ahead"
        if op.mode == "run" and any(flight.op is op for flight in self._flights):
            if not op.started_at:
                waiting = self.place.training.ahead_of(self.user_id)
                return f"waiting for a free worker; about {waiting} requests ahead"
            return op.progress or "running"
        if self.next_seq not in self.ops and not self._flights:
            return (
                f"waiting for seq_id {self.next_seq} of {self.model_id}, which has not arrived; "
                f"{len(self.ops)} later requests wait for it"
            )
        head = self._flights[0].op.progress if self._flights else ""
        return f"{self._ahead(op)} requests ahead" + (f"; {head}" if head else "")

    async def run_alone(self, action: Callable[[], Awaitable[None]]) -> bool:
        """Run something while no op is under way. False, and nothing done, when one is."""
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
        await self._land_all()
        await self.recovery.give_up_snapshot(self)

    def _ahead(self, op: Op) -> int:
        return sum(1 for seq_id in self.ops if seq_id < op.seq_id)

    # ------------------------------------------------------------------------ the driver

    async def _drive(self) -> None:
        try:
            async with self._exclusive:
                while self.next_seq in self.ops or self.snapshot_due:
                    await self._advance()
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            logger.exception("lane %s failed", self.model_id)
            await self._land_all()
            self.generation = -1  # what was under way may have changed the state
            self._fail_all(Outcome(error=disk.describe(exc), category="server"))
        finally:
            self._task = None
        self.kick()

    async def _advance(self) -> None:
        """Make sure the state is there, send what may go, publish the head when it is done."""
        try:
            await self._ensure_state()
            if self.snapshot_due and not self._flights:
                self.snapshot_due = False
                # Not `applied_seq`: in the middle of a replay the state is an older one.
                await self.recovery.begin_snapshot(self, self.next_seq - 1)
            await self._fill()
            if self._flights:
                await self._publish_head()
        except WorkerLostError:
            await self._take_back(blame=True)

    async def _ensure_state(self) -> None:
        worker = self.place.worker
        if self.generation == worker.generation and worker.is_ready:
            return
        await self._take_back(blame=True)
        await worker.wait_ready()
        self.restoring = True
        self.snapshot_due = False  # of a state that is gone; the replay counts anew
        try:
            await self.recovery.restore(self)
        finally:
            self.restoring, self.obstacle = False, ""

    async def _fill(self) -> None:
        """Send ops in order, up to `MAX_AHEAD`; a barrier goes alone."""
        while len(self._flights) < MAX_AHEAD and not (self.snapshot_due and self._flights):
            seq_id = self._flights[-1].op.through_seq + 1 if self._flights else self.next_seq
            op = self.ops.get(seq_id)
            if op is None:
                return
            stuck = op.mode == "skip" or self.broken is not None
            alone = stuck or self.operations.is_barrier(op)
            if self._flights and (alone or self.operations.is_barrier(self._flights[-1].op)):
                return
            if op.mode == "skip":
                self._retire(op)
            elif self.broken is not None:
                self._settle(op, self.broken)
            else:
                await self._launch(op)

    async def _launch(self, op: Op) -> None:
        self._num_launched += 1
        after = self._flights[-1].sent if self._flights else None
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            job = await self.operations.prepare(op, f"{op.request_id}#{self._num_launched}")
        except InvalidInputError as exc:
            task = asyncio.create_task(_refuse(exc, sent))
        except Exception as exc:  # no room for a folder, no answer from the database
            logger.exception("%s cannot be run", op.request_id)
            task = asyncio.create_task(_refuse(EngineError(disk.describe(exc)), sent))
        else:
            if isinstance(job, Outcome):  # only a barrier, so nothing is under way
                self._settle(op, job)
                return
            task = asyncio.create_task(self._execute(op, job, after, sent))
        task.add_done_callback(lambda _: self._wake.set())
        self._flights.append(_Flight(op, task, sent))

    async def _execute(
        self, op: Op, job: Job, after: asyncio.Future[None] | None, sent: asyncio.Future[None]
    ) -> Result:
        try:
            if after is not None:
                await asyncio.shield(after)
            async with self.place.training.place(self.user_id, op.cost):
                answer = self.place.worker.post(
                    job, lambda event: _note(op, event), generation=self.generation
                )
                sent.set_result(None)
                op.started_at = time.time()
                return await answer
        finally:
            if not sent.done():
                sent.set_result(None)

    async def _publish_head(self) -> None:
        flight = self._flights[0]
        while not flight.task.done():
            self._wake.clear()
            await self._fill()
            if not flight.task.done():
                await self._wake.wait()
        op = flight.op
        try:
            result = flight.task.result()
        except WorkerLostError:
            raise
        except InvalidInputError as exc:
            outcome = Outcome(error=str(exc), category="user")
            if op.mode == "replay":
                self._lose_state(f"{op.request_id} ran before and is refused now: {exc}")
        except EngineError as exc:
            await self._distrust(op, exc)
            return
        else:
            await self._conclude(op, result)
            return
        self._flights.popleft()
        self._settle(op, outcome)

    async def _conclude(self, op: Op, result: Result) -> None:
        compute_s = time.time() - op.started_at
        if op.mode == "replay":
            self._flights.popleft()
            self._retire(op)
            self.snapshot_due = self.recovery.note(self, op, compute_s) or self.snapshot_due
            return
        try:
            outcome = await self.operations.conclude(op, result)
        except InvalidInputError as exc:
            outcome = Outcome(error=str(exc), category="user")
        except Exception as exc:  # the job ran, but what it made cannot be kept
            logger.exception("%s cannot be ended", op.request_id)
            await self._distrust(op, EngineError(disk.describe(exc)))
            return
        self._flights.popleft()
        if outcome.ok and self.recovery.note(self, op, compute_s):
            self.snapshot_due = True
        if self.snapshot_due and self.operations.is_barrier(op):
            # Loading depends on a checkpoint its owner may delete as soon as the result is out.
            self.operations.record(op, outcome)
            self.applied_seq = op.seq_id
            self.snapshot_due = False
            await self.recovery.snapshot(self, op.seq_id)
        self._settle(op, outcome)

    # ------------------------------------------------------------------------ ends

    def _settle(self, op: Op, outcome: Outcome) -> None:
        """Publish an outcome and move on to the next number."""
        self._retire(op)
        if op.mode != "run":
            return
        self._num_lost_replays = 0
        if op.seq_id == 0 and not outcome.ok:
            self.broken = never_created(self.model_id, outcome.error)
        self._tell(op, outcome)

    def _tell(self, op: Op, outcome: Outcome) -> None:
        """Journal how an op ended, and settle its promise.

        A success may be told first: lost in a crash, it runs again and ends the same. A failure
        may not: who was told that a request was not run must not find its effect after a crash.
        """
        promise = op.promise
        if promise is None or outcome.ok:
            self.operations.record(op, outcome)
            if promise is not None:
                promise.settle(outcome)
            return
        promise.reason = lambda: "it failed; the journal has yet to take note of it"
        self.operations.record(op, outcome, then=lambda: (promise.settle(outcome), None)[1])

    def _retire(self, op: Op) -> None:
        self.ops.pop(op.seq_id, None)
        self.held_bytes -= op.held_bytes
        op.held_bytes = 0
        self.next_seq = op.through_seq + 1
        self.applied_seq = max(self.applied_seq, op.through_seq)
        self.used_at = time.monotonic()

    async def _distrust(self, op: Op, exc: EngineError) -> None:
        """The engine failed in the middle: this op has failed, and state it changed is restored."""
        self._flights.popleft()
        error = disk.trouble(exc) or str(exc)
        self._settle(op, Outcome(error=error, category="server"))
        self._count_lost_replay(op, error)
        if self.operations.changes_state(op):
            self.generation = -1
            await self._take_back(blame=False)

    async def _take_back(self, *, blame: bool) -> None:
        """Give up everything sent and not published; it will be sent again."""
        flights = list(self._flights)
        await self._land_all()
        for flight in flights:
            op = flight.op
            if blame and op.started_at and not _ended_well(flight.task):
                op.attempts += 1
                self._count_lost_replay(op, "the worker died")
            op.started_at, op.progress = 0.0, ""
            if op.attempts >= MAX_ATTEMPTS:
                self._blame(op)

    def _count_lost_replay(self, op: Op, reason: str) -> None:
        """A replay starts afresh each time, so its failures are counted here."""
        if op.mode == "replay":
            self._num_lost_replays += 1
            if self._num_lost_replays >= MAX_ATTEMPTS:
                self._lose_state(reason)

    def _lose_state(self, reason: str) -> None:
        logger.error("the state of %s is lost: %s", self.model_id, reason)
        error = f"The state of {self.model_id} could not be restored: {reason}"
        self.broken = Outcome(error=error, category="server")

    def _blame(self, op: Op) -> None:
        message = f"The worker died {op.attempts} times while it ran this request; it was given up."
        logger.error("%s: %s", op.request_id, message)
        outcome = Outcome(error=message, category="server")
        if op.mode == "run":
            self._tell(op, outcome)
        op.mode = "skip"

    async def _land_all(self) -> None:
        flights, self._flights = list(self._flights), deque()
        for flight in flights:
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)

    def _fail_all(self, outcome: Outcome) -> None:
        for op in [self.ops[seq_id] for seq_id in sorted(self.ops)]:
            self._settle(op, outcome)

    # ------------------------------------------------------------------------ gaps

    def _watch_gap(self) -> None:
        has_gap = bool(self.ops) and self.next_seq not in self.ops and self._task is None
        if not has_gap and self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        elif has_gap and self._gap_timer is None:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(self.gap_limit_s, self._fail_gap)

    def _fail_gap(self) -> None:
        self._gap_timer = None
        if not self.ops or self.next_seq in self.ops:
            return
        missing = range(self.next_seq, min(self.ops))  # never listed: a gap may be of any length
        shown = ", ".join(str(n) for n in missing[:5]) + (", ..." if len(missing) > 5 else "")
        self._fail_all(
            Outcome(
                error=f"seq_id {shown} of {self.model_id} did not arrive within "
                f"{self.gap_limit_s:g} s, so the requests after it were not run. "
                "Number requests without gaps, and send this one again under a new number.",
                category="user",
            )
        )


def never_created(model_id: str, reason: str) -> Outcome:
    return Outcome(error=f"{model_id} was never created: {reason}", category="user")


async def _refuse(exc: InvalidInputError | EngineError, sent: asyncio.Future[None]) -> Result:
    sent.set_result(None)
    raise exc


def _note(op: Op, event: Event) -> None:
    if isinstance(event, Progress):
        if event.text != op.progress:
            logger.info("%s: %s", op.request_id, event.text)
        op.progress = event.text


def _ended_well(task: asyncio.Task[Result]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
