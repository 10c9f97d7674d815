"""Where an adapter of a pool lives: on one member, or shared by several that train it together.

An adapter begins on one member, its leader. When splitting a pass would save more time than it
costs, both measured, the leader's state is saved aside and loaded by others, which share the
adapter from then on: every pass is cut into parts (`splitting`), each member gathers the gradients
of its part, and a step has two rounds. First the gradients come together (`exchange`); when all
have them, each adds them, in one order, and takes the same step. No engine's thread ever waits for
another one, so none can hang with another; whoever hangs is ended by its own watchdog.

When a member that holds gradients is lost, or a part is refused while others went through, the home
is broken: nobody's copy is used again, and the owner restores the adapter elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tinkex.engine.jobs import (
    CreateAdapterJob,
    DropAdapterJob,
    GradientResult,
    Job,
    LoadAdapterJob,
    OptimJob,
    OptimResult,
    Result,
    SaveAdapterJob,
    TrainJob,
    TrainResult,
)
from tinkex.engine.optim.shards import NUM_SHARDS
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.fairness.backlog import Backlog
from tinkex.server.workers.gradient_exchange import Brought, Exchange, raise_worst
from tinkex.server.workers.seat import Answer, Seat, ignore, new_id
from tinkex.server.workers.splitting import JobPart, joined, part_of, renumbered, split
from tinkex.server.workers.step_times import StepTimes
from tinkex.server.workers.worker import OnEvent, Worker

logger = logging.getLogger(__name__)
PART_S = 0.01
"""What a pass in parts costs beside its compute, at least."""
REDUCE_S = 0.05
"""What a step of several members is taken to cost until one was measured."""
JOIN_PASSES = 10
"""A member joins when what it saves in so many passes pays for its coming."""
ALONE_STEPS = 8
"""After so many steps whose passes nobody split, the leader has the adapter for itself again."""
RECENT = 0.3
"""Weight of the newest measurement."""


@dataclass(slots=True)
class SharedByHomes:
    """What the homes of a pool have in common."""

    exchange: Exchange | None
    """How members' gradients come together; None: passes are never split."""
    deterministic: bool
    backlog: Backlog = field(default_factory=Backlog)
    """Of training; samples have one of their own (`routing`)."""
    token_s: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Seconds of training a token, measured, by base model and whether there is a backward."""
    seconds: Counter[str] = field(default_factory=Counter)
    """What training took altogether: compute, wait, reduce and transfer."""


class Home:
    def __init__(
        self,
        adapter_id: str,
        generation: int,
        leader: Worker,
        shared: SharedByHomes,
        times: StepTimes | None = None,
    ) -> None:
        """`times` are those of the home that this one follows."""
        self.generation = generation
        self.is_empty = True
        self.base_model = ""
        self.seats = [Seat(leader, leader.generation)]
        self.times = times or StepTimes()
        self._adapter_id = adapter_id
        self._shared = shared
        self._is_broken = False
        self._holders: set[Seat] = set()  # that gathered gradients since the last step
        self._pins: dict[int, Seat] = {}  # who has a virtual shard until the next step
        self._queue: deque[tuple[Job, OnEvent | None, Answer]] = deque()
        self._busy: asyncio.Task[None] | None = None  # between the rounds of a step or save
        self._joining: asyncio.Task[None] | None = None
        self._unfit: set[tuple[int, int]] = set()  # members that could not load the adapter
        self._reduce_s = REDUCE_S
        self._join_s = 0.0
        self._num_alone = 0

    # ------------------------------------------------------------------------ for the pool

    @property
    def leader(self) -> Worker:
        return self.seats[0].member

    @property
    def is_lost(self) -> bool:
        """Whether what it held is gone. A member that shares it and held nothing is let go of."""
        if self._is_broken:
            return True
        lost = [seat for seat in self.seats if seat.is_lost]
        if not lost:
            return False
        if self.seats[0] in lost or self._holders.intersection(lost) or self._busy:
            self.give_up()
            return True
        for seat in lost:
            self.seats.remove(seat)
        return False

    def give_up(self) -> None:
        """Use no copy again; free the memory of those that are left."""
        if not self._is_broken:
            self._is_broken = True
            self.times.lost()
            self._drop(self.seats)
            while self._queue:
                _, _, answer = self._queue.popleft()
                _fail(answer, WorkerLostError(f"{self._adapter_id} was lost with a worker"))

    def post(self, job: Job, on_event: OnEvent | None, helpers: Sequence[Worker]) -> Answer:
        """Run a job; those of `helpers` that are not here yet may be asked to join."""
        is_of_step = isinstance(job, TrainJob | OptimJob)
        if is_of_step:
            self.times.begun()
        waits = self._joining is not None and not isinstance(job, TrainJob)
        if self._queue or self._busy is not None or waits:
            answer: Answer = asyncio.get_running_loop().create_future()
            self._queue.append((job, on_event, answer))
        elif isinstance(job, TrainJob):
            answer = self._train(job, on_event, helpers)
        else:
            answer = self._dispatch(job, on_event)
        if is_of_step:
            answer.add_done_callback(lambda _: self.times.ended())
        return answer

    def _dispatch(self, job: Job, on_event: OnEvent | None) -> Answer:
        match job:
            case OptimJob() if len(self.seats) > 1:
                return self._in_rounds(self._step(job))
            case SaveAdapterJob() if job.with_gradients and self._holders - {self.seats[0]}:
                return self._in_rounds(self._save(job, on_event))
            case CreateAdapterJob():
                self.base_model = job.base_model
                self._be_alone()
            case LoadAdapterJob():
                self.base_model = job.base_model
                self._be_alone()
                # A snapshot may have brought gradients, which stay where they are until the step.
                self._holders = {self.seats[0]}
                self._pins = dict.fromkeys(range(NUM_SHARDS), self.seats[0])
            case DropAdapterJob():
                self._be_alone()
            case OptimJob():
                self._clear()
                self.is_empty = False
                return self._step_alone(job, on_event)
        self.is_empty = isinstance(job, DropAdapterJob)
        return self.seats[0].post(job, on_event)

    # ------------------------------------------------------------------------ passes

    def _train(
        self, job: TrainJob, on_event: OnEvent | None, helpers: Sequence[Worker] = ()
    ) -> Answer:
        if not job.data:  # the engine's to refuse
            return self.seats[0].post(job, on_event)
        costs = [len(datum.tokens) for datum in job.data]
        parts = self._parts(job, costs, helpers)
        seats = [self.seats[part.place] for part in parts]
        if job.backward:
            self._holders.update(seats)
            for seat, part in zip(seats, parts, strict=True):
                self._pins.update(dict.fromkeys(part.shards, seat))
        began = time.perf_counter()
        whole = len(parts) == 1
        answers = [
            seat.post(job if whole else part_of(job, part), on_event)
            for seat, part in zip(seats, parts, strict=True)
        ]
        for seat, part, answer in zip(seats, parts, answers, strict=True):
            self._shared.backlog.add(seat.member, part.num_tokens, answer)
        if whole:
            answers[0].add_done_callback(partial(self._passed_alone, job.backward, began))
            return answers[0]
        return asyncio.create_task(self._joined(job, parts, answers, began))

    def _parts(
        self, job: TrainJob, costs: Sequence[int], helpers: Sequence[Worker]
    ) -> Sequence[JobPart]:
        exact, backlog = self._shared.deterministic and job.backward, self._shared.backlog
        pins = {shard: self.seats.index(seat) for shard, seat in self._pins.items()}
        alone = split(costs, [0.0], dict.fromkeys(pins, 0) if exact else None)
        if len(self.seats) == 1 and not helpers:
            return alone
        if self._shared.exchange is None or (token_s := self._token_s(job.backward)) is None:
            return alone
        loads = [float(backlog.of(seat.member)) for seat in self.seats]
        parts = split(costs, loads, pins if exact else None)
        saved_s = token_s * _sooner(costs, loads, parts)
        cost_s = PART_S + (0.0 if len(self._holders) > 1 or not job.backward else self._reduce_s)
        if self._joining is None and (new := self._not_here(helpers)):
            all_loads = [*loads, *(float(backlog.of(member)) for member in new)]
            sooner = _sooner(costs, all_loads, split(costs, all_loads, None))
            if token_s * sooner - saved_s > cost_s + self._join_s / JOIN_PASSES:
                self._invite(new)
        if saved_s > cost_s or any(place for place in pins.values()):
            return parts
        return alone

    def _token_s(self, backward: bool) -> float | None:
        return self._shared.token_s.get((self.base_model, backward))

    async def _joined(
        self, job: TrainJob, parts: Sequence[JobPart], answers: Sequence[Answer], began: float
    ) -> Result:
        ends = await asyncio.gather(*answers, return_exceptions=True)
        ends = [
            renumbered(end, part) if isinstance(end, InvalidInputError) else end
            for end, part in zip(ends, parts, strict=True)
        ]
        refusals = [end for end in ends if isinstance(end, InvalidInputError)]
        if len(refusals) == len(ends):  # nobody has changed anything
            raise refusals[0]
        self._raise_worst(ends)
        results = [end for end in ends if isinstance(end, TrainResult)]
        result = joined(parts, results)
        self._measure(results, result, job.backward, began)
        return result

    def _passed_alone(self, backward: bool, began: float, answer: Answer) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        result = answer.result()
        assert isinstance(result, TrainResult)
        self._measure([result], result, backward, began)

    def _raise_worst(self, ends: Sequence[Result | BaseException]) -> None:
        """Some members went through, others did not: no copy can be used again."""
        if any(isinstance(end, BaseException) for end in ends):
            self.give_up()
            raise_worst(ends)

    def _measure(
        self, parts: Sequence[TrainResult], whole: TrainResult, backward: bool, began: float
    ) -> None:
        """Add the time that was not compute to the metrics, when the engine says what was."""
        took = [part.metrics.get("train_time_s:sum") for part in parts]
        compute = [seconds for seconds in took if seconds]
        if not compute:
            return
        wait_s = max(0.0, time.perf_counter() - began - max(compute))
        self._shared.seconds.update({"compute": sum(compute), "wait": wait_s})
        self.times.spent(compute=max(compute))
        if whole.num_tokens:
            key, token_s = (self.base_model, backward), sum(compute) / whole.num_tokens
            before = self._shared.token_s.get(key, token_s)
            self._shared.token_s[key] = before + RECENT * (token_s - before)
        whole.metrics.update({"wait_time_s:sum": wait_s, "num_workers:max": float(len(parts))})

    # ------------------------------------------------------------------------ steps

    def _in_rounds(self, rounds: Coroutine[Any, Any, Answer]) -> Answer:
        """Let nothing else of the adapter run until the last round was posted."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._busy = asyncio.create_task(self._finish_rounds(rounds, answer))
        return answer

    async def _finish_rounds(self, rounds: Coroutine[Any, Any, Answer], answer: Answer) -> None:
        try:
            _chain(await rounds, answer)
        except Exception as exc:
            _fail(answer, exc)
        finally:
            self._busy = None
            self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._busy is None and self._joining is None:
            job, on_event, answer = self._queue.popleft()
            if not answer.done():
                if isinstance(job, TrainJob):
                    _chain(self._train(job, on_event), answer)
                else:
                    _chain(self._dispatch(job, on_event), answer)

    async def _step(self, job: OptimJob) -> Answer:
        """What was gathered comes together; when all have it, everybody adds it and steps."""
        began = time.perf_counter()
        holders = [seat for seat in self.seats if seat in self._holders]
        self._num_alone = 0 if len(holders) > 1 else self._num_alone + 1
        if self._num_alone >= ALONE_STEPS and self._holders <= {self.seats[0]}:
            self._be_alone()
            return self._step_alone(job)
        brought = await self._bring(holders)
        added = [seat.post(brought.job()) for seat in self.seats] if holders else []
        stepped = [
            seat.post(replace(job, job_id=f"{job.job_id}/{place}" if place else job.job_id))
            for place, seat in enumerate(self.seats)
        ]
        self._clear()
        return asyncio.create_task(self._stepped(brought, added, stepped, began))

    def _step_alone(self, job: OptimJob, on_event: OnEvent | None = None) -> Answer:
        """One member has it all: nothing to add up, nothing to bring."""
        answer = self.seats[0].post(job, on_event)
        answer.add_done_callback(self._stepped_alone)
        return answer

    def _stepped_alone(self, answer: Answer) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        result = answer.result()
        assert isinstance(result, OptimResult)
        compute_s = float(result.metrics.get("optim_time_s:sum", 0.0))
        self._shared.seconds.update({"compute": compute_s})
        self.times.spent(compute=compute_s)
        self.times.stepped()

    async def _stepped(
        self,
        brought: Brought,
        added: Sequence[Answer],
        stepped: Sequence[Answer],
        began: float,
    ) -> Result:
        ends = await asyncio.gather(*added, *stepped, return_exceptions=True)
        await brought.remove()
        self._raise_worst(ends)
        result = next(end for end in ends if isinstance(end, OptimResult))
        transfer_s, reduce_s = brought.transfer_s, brought.reduce_s
        reduce_s += max((e.seconds for e in ends if isinstance(e, GradientResult)), default=0.0)
        compute_s = float(result.metrics.get("optim_time_s:sum", 0.0))
        took_s = time.perf_counter() - began
        wait_s = max(0.0, took_s - transfer_s - reduce_s - compute_s)
        if brought.num_holders > 1:
            self._reduce_s += RECENT * (transfer_s + reduce_s - self._reduce_s)
        spent = {"compute": compute_s, "wait": wait_s, "reduce": reduce_s, "transfer": transfer_s}
        self._shared.seconds.update(spent)
        self.times.spent(compute=compute_s, reduce=reduce_s, transfer=transfer_s)
        self.times.stepped()
        more = {f"{name}_time_s:sum": spent[name] for name in ("wait", "reduce", "transfer")}
        return replace(result, metrics={**result.metrics, **more})

    async def _save(self, job: SaveAdapterJob, on_event: OnEvent | None) -> Answer:
        """Bring all gradients to the leader, which saves them with the rest."""
        leader = self.seats[0]
        brought = await self._bring([s for s in self.seats[1:] if s in self._holders], leader)
        added = leader.post(brought.job())
        saved = leader.post(job, on_event)
        self._holders, self._pins = {leader}, dict.fromkeys(self._pins, leader)
        return asyncio.create_task(self._saved(brought, added, saved))

    async def _saved(self, brought: Brought, added: Answer, saved: Answer) -> Result:
        ends = await asyncio.gather(added, saved, return_exceptions=True)
        await brought.remove()
        self._raise_worst(ends[:1])
        return await saved

    async def _bring(self, holders: Sequence[Seat], to: Seat | None = None) -> Brought:
        """Bring what was gathered to all; or to one, shard by shard and not yet added up."""
        exchange = self._shared.exchange
        assert exchange is not None
        try:
            if to is None:
                return await exchange.bring(self._adapter_id, self.seats, holders)
            return await exchange.bring_files(self._adapter_id, holders)
        except EngineError:
            self.give_up()
            raise

    def _clear(self) -> None:
        """The gathered gradients are used up."""
        self._holders, self._pins = set(), {}

    # ------------------------------------------------------------------------ who shares it

    def _not_here(self, helpers: Sequence[Worker]) -> list[Worker]:
        here = {id(seat.member) for seat in self.seats}
        return [
            member
            for member in helpers
            if id(member) not in here and (id(member), member.generation) not in self._unfit
        ]

    def _invite(self, new: Sequence[Worker]) -> None:
        """Have more members share the adapter."""
        assert self._shared.exchange is not None
        folder = str(self._shared.exchange.folder / f"{secrets.token_hex(8)}-join")
        job = SaveAdapterJob(
            job_id=new_id(),
            adapter_id=self._adapter_id,
            folder=folder,
            with_optimizer=True,
            ephemeral=True,
        )
        # Posted now: it is the state before all that is posted from here on.
        saved = self.seats[0].post(job)
        self._joining = asyncio.create_task(self._join(new, folder, saved))

    async def _join(self, members: Sequence[Worker], folder: str, saved: Answer) -> None:
        began, loaded = time.perf_counter(), list[Answer]()
        try:
            await saved
            wanted = [] if self._is_broken else members
            for seat in [Seat(member, member.generation) for member in wanted]:
                job = LoadAdapterJob(
                    job_id=new_id(),
                    adapter_id=self._adapter_id,
                    base_model=self.base_model,
                    folder=folder,
                    with_optimizer=True,
                )
                loaded.append(answer := seat.post(job))
                answer.add_done_callback(partial(self._note_load, seat))
                self.seats.append(seat)
        except (EngineError, InvalidInputError) as exc:
            logger.warning("%s is not shared: %s", self._adapter_id, exc)
            self._unfit.update((id(member), member.generation) for member in members)
        finally:
            self._joining = None
            self._go_on()
        await asyncio.gather(*loaded, return_exceptions=True)
        self._join_s = time.perf_counter() - began
        logger.info("%s is shared by %d workers", self._adapter_id, len(self.seats))
        await asyncio.to_thread(shutil.rmtree, folder, True)

    def _note_load(self, seat: Seat, answer: Answer) -> None:
        if answer.cancelled() or answer.exception() is None:
            return
        logger.warning("%s cannot share %s: %s", seat.member.name, self._adapter_id, answer)
        self._unfit.add((id(seat.member), seat.generation))
        if seat in self._holders:
            self.give_up()
        elif seat in self.seats:
            self.seats.remove(seat)

    def _be_alone(self) -> None:
        """Leave the adapter to its leader; what others gathered is of no use any more."""
        self._drop(self.seats[1:])
        del self.seats[1:]
        self._clear()
        self._num_alone = 0

    def _drop(self, seats: Iterable[Seat]) -> None:
        for seat in seats:
            if not seat.is_lost:
                job = DropAdapterJob(job_id=new_id(), adapter_id=self._adapter_id)
                seat.post(job).add_done_callback(ignore)


def _sooner(costs: Sequence[int], loads: Sequence[float], parts: Sequence[JobPart]) -> float:
    """How many tokens earlier a pass would end in these parts than on the leader alone."""
    return loads[0] + sum(costs) - max(loads[part.place] + part.num_tokens for part in parts)


# ------------------------------------------------------------------------------------ futures


def _fail(answer: Answer, error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # one that nobody waits for any more must not log a warning


def _chain(source: Answer, target: Answer) -> None:
    """Let one future end as another does; cancelling it cancels that one."""

    def ended(_: Answer) -> None:
        if target.done():
            ignore(source)
        elif source.cancelled():
            target.cancel()
        elif (error := source.exception()) is not None:
            _fail(target, error)
        else:
            target.set_result(source.result())

    source.add_done_callback(ended)
    target.add_done_callback(lambda done: source.cancel() if done.cancelled() else None)
