"""What a job names by path on the server's disk: folders of checkpoints, files of gradients.

A file is treated as a folder of one nameless file, so that both travel alike. Folders and files
never change under their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.engine.jobs import Job, SaveAdapterJob

_ONE = ("folder", "adapter_folder", "file")
_MANY = ("files",)
WHOLE = ""
"""The name of a file that is no folder's."""


def reads(job: Job) -> tuple[str, ...]:
    """The paths that must be there before the engine has the job."""
    return () if written_by(job) is not None else tuple(_paths(job))


def written_by(job: Job) -> str | None:
    """The path that the engine writes to, or None."""
    found: str | None = getattr(job, "file", None)
    return job.folder if isinstance(job, SaveAdapterJob) else found


def is_read_once(job: Job) -> bool:
    """Whether nobody needs what it read after it has ended."""
    return bool(getattr(job, "files", ()))


def moved(job: Job, place: Callable[[str], Path]) -> Job:
    """The same job, its paths where they lie on a node."""
    changes: dict[str, Any] = {}
    for name in _ONE:
        if (path := getattr(job, name, None)) is not None:
            changes[name] = str(place(path))
    for name in _MANY:
        if hasattr(job, name):
            changes[name] = tuple(str(place(path)) for path in getattr(job, name))
    return replace(job, **changes)


def parts(path: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder by name, or the one file."""
    if path.is_dir():
        yield from ((file.name, file) for file in sorted(path.iterdir()) if file.is_file())
    else:
        yield WHOLE, path


def _paths(job: Job) -> Iterator[str]:
    yield from (path for name in _ONE if (path := getattr(job, name, None)) is not None)
    yield from (path for name in _MANY for path in getattr(job, name, ()))
