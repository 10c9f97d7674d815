"""Why a worker's process ended: for lack of memory, by a crash of its own, or killed by somebody.

A SIGKILL alone says little: an operator sends it, and so does the kernel when memory runs out. The
kernel counts what it killed, in the control group of the process and for the whole machine; a count
that grew in the last seconds is the evidence. Processes of the server share its control group.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tinkex.engine.control_group import GROUPS, PROC, memory_groups

Cause = Literal["", "memory", "crash", "stuck"]
"""Empty: nothing is known, or somebody ended it. `stuck`: we did, for one of several jobs."""
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
LATELY = 10
"""Looks at the count that are kept; one is taken each second. A process of many gigabytes takes
seconds to be gone after it was killed."""


class KernelKills:
    """The kernel's count of processes that it ended for lack of memory, as of the last looks."""

    def __init__(self, files: Iterable[Path] | None = None) -> None:
        self._files = list(count_files() if files is None else files)
        self._counts: deque[int] = deque(maxlen=LATELY)

    def look(self) -> None:
        self._counts.append(self._count())

    def has_grown(self) -> bool:
        """Whether the kernel killed something since the oldest look that is kept."""
        return bool(self._counts) and self._count() > self._counts[0]

    def _count(self) -> int:
        return sum(_count_in(file) for file in self._files)


def count_files(proc: Path = PROC, groups: Path = GROUPS) -> list[Path]:
    """The file that counts for our control group (v2 or v1), or else for the machine."""
    for version, folder in memory_groups(proc, groups):
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        if _has_count(file):
            return [file]
    return [proc / "vmstat"]


def cause_of(returncode: int | None, *, is_ours: bool, kills: KernelKills) -> Cause:
    """Why a process ended. `is_ours`: the server itself killed it."""
    if returncode is None or is_ours:
        return ""
    if returncode >= 0:  # an error that nobody caught; a group whose rank was lost says so
        return "crash" if returncode not in (0, os.EX_TEMPFAIL) else ""
    if -returncode == signal.SIGKILL:
        return "memory" if kills.has_grown() else ""
    return "crash" if -returncode in CRASHES else ""


def _has_count(file: Path) -> bool:
    try:
        return "oom_kill " in file.read_text()
    except OSError:
        return False


def _count_in(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
