"""Processes that meet in collectives: gloo between CPUs, NCCL between CUDA cards.

Every wait has a deadline. A process that dies or hangs can leave the others with half of a result,
so a meeting in which one wait failed is never used again (`MeetingLost`); who is in it decides what
that means. Meetings belong to nobody: a process may be in several, and torch's default group is
left alone.

They find each other at a place that all of them name: `file:PATH`, a new file that only they can
reach, or `tcp:HOST:PORT`, a store that one of them holds open (`open_store`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from tinkex.engine.jobs import LOOPBACK
from tinkex.errors import EngineError

dist: Any = distributed  # much of it is untyped, and some of it only in builds for CUDA

_POLL_S = 0.0005


class MeetingLost(EngineError):
    """Another one is gone, or did not come in time."""

    is_late = False
    """It did not come: nobody knows whether it still lives."""


@dataclass(slots=True)
class Meeting:
    """This process's place in a meeting; see `meet`. Not thread-safe."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    backend: Any
    """Torch's, of one kind for all."""
    store: Any = None
    """Kept: NCCL looks into it whenever two cards first talk to each other."""
    waits: bool = True
    """On CUDA: wait on the host until a collective is over, so that the deadline is kept here.
    False: later work waits for it on the device, and a deadline that passes ends the process."""
    is_broken: bool = False
    """Somebody said that it will not come to the next collective."""

    def run(self, what: str, start: Callable[[Any], Any]) -> None:
        """Take part in a collective.

        Raises:
            MeetingLost: It did not come about.
        """
        began = time.monotonic()
        try:
            start(self.backend).wait()
            if self.waits and self.device.type == "cuda":
                self._await_device(began + self.timeout_s)
        except RuntimeError as exc:
            is_late = time.monotonic() - began >= 0.9 * self.timeout_s
            said = str(exc).splitlines()[0][-200:] if str(exc) else type(exc).__name__
            if is_late:
                text = f"another one did not come to {what} within {self.timeout_s:g} s"
            else:
                text = f"another one is gone in the middle of {what}"
            lost = MeetingLost(f"member {self.rank} of {self.size} says that {text} ({said})")
            lost.is_late = is_late
            raise lost from exc

    def _await_device(self, deadline: float) -> None:
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            if time.monotonic() > deadline:
                self.backend.abort()
                raise RuntimeError("aborted")
            time.sleep(_POLL_S)

    def break_off(self) -> None:
        """From any thread: have whoever waits in a collective give it up."""
        self.is_broken = True
        if self.device.type == "cuda":  # others notice a socket that is closed, not a card
            self.backend.abort()

    def check(self) -> None:
        """What the last collective gave is not to be used when the meeting was broken off.

        Raises:
            MeetingLost: It was.
        """
        if self.is_broken:
            raise MeetingLost("another one gave up")

    def close(self) -> None:
        """Leave. The others notice when they next wait for this one."""
        with contextlib.suppress(RuntimeError):
            self.backend.shutdown()
        self.backend = self.store = None

    # ------------------------------------------------------------------------------ collectives

    def sum(self, part: Tensor) -> None:
        """Add up, in place and in whatever order."""
        self.run("a sum", lambda backend: backend.allreduce([part]))

    def largest(self, part: Tensor) -> None:
        """Number by number the largest, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.run("a maximum", lambda backend: backend.allreduce([part], options))

    def parts(self, part: Tensor) -> list[Tensor]:
        """The tensors of all, which have one shape, in their order."""
        every = [torch.empty_like(part) for _ in range(self.size)]
        self.run("a gathering", lambda backend: backend.allgather([every], [part]))
        return every

    def to_first(self, part: Tensor) -> list[Tensor]:
        """As `parts`, for the first; the others get nothing."""
        options = dist.GatherOptions()
        options.rootRank = 0
        every = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        lists = [every] if every else []
        self.run("a gathering", lambda backend: backend.gather(lists, [part], options))
        return every

    def same(self, value: Tensor) -> None:
        """Overwrite `value` with that of the first."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.run("a broadcast", lambda backend: backend.broadcast([value], options))

    def swap(
        self, given: Tensor, given_sizes: Sequence[int], got: Tensor, got_sizes: Sequence[int]
    ) -> None:
        """Give everybody a stretch of `given`, and get one of everybody, in their order."""
        sizes = list(got_sizes), list(given_sizes)
        self.run("a swap", lambda backend: backend.alltoall_base(got, given, *sizes))


def meet(
    rank: int,
    size: int,
    device: torch.device,
    place: str,
    *,
    timeout_s: float,
    address: str = LOOPBACK,
    waits: bool = True,
) -> Meeting:
    """Come to a meeting. Blocks until all are there and reach each other, at most for `timeout_s`.

    Raises:
        MeetingLost: They are not.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        store = _store_at(place, size, limit)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = _nccl(store, rank, size, limit if not waits else 2 * limit)
        else:
            backend = _gloo(store, rank, size, limit, address)
    except RuntimeError as exc:  # torch's own DistErrors are
        said = str(exc).splitlines()[0][-200:]
        raise MeetingLost(f"member {rank} of {size} found no meeting at {place}: {said}") from exc
    meeting = Meeting(rank, size, device, timeout_s, backend, store, waits)
    meeting.largest(torch.zeros(1, dtype=torch.int64, device=device))
    return meeting


def open_store(host: str) -> tuple[Any, str]:
    """A store for members on several machines, and its place. It ends when nobody holds it."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"tcp:{host}:{store.port}"


def _store_at(place: str, size: int, limit: timedelta) -> Any:
    kind, _, where = place.partition(":")
    if kind == "file":
        store = dist.FileStore(where, size)
    else:
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    store.set_timeout(limit)
    return store


def _gloo(store: Any, rank: int, size: int, limit: timedelta, address: str) -> Any:
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = limit
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    kind = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = limit
    return kind(store, rank, size, options)
