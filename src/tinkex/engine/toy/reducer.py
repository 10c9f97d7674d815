"""How toys that share an adapter bring their gradients together: everyone gets those of all."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tinkex.engine.all_reduce import sockets
from tinkex.engine.jobs import JoinGroupJob
from tinkex.engine.toy.model import ToyAdapter


class ToyReducer:
    """See `all_reduce.process_groups.Reducer`."""

    def __init__(self, group: sockets.SocketGroup, find: Callable[[str], ToyAdapter]) -> None:
        self._group, self._find = group, find

    @staticmethod
    def join(
        find: Callable[[str], ToyAdapter], job: JoinGroupJob, store: socket.socket | None
    ) -> ToyReducer:
        return ToyReducer(sockets.join(job, store), find)

    def reduce(self, adapter_id: str, root: int | None) -> int:
        adapter = self._find(adapter_id)
        everyones = self._group.broadcast(self._group.gather(adapter.shared))
        adapter.brought = everyones if root in (None, self._group.rank) else []
        return adapter.shared_bytes

    def close(self) -> None:
        self._group.close()
