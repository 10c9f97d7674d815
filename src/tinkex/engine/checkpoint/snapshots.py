"""Weights that are sampled from, kept on the device by the folder they are in.

A folder's weights never change; one that was written anew under an old name is read anew. The
longest unused go first when room is short, and all whose folder is gone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.engine.folders import WEIGHTS
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.numerics.ops import Ops

_IDLE_S = 600.0
"""Weights that nobody used for this long are forgotten when others come."""


@dataclass(slots=True)
class AdapterSnapshot:
    adapter: Adapter
    version: str
    """The digest of its content, computed by this process from the bytes that it read or wrote, and
    never what a folder says of itself; of one that is being written, the job's id."""
    written: str | None = None
    """Tells its folder from another one of that name; None while it is being written."""
    used_at: float = 0.0
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size_bytes = sum(t.numel() * t.element_size() for t in self.adapter.parameters())


class Snapshots:
    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._kept: OrderedDict[tuple[str, str], AdapterSnapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return sum(kept.size_bytes for kept in self._kept.values())

    def find(self, base: str, folder: str, read: Callable[[str], Adapter]) -> AdapterSnapshot:
        """The weights in a folder, read where they are not kept."""
        snapshot, written = self._kept.get((base, folder)), version_of(folder)
        if snapshot is None or (written is not None and written != snapshot.written):
            adapter = read(folder)
            snapshot = AdapterSnapshot(adapter, adapter.content, written)
        self.keep(base, folder, snapshot)
        return snapshot

    def keep(self, base: str, folder: str, snapshot: AdapterSnapshot) -> None:
        self._kept[base, folder] = snapshot
        self._kept.move_to_end((base, folder))
        total = self.size_bytes
        snapshot.used_at = time.monotonic()
        while len(self._kept) > 1:
            oldest = next(iter(self._kept.values()))
            is_idle = snapshot.used_at - oldest.used_at > _IDLE_S
            if total <= self._room_bytes and not is_idle:
                return
            self._kept.popitem(last=False)
            total -= oldest.size_bytes

    def forget_gone(self) -> None:
        """Forget weights whose folder is no longer there."""
        for key, kept in list(self._kept.items()):
            if kept.written is not None and version_of(key[1]) is None:
                del self._kept[key]

    def forget_base(self, base: str) -> None:
        for key in [key for key in self._kept if key[0] == base]:
            del self._kept[key]

    def clear(self) -> None:
        self._kept.clear()


def snapshot_room(ops: Ops) -> int:
    """Bytes for weights that no running job uses: a 32nd of the memory, 256 MiB to 2 GiB."""
    return min(max(ops.total_bytes() // 32, 256 << 20), 2 << 30)


def version_of(folder: str) -> str | None:
    """Changes when a folder is written anew; None when it is not on this disk."""
    try:
        stat = (Path(folder) / WEIGHTS).stat()
    except OSError:
        return None
    return f"{stat.st_ino}:{stat.st_mtime_ns}"
