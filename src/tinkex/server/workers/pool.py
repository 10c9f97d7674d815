"""Several workers that act as one: every member holds the base model and does every kind of job.

An adapter lives on one member, its home, and its jobs run there in order. Samples go to any member,
because a checkpoint's folder can be read by all (`routing`). A member that dies or hangs replaces
itself; until then the pool is what is left. It restores nothing: an adapter whose home was lost has
a new generation, its owner sees that and restores it, on a member that is there.

The pool knows jobs and members. It knows nothing of tensors, and nothing of processes or machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkex.engine.jobs import DescribeModelJob, DropAdapterJob, Job, Result, SampleJob
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.workers.routing import Router
from tinkex.server.workers.worker import OnEvent, Worker

logger = logging.getLogger(__name__)
MAX_EMPTY = 4096
"""Homes of adapters that were dropped, kept in case they come back."""


@dataclass(slots=True)
class _Home:
    """Where an adapter lives."""

    generation: int
    member: Worker
    member_generation: int
    is_empty: bool = True

    @property
    def is_lost(self) -> bool:
        return not self.member.is_ready or self.member.generation != self.member_generation


class Pool:
    """See `Worker`. Its generation counts the losses of all members together."""

    num_nodes = 1
    """Machines that have members."""
    num_left_out = 0
    """Machines of its cluster that cannot have one."""

    def __init__(self, members: Sequence[Worker], *, name: str = "the pool") -> None:
        if not members:
            raise ValueError("a pool needs at least one member")
        self.name = name if len(members) > 1 else members[0].name
        self.members = list(members)
        self._homes: dict[str, _Home] = {}
        self._num_homes = 0
        self._router = Router()
        self._watchers: list[Callable[[], None]] = []
        self._is_started = False

    # ------------------------------------------------------------------------ members

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def ready(self) -> list[Worker]:
        """The members that take jobs."""
        return [member for member in self.members if member.is_ready]

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    def watch(self, on_resize: Callable[[], None]) -> None:
        """Be told whenever the number of members changes."""
        self._watchers.append(on_resize)

    async def add(self, member: Worker) -> None:
        """Grow by a member, which is started when the pool is and used as soon as it is ready."""
        self.members.append(member)
        if self._is_started:
            await member.start()
        self._resized()

    async def remove(self, member: Worker) -> None:
        """Shrink by a member; what it held is lost, as if it had died. The last one stays."""
        if len(self.members) == 1:
            raise ValueError("a pool keeps at least one member")
        self.members.remove(member)
        await member.close()
        self._resized()

    def _resized(self) -> None:
        logger.info("%s has %d members", self.name, self.size)
        for tell in self._watchers:
            tell()

    # ------------------------------------------------------------------------ Worker

    @property
    def generation(self) -> int:
        return sum(member.generation for member in self.members)

    @property
    def refusal(self) -> str:
        return next((member.refusal for member in self.members if member.refusal), "")

    @property
    def is_ready(self) -> bool:
        return any(member.is_ready for member in self.members)

    @property
    def is_moving(self) -> bool:
        return any(member.is_ready and member.is_moving for member in self.members)

    async def start(self) -> None:
        self._is_started = True
        for member in self.members:
            await member.start()

    async def wait_ready(self) -> None:
        """Wait for the first member that is ready; the others may come later."""
        if self.is_ready:
            return
        waits = {asyncio.create_task(member.wait_ready()) for member in self.members}
        errors: list[BaseException] = []
        try:
            left = waits
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                failed = [task.exception() for task in done]
                if None in failed:
                    return
                errors += [error for error in failed if error is not None]
        finally:
            for task in waits:
                task.cancel()
        raise EngineError(str(errors[0])) from errors[0]

    def generation_of(self, adapter_id: str) -> int:
        home = self._home(adapter_id)
        return 0 if home is None else home.generation

    def post(
        self, job: Job, on_event: OnEvent | None = None, *, generation: int | None = None
    ) -> asyncio.Future[Result]:
        if not self.is_ready:
            return self._lost("no member takes jobs")
        if isinstance(job, SampleJob):
            return self._router.post(job, self.ready, on_event)
        if isinstance(job, DescribeModelJob):
            return self.ready[0].post(job, on_event)
        home = self._home(job.adapter_id)
        if home is None or generation not in (None, home.generation):
            return self._lost(f"{job.adapter_id} was lost with its worker")
        home.is_empty = isinstance(job, DropAdapterJob)
        return home.member.post(job, on_event, generation=home.member_generation)

    def cancel(self, job_id: str) -> None:
        for member in self.ready:
            member.cancel(job_id)

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    # ------------------------------------------------------------------------ homes

    def _home(self, adapter_id: str) -> _Home | None:
        """Where an adapter lives, or would; None when no member is ready."""
        home = self._homes.get(adapter_id)
        if home is not None and not home.is_lost:
            return home
        self._homes.pop(adapter_id, None)
        if not (ready := self.ready):
            return None
        taken = Counter(id(home.member) for home in self._homes.values() if not home.is_empty)
        member = min(ready, key=lambda member: taken[id(member)])
        self._num_homes += 1
        home = self._homes[adapter_id] = _Home(self._num_homes, member, member.generation)
        self._forget_empty()
        return home

    def _forget_empty(self) -> None:
        if len(self._homes) > 2 * MAX_EMPTY:
            empty = [name for name, home in self._homes.items() if home.is_empty]
            for name in empty[: max(0, len(empty) - MAX_EMPTY)]:
                del self._homes[name]

    def _lost(self, reason: str) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        future.set_exception(WorkerLostError(f"{self.name}: {reason}"))
        return future
