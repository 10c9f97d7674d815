"""A disk that a test can fill and clear: a small tmpfs, or limits on the server's own processes.

Mounting needs root. Where it is refused, the fallback forbids the server and its workers to make
files longer (RLIMIT_FSIZE). It fails most of the same writes, and the end of the test run says
loudly what was tested and why (`refusals`, printed by conftest).
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

SIZE_BYTES = 24_000_000


refusals: set[str] = set()
"""Why disks could not be mounted."""


class Disk(Protocol):
    is_real: bool

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all the room there is, except a little."""

    def clear(self) -> None: ...


class Tmpfs:
    is_real = True

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (65_536, 4096):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    continue
            if leave_bytes:
                file.truncate(max(0, file.tell() - leave_bytes))

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)


class ShortFiles:
    """The files of these processes, the server's first, may only grow by so much."""

    is_real = False

    def __init__(self, folder: Path, pids: Callable[[], list[int]]) -> None:
        self._folder = folder
        self._pids = pids

    def fill(self, leave_bytes: int = 0) -> None:
        server, *workers = self._pids()
        longest = max(file.stat().st_size for file in self._folder.glob("tinkex.db*"))
        _limit(server, longest + leave_bytes if leave_bytes else 1)
        for worker in workers:
            _limit(worker, leave_bytes or 1)

    def clear(self) -> None:
        for pid in self._pids():
            _limit(pid, resource.RLIM_INFINITY)


def _limit(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def small_disk(
    folder: Path, pids: Callable[[], list[int]], size_bytes: int = SIZE_BYTES
) -> Iterator[Disk]:
    """Mount a small disk at `folder`, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=755"
    command = ["mount", "-t", "tmpfs", "-o", options, "tinkex-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True) if os.name == "posix" else None
    if done is None or done.returncode:
        refusals.add(done.stderr.strip() if done else "no mount on this system")
        yield ShortFiles(folder, pids)
        return
    try:
        yield Tmpfs(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
