"""Process groups and their collectives: gloo between CPUs, NCCL between CUDA cards.

Every wait has a deadline. A process that dies or hangs can leave the others with half of a result,
so a group in which one wait failed is never used again (`PeerLost`); the caller decides what that
means. A process may be in several groups; torch's default group is left alone.

The ranks find each other at an address that all of them name: `file:PATH`, a new file that only
they can reach, or `tcp:HOST:PORT`, a store that one of them holds open (`open_store`).
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


class PeerLost(EngineError):
    """Another rank is gone, or did not come in time."""

    is_late = False
    """It did not come: nobody knows whether it still lives."""


@dataclass(slots=True)
class ProcessGroup:
    """A rank of a process group that has formed; see `join`. Not thread-safe."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    backend: Any
    """Torch's, of one kind for all ranks."""
    store: Any = None
    """Kept: NCCL looks into it whenever two cards first talk to each other."""
    waits: bool = True
    """On CUDA: wait on the host until a collective is over, so that the deadline is kept here.
    False: later work waits for it on the device, and a deadline that passes ends the process."""
    is_aborted: bool = False
    """Another rank said that it will not come to the next collective."""

    def run(self, what: str, start: Callable[[Any], Any]) -> None:
        """Take part in a collective.

        Raises:
            PeerLost: It did not come about.
        """
        began = time.monotonic()
        try:
            start(self.backend).wait()
            if self.waits and self.device.type == "cuda":
                self._await_device(began + self.timeout_s)
        except RuntimeError as exc:
            is_late = time.monotonic() - began >= 0.9 * self.timeout_s
            cause = str(exc).splitlines()[0][-200:] if str(exc) else type(exc).__name__
            if is_late:
                text = f"another one did not come to {what} within {self.timeout_s:g} s"
            else:
                text = f"another one is gone in the middle of {what}"
            lost = PeerLost(f"member {self.rank} of {self.size} says that {text} ({cause})")
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

    def abort(self) -> None:
        """From any thread: have this rank give up the collective that it waits in."""
        self.is_aborted = True
        if self.device.type == "cuda":  # others notice a socket that is closed, not a card
            self.backend.abort()

    def check(self) -> None:
        """Refuse the result of the last collective if the group was aborted.

        Raises:
            PeerLost: It was.
        """
        if self.is_aborted:
            raise PeerLost("another one gave up")

    def close(self) -> None:
        """Leave. The others notice when they next wait for this rank."""
        with contextlib.suppress(RuntimeError):
            self.backend.shutdown()
        self.backend = self.store = None

    # ------------------------------------------------------------------------------ collectives

    def all_reduce(self, part: Tensor) -> None:
        """Add up, in place and in whatever order."""
        self.run("a sum", lambda backend: backend.allreduce([part]))

    def all_reduce_max(self, part: Tensor) -> None:
        """Number by number the largest, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.run("a maximum", lambda backend: backend.allreduce([part], options))

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks."""
        every = [torch.empty_like(part) for _ in range(self.size)]
        self.run("a gathering", lambda backend: backend.allgather([every], [part]))
        return every

    def gather(self, part: Tensor) -> list[Tensor]:
        """As `all_gather`, for rank 0; the others get nothing."""
        options = dist.GatherOptions()
        options.rootRank = 0
        every = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        lists = [every] if every else []
        self.run("a gathering", lambda backend: backend.gather(lists, [part], options))
        return every

    def broadcast(self, value: Tensor) -> None:
        """Overwrite `value` with that of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.run("a broadcast", lambda backend: backend.broadcast([value], options))

    def all_to_all(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, sizes: Sequence[int]
    ) -> None:
        """Send each rank a stretch of `sent`, and receive one of each, in the order of ranks."""
        both = list(sizes), list(sent_sizes)
        self.run("a swap", lambda backend: backend.alltoall_base(received, sent, *both))


def join(
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    *,
    timeout_s: float,
    host: str = LOOPBACK,
    waits: bool = True,
) -> ProcessGroup:
    """Form a group. Blocks until all ranks are there and reach each other, at most `timeout_s`.

    Args:
        host: The address of this machine under which the other ranks reach it.

    Raises:
        PeerLost: They do not.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        store = _store_at(address, size, limit)
        if device.type == "cuda":
            use_card(device)
            backend = _nccl(store, rank, size, limit if not waits else 2 * limit)
        else:
            backend = _gloo(store, rank, size, limit, host)
    except RuntimeError as exc:  # torch's own DistErrors are
        cause = str(exc).splitlines()[0][-200:]
        raise PeerLost(
            f"member {rank} of {size} found no process group at {address}: {cause}"
        ) from exc
    group = ProcessGroup(rank, size, device, timeout_s, backend, store, waits)
    group.all_reduce_max(torch.zeros(1, dtype=torch.int64, device=device))
    return group


def use_card(device: torch.device) -> None:
    """Make a CUDA card the current one of this thread."""
    # Torch refuses to set one without a number, by which the current one is meant anyway.
    if device.index is not None:
        torch.cuda.set_device(device)


def open_store(host: str) -> tuple[Any, str]:
    """A store for ranks on several machines, and its address. It ends when nobody holds it."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"tcp:{host}:{store.port}"


def _store_at(address: str, size: int, limit: timedelta) -> Any:
    kind, _, where = address.partition(":")
    if kind == "file":
        store = dist.FileStore(where, size)
    else:
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    store.set_timeout(limit)
    return store


def _gloo(store: Any, rank: int, size: int, limit: timedelta, host: str) -> Any:
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = limit
    return kind(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    kind = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = limit
    return kind(store, rank, size, options)
