"""The placement of an adapter in a pool: one member, or several that train it together.

An adapter begins on one member, its leader. When splitting a pass would save more time than it
costs, both measured, the leader's state is saved aside and loaded by others, which share the
adapter from then on: every pass is split (`splitting`), each member gathers the gradients of its
part, and a step has two rounds. First the gradients come together (`gradient_groups`); when all
have them, each adds them, in one order, and takes the same step. No engine's thread ever waits for
another one, so none can hang with another; one that hangs is ended by its own watchdog.

When a member that holds gradients is lost, or a part is refused while others went through, the
placement is lost: no copy is used again, and the owner restores the adapter in another placement.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from tinkex.engine.jobs import (
    AddGradientJob,
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
from tinkex.server.workers.gradient_groups import Brought, GradientGroups, raise_worst
from tinkex.server.workers.lease import Answer, Lease, chain, fail, ignore, lost, new_id
from tinkex.server.workers.splitting import JobPart, joined, part_of, renumbered, split
from tinkex.server.workers.step_times import StepTimes
from tinkex.server.workers.worker import OnEvent, Worker

logger = logging.getLogger(__name__)
PART_S = 0.01
"""Least cost of a pass in parts beside its compute."""
REDUCE_S = 0.05
"""Cost of a step of several members until one was measured."""
JOIN_PASSES = 10
"""A member joins when what it saves in so many passes pays for its coming."""
ALONE_STEPS = 8
"""After so many steps whose passes nobody split, the leader has the adapter for itself again."""
RECENT = 0.3
"""Weight of the newest measurement."""


class PlacementState(Enum):
    """The states of a placement, which say what becomes of a job that is posted."""

    OPEN = "open"
    """Jobs go out as they come."""
    JOINING = "joining"
    """The state is being saved for members that join: passes go out, all else waits."""
    IN_ROUNDS = "in rounds"
    """A step or a save of several members is between its rounds: everything waits."""
    LOST = "lost"
    """No copy is used again: every job fails, and the owner restores the adapter elsewhere."""


@dataclass(slots=True)
class Shared:
    """Settings and measurements that the placements of a pool have in common."""

    groups: GradientGroups | None
    """How members' gradients come together; None: passes are never split."""
    deterministic: bool
    with_model: Callable[[str], Sequence[Worker]]
    """The members of a larger pool that have a base model in memory; others are told to load it."""
    backlog: Backlog = field(default_factory=Backlog)
    """Of training; samples have one of their own (`sample_routing`)."""
    token_s: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Seconds of training a token, measured, by base model and whether there is a backward."""
    seconds: Counter[str] = field(default_factory=Counter)
    """What training took altogether: compute, wait, reduce and transfer."""


class Placement:
    def __init__(
        self, adapter_id: str, leader: Worker, shared: Shared, times: StepTimes | None = None
    ) -> None:
        """`times` are those of the placement that this one follows."""
        self.is_empty = True
        """Whether no job has put the adapter there, or the last one dropped it."""
        self.base_model = ""
        self.leases = [Lease.of(leader)]
        """The members that have the adapter, the leader first."""
        self.times = times or StepTimes()
        self._adapter_id = adapter_id
        self._shared = shared
        self._state = PlacementState.OPEN
        self._task: asyncio.Task[None] | None = None  # of the rounds, or of those who join
        self._queue: deque[tuple[Job, OnEvent | None, Answer]] = deque()
        # Who gathered gradients since the last step, and the virtual shards that stay there.
        self._gathered: dict[Lease, set[int]] = {}
        self._unfit: set[Lease] = set()  # members that could not load the adapter
        self._reduce_s = REDUCE_S
        self._join_s = 0.0
        self._num_alone = 0  # steps in a row whose passes nobody split

    # ------------------------------------------------------------------------ for the pool

    @property
    def leader(self) -> Lease:
        return self.leases[0]

    @property
    def is_lost(self) -> bool:
        """Whether the memory of the adapter is gone.

        Looks after the members: one that shares it, held no gradients and died is let go of.
        """
        if self._state is PlacementState.LOST:
            return True
        dead = [lease for lease in self.leases if not lease.is_valid]
        if not dead:
            return False
        is_needed = self.leader in dead or not self._gathered.keys().isdisjoint(dead)
        if is_needed or self._state is PlacementState.IN_ROUNDS:
            self.give_up()
            return True
        for lease in dead:
            self.leases.remove(lease)
        return False

    def give_up(self) -> None:
        """Use no copy again; free the memory of members that are left."""
        if self._state is PlacementState.LOST:
            return
        self._state = PlacementState.LOST
        self.times.lost()
        self._drop(self.leases)
        while self._queue:
            _, _, answer = self._queue.popleft()
            lost_before = WorkerLostError(f"{self._adapter_id} was lost with a worker")
            lost_before.is_blameless = True  # it was never posted
            fail(answer, lost_before)

    def post(self, job: Job, on_event: OnEvent | None = None) -> Answer:
        """Run a job of the adapter, behind those that were posted before."""
        if self.is_lost:
            return lost(f"{self._adapter_id} was lost with its worker")
        is_pass = isinstance(job, TrainJob)
        waits = self._state is PlacementState.IN_ROUNDS or (
            self._state is PlacementState.JOINING and not is_pass
        )
        is_of_step = isinstance(job, TrainJob | OptimJob)
        if is_of_step:
            self.times.begun()
        if self._queue or waits:
            answer: Answer = asyncio.get_running_loop().create_future()
            self._queue.append((job, on_event, answer))
        else:
            answer = self._run(job, on_event)
        if is_of_step:
            answer.add_done_callback(lambda _: self.times.ended())
        return answer

    def _run(self, job: Job, on_event: OnEvent | None) -> Answer:
        match job:
            case TrainJob():
                return self._train(job, on_event)
            case OptimJob() if len(self.leases) > 1:
                return self._in_rounds(self._step(job))
            case SaveAdapterJob() if job.with_gradients and self._gathered.keys() - {self.leader}:
                return self._in_rounds(self._save(job, on_event))
            case CreateAdapterJob():
                self.base_model = job.base_model
                self._be_alone()
            case LoadAdapterJob():
                self.base_model = job.base_model
                self._be_alone()
                # A snapshot may have brought gradients, which stay where they are until the step.
                self._gathered = {self.leader: set(range(NUM_SHARDS))}
            case DropAdapterJob():
                self._be_alone()
            case OptimJob():
                self._gathered = {}
                self.is_empty = False
                return self._step_alone(job, on_event)
        self.is_empty = isinstance(job, DropAdapterJob)
        return self.leader.post(job, on_event)

    # ------------------------------------------------------------------------ passes

    def _train(self, job: TrainJob, on_event: OnEvent | None) -> Answer:
        if not job.data:  # the engine's to refuse
            return self.leader.post(job, on_event)
        costs = [len(datum.tokens) for datum in job.data]
        parts = self._parts(job, costs)
        leases = [self.leases[part.index] for part in parts]
        if job.backward:
            for lease, part in zip(leases, parts, strict=True):
                self._gathered.setdefault(lease, set()).update(part.shards)
        began = time.perf_counter()
        whole = len(parts) == 1
        answers = [
            lease.post(job if whole else part_of(job, part), on_event)
            for lease, part in zip(leases, parts, strict=True)
        ]
        for lease, part, answer in zip(leases, parts, answers, strict=True):
            self._shared.backlog.add(lease.worker, part.num_tokens, answer)
        if whole:
            answers[0].add_done_callback(partial(self._passed_alone, job.backward, began))
            return answers[0]
        return asyncio.create_task(self._joined(job, parts, answers, began))

    def _parts(self, job: TrainJob, costs: Sequence[int]) -> Sequence[JobPart]:
        """The parts of a pass, by what was measured; may have more members join for later ones."""
        exact, backlog = self._shared.deterministic and job.backward, self._shared.backlog
        pins = {
            shard: self.leases.index(lease)
            for lease, shards in self._gathered.items()
            for shard in shards
        }
        alone = split(costs, [0.0], dict.fromkeys(pins, 0) if exact else None)
        if job.alone and not (exact and any(pins.values())):
            return alone  # one on trial takes one member with it, not several
        helpers = self._shared.with_model(self.base_model)
        if len(self.leases) == 1 and not helpers:
            return alone
        if self._shared.groups is None or (token_s := self._token_s(job.backward)) is None:
            return alone
        loads = [float(backlog.of(lease.worker)) for lease in self.leases]
        parts = split(costs, loads, pins if exact else None)
        saved_s = token_s * _sooner(costs, loads, parts)
        cost_s = PART_S + (0.0 if len(self._gathered) > 1 or not job.backward else self._reduce_s)
        if self._state is PlacementState.OPEN and (new := self._not_here(helpers)):
            all_loads = [*loads, *(float(backlog.of(member)) for member in new)]
            sooner = _sooner(costs, all_loads, split(costs, all_loads, None))
            if token_s * sooner - saved_s > cost_s + self._join_s / JOIN_PASSES:
                self._invite(new)
        if saved_s > cost_s or any(index for index in pins.values()):
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
        self._state = PlacementState.IN_ROUNDS
        self._task = asyncio.create_task(self._finish_rounds(rounds, answer))
        return answer

    async def _finish_rounds(self, rounds: Coroutine[Any, Any, Answer], answer: Answer) -> None:
        try:
            chain(await rounds, answer)
        except Exception as exc:
            fail(answer, exc)
        finally:
            self._reopen()

    def _reopen(self) -> None:
        """Let jobs out again, those that waited first."""
        if self._state is not PlacementState.LOST:
            self._state = PlacementState.OPEN
        while self._queue and self._state is PlacementState.OPEN:
            job, on_event, answer = self._queue.popleft()
            if not answer.done():
                chain(self._run(job, on_event), answer)

    async def _step(self, job: OptimJob) -> Answer:
        """Bring the gathered gradients together; when all members have them, all add and step."""
        began = time.perf_counter()
        holders = [lease for lease in self.leases if lease in self._gathered]
        self._num_alone = 0 if len(holders) > 1 else self._num_alone + 1
        if self._num_alone >= ALONE_STEPS and self._gathered.keys() <= {self.leader}:
            self._be_alone()
            return self._step_alone(job)
        brought, added = Brought(), list[Answer]()
        if holders:
            brought, added = await self._bring()
        stepped = [
            lease.post(replace(job, job_id=f"{job.job_id}/{index}" if index else job.job_id))
            for index, lease in enumerate(self.leases)
        ]
        self._gathered = {}
        is_shared = len(holders) > 1
        return asyncio.create_task(self._stepped(brought, is_shared, added, stepped, began))

    def _step_alone(self, job: OptimJob, on_event: OnEvent | None = None) -> Answer:
        """A step of the leader, which has all gradients: nothing to add up, nothing to bring."""
        answer = self.leader.post(job, on_event)
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
        is_shared: bool,
        added: Sequence[Answer],
        stepped: Sequence[Answer],
        began: float,
    ) -> Result:
        ends = await asyncio.gather(*added, *stepped, return_exceptions=True)
        self._raise_worst(ends)
        result = next(end for end in ends if isinstance(end, OptimResult))
        transfer_s, reduce_s = brought
        reduce_s += max((e.seconds for e in ends if isinstance(e, GradientResult)), default=0.0)
        compute_s = float(result.metrics.get("optim_time_s:sum", 0.0))
        took_s = time.perf_counter() - began
        wait_s = max(0.0, took_s - transfer_s - reduce_s - compute_s)
        if is_shared:
            self._reduce_s += RECENT * (transfer_s + reduce_s - self._reduce_s)
        spent = {"compute": compute_s, "wait": wait_s, "reduce": reduce_s, "transfer": transfer_s}
        self._shared.seconds.update(spent)
        self.times.spent(compute=compute_s, reduce=reduce_s, transfer=transfer_s)
        self.times.stepped()
        more = {f"{name}_time_s:sum": spent[name] for name in ("wait", "reduce", "transfer")}
        return replace(result, metrics={**result.metrics, **more})

    async def _save(self, job: SaveAdapterJob, on_event: OnEvent | None) -> Answer:
        """Bring all gradients to the leader, which saves them with the rest."""
        leader = self.leader
        _, added = await self._bring(to=leader)
        saved = leader.post(job, on_event)
        self._gathered = {leader: set().union(*self._gathered.values())}
        return asyncio.create_task(self._saved(added, saved))

    async def _saved(self, added: Sequence[Answer], saved: Answer) -> Result:
        ends = await asyncio.gather(*added, saved, return_exceptions=True)
        self._raise_worst(ends[:-1])
        return await saved

    async def _bring(self, to: Lease | None = None) -> tuple[Brought, list[Answer]]:
        """Bring gradients to all members; or to one, shard by shard and not added up.

        The answers are those of the jobs that gather them there.
        """
        groups, leases = self._shared.groups, list(self.leases)
        assert groups is not None
        try:
            brought = await groups.bring(self._adapter_id, leases, to)
        except EngineError:
            self.give_up()
            raise
        jobs = [AddGradientJob(job_id=new_id(), adapter_id=self._adapter_id) for _ in leases]
        return brought, [lease.post(job) for lease, job in zip(leases, jobs, strict=True)]

    # ------------------------------------------------------------------------ who shares it

    def _not_here(self, helpers: Sequence[Worker]) -> list[Worker]:
        here, groups = [lease.worker for lease in self.leases], self._shared.groups
        assert groups is not None
        new = [member for member in helpers if member not in here]
        return [m for m in new if (key := Lease.of(m)) not in self._unfit and groups.may_join(key)]

    def _invite(self, new: Sequence[Worker]) -> None:
        """Have more members share the adapter."""
        assert self._shared.groups is not None
        folder = str(self._shared.groups.folder / f"{secrets.token_hex(8)}-join")
        job = SaveAdapterJob(
            job_id=new_id(),
            adapter_id=self._adapter_id,
            folder=folder,
            with_optimizer=True,
            ephemeral=True,
        )
        # Posted now: it is the state before all that is posted from here on.
        saved = self.leader.post(job)
        self._state = PlacementState.JOINING
        self._task = asyncio.create_task(self._join(new, folder, saved))

    async def _join(self, members: Sequence[Worker], folder: str, saved: Answer) -> None:
        began, loaded = time.perf_counter(), list[Answer]()
        try:
            await saved
            for lease in map(Lease.of, () if self._state is PlacementState.LOST else members):
                job = LoadAdapterJob(
                    job_id=new_id(),
                    adapter_id=self._adapter_id,
                    base_model=self.base_model,
                    folder=folder,
                    with_optimizer=True,
                )
                loaded.append(answer := lease.post(job))
                answer.add_done_callback(partial(self._note_load, lease))
                self.leases.append(lease)
        except (EngineError, InvalidInputError) as exc:
            logger.warning("%s is not shared: %s", self._adapter_id, exc)
            self._unfit.update(map(Lease.of, members))
        finally:
            self._reopen()
        await asyncio.gather(*loaded, return_exceptions=True)
        self._join_s = time.perf_counter() - began
        logger.info("%s is shared by %d workers", self._adapter_id, len(self.leases))
        await asyncio.to_thread(shutil.rmtree, folder, True)

    def _note_load(self, lease: Lease, answer: Answer) -> None:
        if answer.cancelled() or answer.exception() is None:
            return
        logger.warning("%s cannot share %s: %s", lease.worker.name, self._adapter_id, answer)
        self._unfit.add(lease)
        if lease in self._gathered:
            self.give_up()
        elif lease in self.leases:
            self.leases.remove(lease)

    def _be_alone(self) -> None:
        """Leave the adapter to its leader; what others gathered is of no use any more."""
        self._drop(self.leases[1:])
        del self.leases[1:]
        self._gathered = {}
        self._num_alone = 0

    def _drop(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if lease.is_valid:
                job = DropAdapterJob(job_id=new_id(), adapter_id=self._adapter_id)
                lease.post(job).add_done_callback(ignore)


def _sooner(costs: Sequence[int], loads: Sequence[float], parts: Sequence[JobPart]) -> float:
    """How many tokens earlier a pass would end in these parts than on the leader alone."""
    return loads[0] + sum(costs) - max(loads[part.index] + part.num_tokens for part in parts)
