"""The control groups that this process is in, as far as they bound its memory.

A container has less memory than its machine, and the kernel ends processes by the container's
limit. Version 2 has one tree of groups, version 1 one for each resource. A group is bounded by all
above it. Files of the kernel are read anew at each question; what cannot be read bounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def memory_groups(proc: Path = PROC, groups: Path = GROUPS) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group that bounds our memory, our own first."""
    for version, root, path in _trees(proc, groups):
        # Inside a container the path may be the host's, which is not there: then the root is ours.
        own = root / path.lstrip("/")
        folder = own if own.is_dir() and ".." not in Path(path).parts else root
        while True:
            yield version, folder
            if folder == root:
                break
            folder = folder.parent


def free_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Memory that our groups leave to new allocations; None when none has a limit.

    Cached files count as free, as in the kernel's own figure for the machine.
    """
    free = [_free_in(version, folder) for version, folder in memory_groups(proc, groups)]
    return min((size for size in free if size is not None), default=None)


def _trees(proc: Path, groups: Path) -> Iterator[tuple[int, Path, str]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            yield 1, groups / "memory", path
        elif not controllers:
            yield 2, groups, path


def _free_in(version: int, folder: Path) -> int | None:
    names = ("memory.max", "memory.current") if version == 2 else _FIRST
    limit, used = (_number(folder / name) for name in names)
    # Version 1 writes a number near 2**63 where there is no limit.
    if limit is None or used is None or limit >= 1 << 60:
        return None
    prefix = "" if version == 2 else "total_"
    cached = sum(_counts(folder / "memory.stat", f"{prefix}active_file", f"{prefix}inactive_file"))
    return max(0, limit - max(0, used - cached))


_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or `max`
        return None


def _counts(file: Path, *names: str) -> Iterator[int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(" ")
        if name in names and value.strip().isdigit():
            yield int(value)
