"""The folders of checkpoints that a job names by their path on the server's disk.

Folders never change under their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tinkex.engine.jobs import Job, SaveAdapterJob

_FIELDS = ("folder", "adapter_folder")


def reads(job: Job) -> tuple[str, ...]:
    """The folders that must be there before the engine has the job."""
    return () if isinstance(job, SaveAdapterJob) else tuple(_paths(job).values())


def moved(job: Job, place: Callable[[str], Path]) -> Job:
    """The same job, its folders where they lie on a node."""
    return replace(job, **{name: str(place(path)) for name, path in _paths(job).items()})


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder by name."""
    yield from ((file.name, file) for file in sorted(folder.iterdir()) if file.is_file())


def _paths(job: Job) -> dict[str, str]:
    paths = {name: getattr(job, name, None) for name in _FIELDS}
    return {name: path for name, path in paths.items() if path is not None}
