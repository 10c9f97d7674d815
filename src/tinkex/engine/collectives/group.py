"""The group of processes that hold one base model together, as a value.

A group is k processes with a device each. All of them run the same code on the same inputs; where
a tensor is sharded they come together in a collective. Most bases fit one device: a group of one
does nothing, so decoder, trainer and sampler have one code for both.

A rank that dies or hangs can leave the others with half of a sum, so there is nothing to go on
from: the process says what happened and ends, and the supervisor of the group starts it again. One
thing is recoverable: a rank that lives and cannot finish a pass, for want of memory, gives the pass
up; all others then do too, and they form a new process group (`attempt`).

`enter` and `leave` are the two edges of a block of sharded linears. Behind `enter` every rank has
all of the input and computes its part; `leave` adds the parts up. In the backward pass the roles
change: `enter` adds up, `leave` hands on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from tinkex.engine.collectives.process_group import PeerLost, ProcessGroup, join
from tinkex.engine.numerics.memory_in_use import is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)
LOST = 75
"""The exit code of a rank that lost the others (EX_TEMPFAIL: try again)."""
MAX_MEMBERS = 16
_REASON_BYTES = 512


def end(text: str) -> NoReturn:
    """Say why and end the process at once: other threads may wait for a rank that is gone."""
    log.error("the group ends: %s", text)
    logging.shutdown()
    os._exit(LOST)


class Followers(Protocol):
    """The other ranks, as the leader reaches them to have a call made by all."""

    def call(
        self, on: object, method: str, *args: Any, patient: bool = False
    ) -> contextlib.AbstractContextManager[None]: ...

    def make(
        self, on: object, method: str, *args: Any, make: Callable[[], T], patient: bool = False
    ) -> T: ...


@dataclass(slots=True)
class Group:
    """A rank of a group that was formed (`form`), or a group of one."""

    processes: ProcessGroup | None = None
    """None: a group of one."""
    exact: bool = False
    """Sums are added in the order of ranks, so that a row's bits never depend on the size of the
    tensor it is in."""
    num_collectives: int = 0
    """So far. Equal for all ranks between two calls, or the group is broken."""
    followers: Followers | None = None
    """The leader's; None for followers, and in a group of one."""
    on_loss: Callable[[str], NoReturn] = end
    file: str = ""
    """Where the ranks found each other first; after a failed pass they do so beside it."""
    num_regroups: int = 0
    on_abandon: Callable[[int], None] = lambda num_regroups: None
    """Tells the others that this rank gives up a pass."""
    is_recoverable: bool = False
    """A collective that fails is raised (`PeerLost`) when it may be for want of memory."""

    @property
    def rank(self) -> int:
        return 0 if self.processes is None else self.processes.rank

    @property
    def size(self) -> int:
        return 1 if self.processes is None else self.processes.size

    @property
    def device(self) -> torch.device:
        assert self.processes is not None, "a group of one computes wherever its decoder is"
        return self.processes.device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()

    # ------------------------------------------------------------------------------ collectives

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits for all. `part` may be overwritten."""
        if self.processes is None:
            return part
        part = part.contiguous()
        if self.exact:
            first, *others = self.all_gather(part)
            for other in others:
                first += other
            return first
        self._run(self.processes.all_reduce, part)
        return part

    def all_reduce_max(self, part: Tensor) -> Tensor:
        """Number by number the largest of all ranks'. `part` may be overwritten."""
        if self.processes is None:
            return part
        part = part.contiguous()
        self._run(self.processes.all_reduce_max, part)
        return part

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks."""
        if self.processes is None:
            return [part]
        return self._run(self.processes.all_gather, part.contiguous())

    def gather(self, part: Tensor) -> list[Tensor]:
        """As `all_gather`, for the leader; the others get nothing."""
        if self.processes is None:
            return [part]
        return self._run(self.processes.gather, part.contiguous())

    def broadcast(self, value: Tensor) -> Tensor:
        """The leader's tensor, for all. Overwrites `value` of the others."""
        if self.processes is None:
            return value
        value = value.contiguous()
        self._run(self.processes.broadcast, value)
        return value

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers, such as what all of them have room for."""
        if self.processes is None:
            return number
        negated = torch.tensor([-number], dtype=torch.int64, device=self.device)
        return -int(self.all_reduce_max(negated))

    def all_true(self, flag: bool) -> bool:
        return bool(self.smallest(int(flag)))

    def _run(self, collective: Callable[[Tensor], T], part: Tensor) -> T:
        try:
            result = collective(part)
        except PeerLost as exc:
            if self.is_recoverable and not exc.is_late:
                raise
            self.on_loss(str(exc))
        self.num_collectives += 1
        return result

    # -------------------------------------------------------------------- calls of every rank

    def call(
        self, on: object, method: str, *args: Any, patient: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Around what every rank does: the leader tells its followers to call `method` first.

        With `patient`, it ends when the followers' calls have ended; they have no collective.
        """
        if self.followers is None:
            return contextlib.nullcontext()
        return self.followers.call(on, method, *args, patient=patient)

    # ----------------------------------------------------------------- when a rank gives up

    @contextlib.contextmanager
    def recoverable(self, is_recoverable: bool = True) -> Iterator[None]:
        before, self.is_recoverable = self.is_recoverable, is_recoverable
        try:
            yield
        finally:
            self.is_recoverable = before

    def finish(self) -> None:
        """Wait until all have finished a pass; from here on none can give it up.

        Raises:
            PeerLost: Another rank has given it up.
        """
        if self.processes is not None:
            self.all_true(True)  # read on the host, so that what it waited for is over
            self.processes.check()

    def attempt(self, work: Callable[[], T], give_up: Callable[[], None]) -> tuple[T | None, str]:
        """Do something that may find no memory on some rank, up to a `finish` that all come to.

        Gives its result; or None and why one of the ranks could not, the same for all. `give_up` is
        called before they form a new process group.
        """
        reason = ""
        try:
            with self.recoverable():
                return work(), ""
        except PeerLost:
            pass  # another rank gave up, and says why
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            reason = self._signed(str(exc))
        give_up()
        if self.processes is None:
            return None, reason
        with self.recoverable(False):
            reasons = [text for text in self._regroup(self.processes, reason) if text]
        if not reasons:
            self.on_loss("the members lost each other, and none knows why")
        return None, reasons[0]

    def first_reason(self, reason: str) -> str:
        """Why the first rank that cannot go on cannot, the same for all; empty when all can."""
        if self.processes is None:
            return reason
        return next(filter(None, self._gather_texts(self._signed(reason) if reason else "")), "")

    def _signed(self, reason: str) -> str:
        return reason if self.size == 1 else f"member {self.rank} of the group: {reason}"

    def _regroup(self, before: ProcessGroup, reason: str) -> list[str]:
        """Form a new process group after a pass that was given up; gives all ranks' reasons."""
        if reason:
            self.on_abandon(self.num_regroups)
        self.num_regroups += 1
        before.close()
        try:
            self.processes = join(
                before.rank,
                before.size,
                before.device,
                f"file:{self.file}-{self.num_regroups}",
                timeout_s=before.timeout_s,
                waits=False,
            )
        except PeerLost as exc:
            self.on_loss(str(exc))
        # The ranks were not at the same point: the largest count is everybody's from now on.
        self.num_collectives = -self.smallest(-self.num_collectives)
        return self._gather_texts(reason)

    def _gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, cut to one length, in the order of ranks."""
        padded = text.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b" ")
        row = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
        rows = [bytes(row.cpu().numpy()) for row in self.all_gather(row)]
        return [row.decode(errors="replace").strip() for row in rows]

    def note_abandoned(self, num_regroups: int) -> None:
        """Another rank gives up the pass. Called from another thread than the one that computes."""
        if num_regroups == self.num_regroups and self.processes is not None:
            self.processes.abort()

    # ----------------------------------------------------------------------- edges of a block

    def enter(self, x: Tensor) -> Tensor:
        """`x` itself; its gradients, of which each rank has a part, are added up."""
        if self.processes is not None and torch.is_grad_enabled() and x.requires_grad:
            entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
            return entered
        return x

    def leave(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts; its gradient goes to each as it is."""
        if self.processes is not None and torch.is_grad_enabled() and part.requires_grad:
            left: Tensor = _Leave.apply(part, self)  # type: ignore[no-untyped-call]
            return left
        return self.all_reduce(part)


