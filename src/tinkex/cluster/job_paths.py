"""The folders of checkpoints that a job names by their path on the server's disk.

Folders never change under their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.engine.jobs import Job, LoadAdapterJob, SaveAdapterJob

_FIELDS = ("folder", "adapter_folder")


def reads(job: Job) -> tuple[str, ...]:
    """The folders that must be there before the engine has the job."""
    if isinstance(job, SaveAdapterJob):
        return ()
    return tuple(dict.fromkeys([*_paths(job).values(), *(path for path, _ in _mixture(job))]))


def moved(job: Job, place: Callable[[str], Path]) -> Job:
    """The same job, its folders where they lie on a node."""
    placed: dict[str, Any] = {name: str(place(path)) for name, path in _paths(job).items()}
    if mixture := _mixture(job):
        placed["mixture"] = tuple([(str(place(path)), times) for path, times in mixture])
    return replace(job, **placed)


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder by name."""
    yield from ((file.name, file) for file in sorted(folder.iterdir()) if file.is_file())


def _mixture(job: Job) -> tuple[tuple[str, float], ...]:
    return job.mixture if isinstance(job, LoadAdapterJob) else ()


def _paths(job: Job) -> dict[str, str]:
    paths = {name: getattr(job, name, None) for name in _FIELDS}
    return {name: path for name, path in paths.items() if path is not None}
