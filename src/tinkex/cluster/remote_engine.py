"""A handle to one actor with an engine: jobs out, events back, files both ways.

Every call may find the actor gone; that is a `ConnectionError`, whatever ray calls it. Nothing here
starts an engine again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tinkex.cluster.engine_host import Forget, Started, WrittenOnNode
from tinkex.cluster.parcels import PIECE_BYTES, Parcels
from tinkex.engine.folders import make_safe
from tinkex.engine.heartbeat import Activity
from tinkex.engine.hosting import Cancel
from tinkex.engine.jobs import Event, Job
from tinkex.errors import EngineError

logger = logging.getLogger(__name__)


class RemoteEngine:
    def __init__(
        self,
        ray: ModuleType,
        actor: Any,
        group: Any,
        parcels: Parcels,
        kill_process: Callable[[int], None],
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._group = group
        self._parcels = parcels
        self._kill_process = kill_process
        self._pid = 0
        self._numbers = itertools.count()

    async def started(self) -> Started:
        """Wait until it is there; one that cannot run with its settings says why."""
        started: Started = await self._ask("control", "started")
        self._pid = started.pid
        return started

    def tell(self, message: Job | Cancel | Forget) -> None:
        """Messages arrive in the order of the calls."""
        self._call("jobs", "tell", next(self._numbers), pickle.dumps(message, protocol=5))

    async def events(self, timeout_s: float) -> tuple[list[Event | WrittenOnNode], Activity]:
        """Events since the last call, or of the next second.

        Raises:
            ConnectionError: It is gone, or said nothing for that long.
        """
        frame, activity = await self._ask("events", "events", timeout_s=timeout_s)
        return pickle.loads(frame), activity

    # ------------------------------------------------------------------------ files

    async def bring(self, path: str) -> None:
        """Have a folder or a file of this machine there."""
        parcel = await self._parcels.get(path)
        await self._ask("files", "receive", path, parcel.sizes, *parcel.pieces)

    async def fetch(self, written: WrittenOnNode) -> None:
        """Bring back what a job wrote there; here it is whole or not at all."""
        target = Path(written.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            for name, size in written.sizes.items():
                # An empty file takes one empty piece, or it would not be made.
                for start in range(0, max(size, 1), PIECE_BYTES):
                    piece = await self._ask("files", "read", written.path, name, start, PIECE_BYTES)
                    await asyncio.to_thread(_append, aside / name, piece)
            aside.chmod(0o755)
            if not written.is_ephemeral:
                # Before the folder has its name: a row of the database that names it has to load,
                # after a power cut too.
                await asyncio.to_thread(make_safe, aside)
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    # ------------------------------------------------------------------------ its end

    def kill(self) -> None:
        """End it, hung or not. Does not wait."""
        from ray.util.placement_group import remove_placement_group

        try:
            self._ray.kill(self._actor)
            if self._pid:
                self._kill_process(self._pid)
            remove_placement_group(self._group)
        except Exception as exc:  # a cluster that is gone has no engine either
            logger.info("an engine could not be told to end: %s", exc)

    # ------------------------------------------------------------------------ calls

    def _call(self, group: str, method: str, *args: Any) -> Any:
        return getattr(self._actor, method).options(concurrency_group=group).remote(*args)

    async def _ask(
        self, group: str, method: str, *args: Any, timeout_s: float | None = None
    ) -> Any:
        try:
            return await asyncio.wait_for(self._call(group, method, *args), timeout_s)
        except TimeoutError as exc:
            raise ConnectionError(f"no answer in {timeout_s:g} s") from exc
        except self._ray.exceptions.RayTaskError as exc:
            # Raised by the method itself: the actor lives. Ray's other errors say that it is gone.
            raise EngineError(str(exc.cause)) from exc
        except self._ray.exceptions.RayError as exc:
            raise ConnectionError(str(exc).strip().splitlines()[0][:300]) from exc


def _append(file: Path, piece: bytes) -> None:
    with file.open("ab") as out:
        out.write(piece)
