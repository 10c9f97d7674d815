"""Several workers that act as one: every member holds the base model and does every kind of job.

An adapter has a placement (`placement`): one member, or several that share its passes. Samples go
to any member, because a checkpoint's folder can be read by all (`sample_routing`). A member that
dies or hangs replaces itself; until then the pool is what is left. It restores nothing: a placement
whose memory is gone is lost, its owner sees that and restores the adapter in a new one.

The pool knows jobs and members. It knows nothing of tensors, and nothing of processes or machines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tinkex.engine.jobs import (
    AdapterJob,
    DescribeModelJob,
    Job,
    LoadModelJob,
    Result,
    SampleJob,
)
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.workers.gradient_groups import GradientGroups
from tinkex.server.workers.lease import Lease, lost
from tinkex.server.workers.placement import Placement, Shared
from tinkex.server.workers.sample_routing import Router
from tinkex.server.workers.worker import OnEvent, Worker

logger = logging.getLogger(__name__)


class Pool:
    """See `Worker`. Its generation counts the losses of all members together."""

    address: str = ""
    num_nodes = 1
    """Machines that have members."""
    num_left_out = 0
    """Machines of its cluster that cannot have one."""

    def __init__(
        self,
        members: Sequence[Worker],
        *,
        name: str = "the pool",
        rendezvous: Path | None = None,
        deterministic: bool = False,
        all_reduce_timeout_s: float = 30.0,
    ) -> None:
        """`rendezvous` is a folder that all members reach; without it no pass is split.

        Args:
            all_reduce_timeout_s: How long members that add up gradients wait for each other; 0: no
                pass is split.
        """
        if not members:
            raise ValueError("a pool needs at least one member")
        self.name = name if len(members) > 1 else members[0].name
        self.members = list(members)
        self.groups: GradientGroups | None = None
        if rendezvous is not None and all_reduce_timeout_s > 0:
            self.groups = GradientGroups(rendezvous, all_reduce_timeout_s)
        self._shared = Shared(self.groups, deterministic, self._with_model)
        self._placements: dict[str, Placement] = {}
        self._loaded: dict[tuple[Lease, str], bool] = {}  # base models by member: asked for, there
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
        # Off the list before it closes, so that no adapter is placed there meanwhile.
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

    @property
    def held_bytes(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for member in self.members:
            held.update(member.held_bytes)
        return dict(held)

    @property
    def utilisation(self) -> float:
        return sum(member.utilisation for member in self.members) / self.size

    async def start(self) -> None:
        self._is_started = True
        if self.groups is not None:
            await asyncio.to_thread(_make_empty, self.groups.folder)
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

    def let_go(self, adapter_id: str) -> None:
        """Nobody will ask for this adapter for a while: remember nothing of it."""
        placement = self._placements.get(adapter_id)
        if placement is not None and (placement.is_empty or placement.is_lost):
            del self._placements[adapter_id]

    def post(self, job: Job, on_event: OnEvent | None = None) -> asyncio.Future[Result]:
        if not (ready := self.ready):
            return lost(f"{self.name}: no member takes jobs")
        if isinstance(job, SampleJob):
            return self._router.post(job, self._with_model(job.base_model) or ready, on_event)
        if isinstance(job, DescribeModelJob | LoadModelJob):
            return ready[0].post(job, on_event)
        assert isinstance(job, AdapterJob), "members form process groups, not the pool"
        return self.place(job.adapter_id).post(job, on_event)

    def cancel(self, job_id: str) -> None:
        for member in self.ready:
            member.cancel(job_id)

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    # ------------------------------------------------------------------------ placements

    def place(self, adapter_id: str) -> Placement:
        """The placement of an adapter; a new and empty one if it has none, or lost it.

        Raises:
            WorkerLostError: No member is ready.
        """
        before = self._placements.get(adapter_id)
        if before is not None and not before.is_lost:
            return before
        self._placements.pop(adapter_id, None)
        if not (ready := self.ready):
            raise WorkerLostError(f"{self.name}: no member takes jobs")
        placements = self._placements.values()
        taken = Counter(
            placement.leader.worker for placement in placements if not placement.is_empty
        )
        leader = min(ready, key=taken.__getitem__)
        times = None if before is None else before.times
        placement = Placement(adapter_id, leader, self._shared, times)
        self._placements[adapter_id] = placement
        return placement

    def _with_model(self, base_model: str) -> list[Worker]:
        """The members that have a base model in memory, of several.

        The others are told to load it; nobody waits for them.
        """
        if len(self.members) == 1:
            return []
        there = []
        for member in self.ready:
            key = (Lease.of(member), base_model)
            if key not in self._loaded:
                self._loaded = {k: v for k, v in self._loaded.items() if self._has(k[0])}
                self._loaded[key] = False
                job = LoadModelJob(job_id=f"load-{secrets.token_hex(8)}", base_model=base_model)
                member.post(job).add_done_callback(partial(self._note_loaded, key))
            if self._loaded[key]:
                there.append(member)
        return there

    def _has(self, lease: Lease) -> bool:
        return lease.worker in self.members and lease.generation == lease.worker.generation

    def _note_loaded(self, key: tuple[Lease, str], answer: asyncio.Future[Result]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            if key in self._loaded:
                self._loaded[key] = True

    def times_of(self, adapter_id: str) -> Mapping[str, float]:
        """Seconds of a step of an adapter by phase, over the last ones; empty before the first."""
        placement = self._placements.get(adapter_id)
        return {} if placement is None else placement.times.average

    def members_of(self, adapter_id: str) -> list[Worker]:
        """The members that have an adapter in memory, its leader first."""
        placement = self._placements.get(adapter_id)
        if placement is None or placement.is_empty:
            return []
        return [lease.worker for lease in placement.leases]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of training since the start: compute, wait, reduce and transfer."""
        return self._shared.seconds


def _make_empty(folder: Path) -> None:
    """Remove what an earlier server left in a folder, which may be a mount or a link."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