# The conjugate operators f and g of Megatron-LM (Shoeybi et al., arXiv 1909.08053). Both sum a
# clone: a collective writes in place, and autograd may give the same tensor to others.


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return ctx.group.all_reduce(dx.clone()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.all_reduce(part.clone())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


def on_every_rank(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of an object with a `group` that the leader's followers call as well.

    Keyword arguments are the leader's own: followers have their defaults.
    """

    @functools.wraps(method)
    def called(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.group.call(self, method.__name__, *args):
            return method(self, *args, **kwargs)

    return called


def made_on_every_rank(
    *, patient: bool = False
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """As `on_every_rank`, for a result that followers keep as long as the leader does.

    With `patient`, the call ends when it has ended on every rank (see `Group.call`).
    """

    def decorate(
        method: Callable[Concatenate[Any, P], T],
    ) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def made(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            make = functools.partial(method, self, *args, **kwargs)
            followers = self.group.followers
            if followers is None:
                return make()
            thing: T = followers.make(self, method.__name__, *args, make=make, patient=patient)
            return thing

        return made

    return decorate


def form(
    rank: int, size: int, device: torch.device, file: str, *, exact: bool, timeout_s: float
) -> Group:
    """Join a group whose ranks all name the same new file, which only they can reach.

    Blocks until all are there, at most for `timeout_s`.
    """
    # A wait on the host for each sum would cost more than the sum: on CUDA the device waits.
    processes = join(rank, size, device, f"file:{file}", timeout_s=timeout_s, waits=False)
    return Group(processes, exact, file=file)
