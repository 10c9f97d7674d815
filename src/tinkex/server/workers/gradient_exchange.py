"""How the gradients of members that share an adapter come together: in a meeting, or as files.

First everyone puts aside what it gathered, in its engine's turn; that may take as long as the
passes of others before it. Then they meet (`engine.exchange`): gloo or NCCL, beside the engine's
own thread, along the fixed tree of virtual shards. Members that cannot meet, or did not in time,
use files: each writes what it put aside, and each reads all. A meeting changes nothing before
everyone has the sum, so nothing is lost by that, and the bits are the same.

A meeting belongs to a set of members, for as long as each of them lives; a set that changed meets
anew. One sum at a time in a pool: members that are in several meetings have one order for them, and
two cards never wait for each other crosswise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.jobs import (
    LOOPBACK,
    AddGradientJob,
    GradientResult,
    JoinMeetingJob,
    LeaveMeetingJob,
    MeetingResult,
    OpenMeetingJob,
    ReduceGradientJob,
    Result,
    ShareGradientJob,
)
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.workers.lease import Answer, Lease, ignore, new_id

logger = logging.getLogger(__name__)
AGAIN_S = 600.0
"""How long members whose meeting failed use files before they try another one."""
MAX_MEETINGS = 4
"""Each costs sockets, and on a GPU memory; the one that was not used for longest goes."""
GRACE_S = 10.0
"""After one member failed, the others are waited for as long as their deadline and this."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Gradients that wait to be added: everyone runs `job`."""

    adapter_id: str
    files: tuple[str, ...] = ()
    reduced: bool = False
    transfer_s: float = 0.0
    reduce_s: float = 0.0
    num_holders: int = 0

    def job(self) -> AddGradientJob:
        return AddGradientJob(
            job_id=new_id(), adapter_id=self.adapter_id, files=self.files, reduced=self.reduced
        )

    async def remove(self) -> None:
        """Everyone has added them, or nobody will."""
        await _unlink(self.files)


@dataclass(frozen=True, slots=True)
class _Meeting:
    meeting_id: str
    leases: tuple[Lease, ...]
    file: str


class _NoMeetingError(Exception):
    """Nobody is lost, but they could not meet."""


