"""Folders on their way to engines: read once, put into the object store once.

Several engines need the same weights at about the same moment, so the last few folders are kept
there; ray brings them from node to node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tinkex.cluster import job_paths
from tinkex.errors import EngineError

PIECE_BYTES = 16 << 20
MAX_BYTES = 256 << 20
"""Folders that are kept in the object store; the last one whatever its size."""


@dataclass(frozen=True, slots=True)
class Parcel:
    sizes: dict[str, int]
    pieces: list[Any]
    """References to the bytes of all files, one after the other."""


class Parcels:
    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._kept: OrderedDict[str, asyncio.Task[Parcel]] = OrderedDict()

    async def get(self, path: str) -> Parcel:
        """A folder's files in the object store.

        Raises:
            EngineError: It is not on the disk.
        """
        task = self._kept.get(path)
        if task is None or (task.done() and task.exception() is not None):
            task = self._kept[path] = asyncio.create_task(asyncio.to_thread(self._pack, path))
        self._kept.move_to_end(path)
        # Shielded: other engines may wait for the same folder.
        parcel = await asyncio.shield(task)
        self._drop_oldest()
        return parcel

    def _pack(self, path: str) -> Parcel:
        parcel = Parcel({}, [])
        try:
            for name, file in job_paths.files_of(Path(path)):
                parcel.sizes[name] = file.stat().st_size
                with file.open("rb") as stream:
                    while piece := stream.read(PIECE_BYTES):
                        parcel.pieces.append(self._ray.put(piece))
        except OSError as exc:
            raise EngineError(f"{Path(path).name} cannot be read: {exc.strerror}.") from exc
        return parcel

    def _drop_oldest(self) -> None:
        while len(self._kept) > 1 and self._num_bytes() > MAX_BYTES:
            self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        done = (task for task in self._kept.values() if task.done() and not task.exception())
        return sum(sum(task.result().sizes.values()) for task in done)
