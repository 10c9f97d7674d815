"""How the gradients of members that share an adapter come together: in process groups.

First every member puts aside what it gathered, in its engine's turn; that may take as long as the
passes of others before it. Then they are added up beside the engines' own threads
(`engine.all_reduce`), along the fixed tree of virtual shards. Nothing changes before all members
have the sum. Members that cannot reach each other, or keep each other waiting for too long, give
the placement up, which costs a replay and no bit, and share nothing for a while.

A process group belongs to a set of members, for as long as each of them lives; a set that changed
forms a new one. One sum at a time in a pool: members that are in several groups have one order for
them, and two cards never wait for each other crosswise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tinkex.engine.jobs import (
    LOOPBACK,
    GradientResult,
    JoinGroupJob,
    LeaveGroupJob,
    OpenStoreJob,
    ReduceGradientJob,
    Result,
    ShareGradientJob,
    StoreResult,
)
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.workers.lease import Answer, Lease, ignore, new_id

logger = logging.getLogger(__name__)
AGAIN_S = 600.0
"""How long members whose process group failed are asked to share nothing."""
MAX_GROUPS = 4
"""Each costs sockets, and on a GPU memory; the one that was not used for longest goes."""
GRACE_S = 10.0
"""After one member failed, the others are waited for as long as their deadline and this."""


@dataclass(frozen=True, slots=True)
class _Group:
    group_id: str
    leases: tuple[Lease, ...]
    file: str


class Brought(NamedTuple):
    """Seconds that the gradients of several members took on their way."""

    transfer_s: float = 0.0
    """Until all had put theirs aside."""
    reduce_s: float = 0.0
    """Until all had the sum."""


class GradientGroups:
    def __init__(self, folder: Path, timeout_s: float) -> None:
        """`folder` is one that all members of this machine reach.

        Args:
            timeout_s: How long the members of a group wait for each other.
        """
        self.folder = folder
        self.num_sums = 0
        """Sums that were made, for tests."""
        self._timeout_s = timeout_s
        self._groups: OrderedDict[frozenset[Lease], _Group] = OrderedDict()
        self._failed_at: dict[Lease, float] = {}
        self._turn = asyncio.Lock()

    def may_join(self, lease: Lease) -> bool:
        """Whether a member may share adapters: no process group of it failed lately."""
        failed_at = self._failed_at.get(lease)
        return failed_at is None or time.monotonic() - failed_at > AGAIN_S

    async def bring(
        self, adapter_id: str, leases: Sequence[Lease], to: Lease | None = None
    ) -> Brought:
        """Bring the sum of all gradients to all members; or all shards to one, not added up.

        Each member has to run an `AddGradientJob` then.

        Raises:
            WorkerLostError: A member is lost and what it had, or they could not come together.
            EngineError: A member failed.
        """
        # All members, so that one that is still loading the adapter keeps nobody waiting later.
        jobs = [ShareGradientJob(job_id=new_id(), adapter_id=adapter_id) for _ in leases]
        answers = [lease.post(job) for lease, job in zip(leases, jobs, strict=True)]
        ends = await asyncio.gather(*answers, return_exceptions=True)
        raise_worst(ends)
        async with self._turn:
            reduce_s = await self._reduce(adapter_id, leases, to)
        return Brought(_longest(ends), reduce_s)

    async def _reduce(self, adapter_id: str, leases: Sequence[Lease], to: Lease | None) -> float:
        self._forget_lost()
        key = frozenset(leases)
        group = self._groups.get(key) or await self._form(leases)
        self._groups[key] = group
        self._groups.move_to_end(key)
        while len(self._groups) > MAX_GROUPS:
            self._leave(next(iter(self._groups)))
        root = None if to is None else group.leases.index(to)
        job = ReduceGradientJob(
            job_id="", adapter_id=adapter_id, group_id=group.group_id, root=root
        )
        answers = [lease.post(replace(job, job_id=new_id())) for lease in group.leases]
        try:
            ends = await self._all(leases, answers)
        except BaseException:
            self._leave(key)
            raise
        self.num_sums += 1
        return _longest(ends)

    async def _form(self, leases: Sequence[Lease]) -> _Group:
        """Have members form a group: on this machine at a file, elsewhere where the first is."""
        group_id = secrets.token_hex(16)
        hosts = [lease.worker.address or LOOPBACK for lease in leases]
        file = ""
        if all(not lease.worker.address for lease in leases):
            file = str(self.folder / f"{group_id}.group")
            address = f"file:{file}"
        else:
            opening = OpenStoreJob(job_id=new_id(), group_id=group_id, host=hosts[0])
            (opened,) = await self._all(leases, [leases[0].post(opening)])
            assert isinstance(opened, StoreResult)
            address = opened.address
        group = _Group(group_id, tuple(leases), file)
        answers = [
            lease.post(
                JoinGroupJob(
                    job_id=new_id(),
                    group_id=group_id,
                    rank=rank,
                    size=len(leases),
                    address=address,
                    host=hosts[rank],
                    timeout_s=self._timeout_s,
                )
            )
            for rank, lease in enumerate(leases)
        ]
        try:
            await self._all(leases, answers)
        except BaseException:
            self._end(group)
            raise
        logger.info("%d workers form a process group to add up gradients", len(leases))
        return group

    async def _all(self, leases: Sequence[Lease], answers: Sequence[Answer]) -> list[Result]:
        """The results of all. Members keep their own deadlines; one that does not is given up."""
        _, left = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        if left:
            _, left = await asyncio.wait(left, timeout=self._timeout_s + GRACE_S)
        for answer in left:
            answer.cancel()
        ends: list[Result] = []
        errors: list[BaseException] = []
        for answer in answers:
            if answer in left or answer.cancelled():
                errors.append(EngineError("a worker did not answer"))
            elif (error := answer.exception()) is not None:
                errors.append(error)
            else:
                ends.append(answer.result())
        lost = [error for error in errors if isinstance(error, WorkerLostError)]
        if lost or not all(lease.is_valid for lease in leases):
            raise next(iter(lost), WorkerLostError("a worker died in a process group"))
        if errors:
            self._failed_at.update(dict.fromkeys(leases, time.monotonic()))
            logger.warning("workers could not add up gradients, and share none: %s", errors[0])
            # The owner restores the adapter from the journal; no request of it is to blame.
            failure = WorkerLostError(f"workers could not add up gradients: {errors[0]}")
            failure.is_blameless = True
            raise failure from errors[0]
        return ends

    def _forget_lost(self) -> None:
        for key, group in list(self._groups.items()):
            if not all(lease.is_valid for lease in group.leases):
                self._leave(key)
        self._failed_at = {k: at for k, at in self._failed_at.items() if not self.may_join(k)}

    def _leave(self, key: frozenset[Lease]) -> None:
        if (group := self._groups.pop(key, None)) is not None:
            self._end(group)

    def _end(self, group: _Group) -> None:
        for lease in group.leases:
            if lease.is_valid:
                job = LeaveGroupJob(job_id=new_id(), group_id=group.group_id)
                lease.post(job).add_done_callback(ignore)
        if group.file:
            with contextlib.suppress(OSError):
                Path(group.file).unlink()


def _longest(ends: Iterable[Result | BaseException]) -> float:
    return max((end.seconds for end in ends if isinstance(end, GradientResult)), default=0.0)


def raise_worst(ends: Iterable[Result | BaseException]) -> None:
    """Raise the error that says most, if there is one: a loss is often that of another's error."""
    errors = [end for end in ends if isinstance(end, BaseException)]
    final = [error for error in errors if not isinstance(error, WorkerLostError)]
    if errors:
        raise next(iter(final), errors[0])
