"""A process group without torch: rank 0 has a socket to every other rank.

For engines whose gradients are small Python values. All pass through rank 0, so it scales with the
number of ranks; `collectives.process_group` is for tensors. Every wait has a deadline. Peers prove
with the group's id, which only they know, that they belong to it: values travel as pickles.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any

from tinkex.engine.jobs import JoinGroupJob
from tinkex.errors import EngineError

_POLL_S = 0.01
_PROOF_S = 5.0
"""How long whoever connects may be silent before it has proved that it belongs to the group."""


class SocketGroup:
    """A rank of a group that has formed; see `join`. Not thread-safe."""

    def __init__(self, rank: int, links: list[Connection], timeout_s: float) -> None:
        """`links` lead from rank 0 to all others in order, and from all others to rank 0."""
        self.rank, self._links, self._timeout_s = rank, links, timeout_s

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in order, at rank 0; nothing at the others."""
        if self.rank:
            _send(self._links[0], value)
            return []
        return [value, *map(self._receive, self._links)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, for all."""
        if self.rank:
            return self._receive(self._links[0])
        for link in self._links:
            _send(link, value)
        return value

    def _receive(self, link: Connection) -> Any:
        if not link.poll(self._timeout_s):
            raise EngineError(f"another worker did not come within {self._timeout_s:g} s")
        try:
            return link.recv()
        except (EOFError, OSError) as exc:
            raise EngineError("another worker is gone") from exc

    def close(self) -> None:
        for link in self._links:
            link.close()


def _send(link: Connection, value: Any) -> None:
    try:
        link.send(value)
    except OSError as exc:
        raise EngineError("another worker is gone, or takes nothing") from exc


def open_store(host: str) -> tuple[socket.socket, str]:
    """The socket at which rank 0 will wait for the others, and its address."""
    server = socket.create_server((host, 0))
    return server, f"tcp:{host}:{server.getsockname()[1]}"


def join(job: JoinGroupJob, store: socket.socket | None) -> SocketGroup:
    """Form a group. Blocks until all ranks are there, at most `timeout_s`.

    Raises:
        EngineError: They are not.
    """
    deadline = time.monotonic() + job.timeout_s
    try:
        links = _accept(job, store, deadline) if job.rank == 0 else [_connect(job, deadline)]
    except (OSError, EOFError, AuthenticationError) as exc:
        raise EngineError(f"rank {job.rank} of {job.size} found no process group: {exc}") from exc
    return SocketGroup(job.rank, links, job.timeout_s)


def _accept(job: JoinGroupJob, store: socket.socket | None, deadline: float) -> list[Connection]:
    server = store or socket.create_server((job.host, 0))
    kind, _, path = job.address.partition(":")
    if kind == "file":
        # Whole or not at all: the others read it as soon as it is there.
        aside = Path(f"{path}.part")
        aside.write_text(f"{job.host}:{server.getsockname()[1]}")
        os.replace(aside, path)
    links: dict[int, Connection] = {}
    with server:
        while len(links) < job.size - 1:
            left_s = _left_s(deadline)
            server.settimeout(left_s)
            link = Connection(server.accept()[0].detach())
            _limit(link, min(_PROOF_S, left_s))
            try:
                deliver_challenge(link, job.group_id.encode())
                answer_challenge(link, job.group_id.encode())
                rank = link.recv()
            except (AuthenticationError, EOFError, OSError):
                link.close()  # of nobody in this group
                continue
            _limit(link, job.timeout_s)
            links[rank] = link
    return [links[rank] for rank in range(1, job.size)]


def _connect(job: JoinGroupJob, deadline: float) -> Connection:
    kind, _, where = job.address.partition(":")
    if kind == "file":
        while not Path(where).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody waits at {where}")
            time.sleep(_POLL_S)
        where = Path(where).read_text()
    host, _, port = where.rpartition(":")
    peer = socket.create_connection((host, int(port)), _left_s(deadline))
    peer.settimeout(None)
    link = Connection(peer.detach())
    _limit(link, _left_s(deadline))
    answer_challenge(link, job.group_id.encode())
    deliver_challenge(link, job.group_id.encode())
    link.send(job.rank)
    _limit(link, job.timeout_s)
    return link


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("another worker did not come in time")
    return left_s


def _limit(link: Connection, seconds: float) -> None:
    """Have a read or write fail that gets nowhere for so long; a connection itself would wait."""
    seconds = max(_POLL_S, seconds)  # none at all would mean no limit
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