class Exchange:
    def __init__(self, folder: Path, timeout_s: float = 0.0) -> None:
        """`folder` is one that all members reach.

        Args:
            timeout_s: How long members of a meeting wait for each other; 0: they use files.
        """
        self.folder = folder
        self.num_meetings = self.num_by_files = 0
        """Sums that were made so, for tests and metrics."""
        self._timeout_s = timeout_s
        self._meetings: OrderedDict[frozenset[Lease], _Meeting] = OrderedDict()
        self._failed_at: dict[frozenset[Lease], float] = {}
        self._turn = asyncio.Lock()

    @property
    def meets(self) -> bool:
        """Whether members meet at all, or only use files."""
        return self._timeout_s > 0

    async def bring(
        self, adapter_id: str, leases: Sequence[Lease], holders: Sequence[Lease]
    ) -> Brought:
        """Bring what `holders` gathered to all `leases`.

        Raises:
            WorkerLostError: A member is lost, and what it had.
            EngineError: A member failed.
        """
        if not holders:
            return Brought(adapter_id)
        if self._may_meet(leases):
            # Everyone, so that one that is still loading the adapter keeps nobody waiting later.
            await self._put_aside(adapter_id, leases, [None] * len(leases))
            try:
                async with self._turn:
                    return await self._reduce(adapter_id, leases, len(holders))
            except _NoMeetingError as exc:
                self._failed_at[frozenset(leases)] = time.monotonic()
                logger.warning("workers that share %s use files: %s", adapter_id, exc)
        return await self.bring_files(adapter_id, holders)

    async def bring_files(self, adapter_id: str, holders: Sequence[Lease]) -> Brought:
        """Have members write what they gathered; gives the files, in the order of the members."""
        name = secrets.token_hex(8)
        files = tuple(str(self.folder / f"{name}-{i}.grad") for i in range(len(holders)))
        try:
            shared = await self._put_aside(adapter_id, holders, files)
        except BaseException:
            await _unlink(files)
            raise
        self.num_by_files += 1
        seconds = max((one.seconds for one in shared), default=0.0)
        return Brought(adapter_id, files, transfer_s=seconds, num_holders=len(holders))

    async def _put_aside(
        self, adapter_id: str, holders: Sequence[Lease], files: Sequence[str | None]
    ) -> list[GradientResult]:
        answers = [
            lease.post(ShareGradientJob(job_id=new_id(), adapter_id=adapter_id, file=file))
            for lease, file in zip(holders, files, strict=True)
        ]
        ends = await asyncio.gather(*answers, return_exceptions=True)
        raise_worst(ends)
        return [end for end in ends if isinstance(end, GradientResult)]

    # ------------------------------------------------------------------------ meetings

    def _may_meet(self, leases: Sequence[Lease]) -> bool:
        if not self.meets or len(leases) < 2:
            return False
        failed_at = self._failed_at.get(frozenset(leases))
        return failed_at is None or time.monotonic() - failed_at > AGAIN_S

    async def _reduce(self, adapter_id: str, leases: Sequence[Lease], num_holders: int) -> Brought:
        self._forget_lost()
        key = frozenset(leases)
        meeting = self._meetings.get(key) or await self._form(leases)
        self._meetings[key] = meeting
        self._meetings.move_to_end(key)
        while len(self._meetings) > MAX_MEETINGS:
            self._leave(next(iter(self._meetings)))
        answers = [
            lease.post(
                ReduceGradientJob(
                    job_id=new_id(), adapter_id=adapter_id, meeting_id=meeting.meeting_id
                )
            )
            for lease in leases
        ]
        try:
            ends = await self._together(leases, answers)
        except BaseException:
            self._leave(key)
            raise
        self.num_meetings += 1
        seconds = max((end.seconds for end in ends if isinstance(end, GradientResult)), default=0.0)
        return Brought(adapter_id, reduced=True, reduce_s=seconds, num_holders=num_holders)

    async def _form(self, leases: Sequence[Lease]) -> _Meeting:
        """Have members meet: on this machine at a file, elsewhere at the first one's address."""
        meeting_id = secrets.token_hex(16)
        hosts = [lease.worker.address or LOOPBACK for lease in leases]
        file = ""
        if all(not lease.worker.address for lease in leases):
            file = str(self.folder / f"{meeting_id}.meet")
            place = f"file:{file}"
        else:
            opening = OpenMeetingJob(job_id=new_id(), meeting_id=meeting_id, host=hosts[0])
            (opened,) = await self._together(leases, [leases[0].post(opening)])
            assert isinstance(opened, MeetingResult)
            place = opened.place
        meeting = _Meeting(meeting_id, tuple(leases), file)
        answers = [
            lease.post(
                JoinMeetingJob(
                    job_id=new_id(),
                    meeting_id=meeting_id,
                    rank=rank,
                    size=len(leases),
                    place=place,
                    host=hosts[rank],
                    timeout_s=self._timeout_s,
                )
            )
            for rank, lease in enumerate(leases)
        ]
        try:
            await self._together(leases, answers)
        except BaseException:
            self._end(meeting)
            raise
        logger.info("%d workers meet to add up gradients", len(leases))
        return meeting

    async def _together(self, leases: Sequence[Lease], answers: Sequence[Answer]) -> list[Result]:
        """What all said. Each keeps its own deadline; who does not is not waited for."""
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
            raise next(iter(lost), WorkerLostError("a worker died in a meeting"))
        if errors:
            raise _NoMeetingError(str(errors[0])) from errors[0]
        return ends

    def _forget_lost(self) -> None:
        for key, meeting in list(self._meetings.items()):
            if not all(lease.is_valid for lease in meeting.leases):
                self._leave(key)
        now = time.monotonic()
        self._failed_at = {k: at for k, at in self._failed_at.items() if now - at <= AGAIN_S}

    def _leave(self, key: frozenset[Lease]) -> None:
        if (meeting := self._meetings.pop(key, None)) is not None:
            self._end(meeting)

    def _end(self, meeting: _Meeting) -> None:
        for lease in meeting.leases:
            if lease.is_valid:
                job = LeaveMeetingJob(job_id=new_id(), meeting_id=meeting.meeting_id)
                lease.post(job).add_done_callback(ignore)
        if meeting.file:
            with contextlib.suppress(OSError):
                Path(meeting.file).unlink()


def raise_worst(ends: Iterable[Result | BaseException]) -> None:
    """Raise the error that says most, if there is one: a loss is often that of another's error."""
    errors = [end for end in ends if isinstance(end, BaseException)]
    final = [error for error in errors if not isinstance(error, WorkerLostError)]
    if errors:
        raise next(iter(final), errors[0])


async def _unlink(files: Iterable[str]) -> None:
    def unlink() -> None:
        for file in files:
            with contextlib.suppress(OSError):
                Path(file).unlink()

    await asyncio.to_thread(unlink)
