"""The members of a group, and what they tell each other in the middle of a pass.

A group is k processes with a device each that hold one base model together. All of them run the
same code on the same inputs; where a tensor is cut, they meet in a collective (`exchange.meeting`),
which has a deadline. A member that dies or hangs can leave the others with half of a sum, so there
is nothing to go on from: the process says what happened and ends, and whoever supervises the group
starts it again. One thing is forgiven: a member that lives and cannot finish a training pass, for
want of memory, gives the pass up; all others then do too, and they meet anew (`attempt`).

`enter` and `leave` are the two edges of a block of cut linears. Behind `enter` every member has all
of the input and computes its part; `leave` adds the parts up. In the backward pass the roles
change: `enter` adds up, `leave` hands on.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tinkex.engine.exchange.meeting import Meeting, MeetingLost, meet
from tinkex.engine.numerics.memory_in_use import is_out_of_memory

T = TypeVar("T")
log = logging.getLogger(__name__)
LOST = 75
"""The exit code of a member that lost the others (EX_TEMPFAIL: try again)."""
MAX_MEMBERS = 16
_TROUBLE_BYTES = 512


def end(text: str) -> NoReturn:
    """Say why and end the process at once: other threads may wait for a member that is gone."""
    log.error("the group ends: %s", text)
    logging.shutdown()
    os._exit(LOST)


@dataclass(slots=True)
class Group:
    """This process's place in a group that was formed; see `form`."""

    meeting: Meeting
    exact: bool = False
    """Sums are added in the order of the members, so that a row's bits never depend on the size of
    the tensor it is in."""
    num_meetings: int = 0
    """Collectives so far. Equal for all members between two calls, or the group is broken."""
    on_loss: Callable[[str], NoReturn] = end
    place: str = ""
    """Where they met first; they meet anew beside it."""
    num_regroups: int = 0
    on_trouble: Callable[[int], None] = lambda num_regroups: None
    """Tells the others that this one gives up a pass."""
    is_forgiving: bool = False
    """A collective that fails is raised (`MeetingLost`) when it may be for want of memory."""

    @property
    def rank(self) -> int:
        return self.meeting.rank

    @property
    def size(self) -> int:
        return self.meeting.size

    @property
    def device(self) -> torch.device:
        return self.meeting.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # ------------------------------------------------------------------------------ collectives

    def sum(self, part: Tensor) -> Tensor:
        """The members' tensors, added up; the same bits for all. `part` may be overwritten."""
        part = part.contiguous()
        if self.exact:
            first, *others = self.parts(part)
            for other in others:
                first += other
            return first
        self._meet(self.meeting.sum, part)
        return part

    def largest(self, part: Tensor) -> Tensor:
        """Number by number the largest of the members'. `part` may be overwritten."""
        part = part.contiguous()
        self._meet(self.meeting.largest, part)
        return part

    def parts(self, part: Tensor) -> list[Tensor]:
        """The tensors of all members, which have one shape, in their order."""
        return self._meet(self.meeting.parts, part.contiguous())

    def to_leader(self, part: Tensor) -> list[Tensor]:
        """As `parts`, for the leader; the others get nothing."""
        return self._meet(self.meeting.to_first, part.contiguous())

    def same(self, value: Tensor) -> Tensor:
        """The leader's tensor, for all. Overwrites `value` of the others."""
        value = value.contiguous()
        self._meet(self.meeting.same, value)
        return value

    def least(self, number: int) -> int:
        """The smallest of the members' numbers: what all of them have room for."""
        low = torch.tensor([-number], dtype=torch.int64, device=self.device)
        return -int(self.largest(low))

    def all_agree(self, flag: bool) -> bool:
        """Whether it is true for all."""
        return bool(self.least(int(flag)))

    def _meet(self, collective: Callable[[Tensor], T], part: Tensor) -> T:
        try:
            result = collective(part)
        except MeetingLost as exc:
            if self.is_forgiving and not exc.is_late:
                raise
            self.on_loss(str(exc))
        self.num_meetings += 1
        return result

    # ------------------------------------------------------------------------- when one gives up

    @contextlib.contextmanager
    def forgiving(self, is_forgiving: bool = True) -> Iterator[None]:
        before, self.is_forgiving = self.is_forgiving, is_forgiving
        try:
            yield
        finally:
            self.is_forgiving = before

    def finish(self) -> None:
        """Wait until all have finished a pass; from here on none can give it up.

        Raises:
            MeetingLost: One has given it up.
        """
        self.all_agree(True)  # read on the host, so that what it waited for is over
        self.meeting.check()

    def attempt(self, work: Callable[[], T], give_up: Callable[[], None]) -> tuple[T | None, str]:
        """Do what may find no memory here or elsewhere, up to a `finish` that all come to.

        Gives what came of it; or None and why one of the members could not, the same for all.
        `give_up` is called before they meet anew.
        """
        trouble = ""
        try:
            with self.forgiving():
                return work(), ""
        except MeetingLost:
            pass  # another one gave up, and says why
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            trouble = f"member {self.rank} of the group: {exc}"
        give_up()
        with self.forgiving(False):
            troubles = [text for text in self._regroup(trouble) if text]
        if not troubles:
            self.on_loss("the members lost each other, and none knows why")
        return None, troubles[0]

    def any_trouble(self, trouble: str) -> str:
        """The first member's trouble, the same for all; empty when none has any."""
        said = self._told(f"member {self.rank} of the group: {trouble}" if trouble else "")
        return next(filter(None, said), "")

    def _regroup(self, trouble: str) -> list[str]:
        """Meet anew after a pass that was given up; gives everybody's trouble, by rank."""
        if trouble:
            self.on_trouble(self.num_regroups)
        before, self.num_regroups = self.meeting, self.num_regroups + 1
        before.close()
        try:
            self.meeting = meet(
                before.rank,
                before.size,
                before.device,
                f"file:{self.place}-{self.num_regroups}",
                timeout_s=before.timeout_s,
                waits=False,
            )
        except MeetingLost as exc:
            self.on_loss(str(exc))
        self.num_meetings = -self.least(-self.num_meetings)  # they were not at the same point
        return self._told(trouble)

    def _told(self, trouble: str) -> list[str]:
        """What each member says, by rank."""
        text = trouble.encode()[:_TROUBLE_BYTES].ljust(_TROUBLE_BYTES, b" ")
        said = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        every = [bytes(row.cpu().numpy()) for row in self.parts(said)]
        return [row.decode(errors="replace").strip() for row in every]

    def hear_trouble(self, num_regroups: int) -> None:
        """Another one gives up the pass. Called from another thread than the one that computes."""
        if num_regroups == self.num_regroups:
            self.meeting.break_off()

    # ----------------------------------------------------------------------- edges of a block

    def enter(self, x: Tensor) -> Tensor:
        """`x` itself; its gradients, of which each member has a part, are added up."""
        if torch.is_grad_enabled() and x.requires_grad:
            entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
            return entered
        return x

    def leave(self, part: Tensor) -> Tensor:
        """The sum of the members' parts; its gradient goes to each as it is."""
        if torch.is_grad_enabled() and part.requires_grad:
            left: Tensor = _Leave.apply(part, self)  # type: ignore[no-untyped-call]
            return left
        return self.sum(part)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return ctx.group.sum(dx.clone()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.sum(part.clone())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


def form(
    rank: int, size: int, device: torch.device, meeting_place: str, *, exact: bool, timeout_s: float
) -> Group:
    """Join a group whose members all name the same new file, which only they can reach.

    Blocks until all are there, at most for `timeout_s`.
    """
    # A wait on the host for each sum would cost more than the sum: on CUDA the device waits.
    place = f"file:{meeting_place}"
    meeting = meet(rank, size, device, place, timeout_s=timeout_s, waits=False)
    return Group(meeting, exact, place=meeting_place)
