"""Log folders of `tinkex train` on this disk: whose run is in them, and how it is resumed.

A recipe tells the server its log folder, but so can any client, and resuming a folder runs the
reward file that the folder names. So a folder counts only where it is the owner's own, nobody else
can write to it, and its checkpoints are those of the run. Blocks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tinkex.contract.run_folder import (
    CHECKPOINTS_FILE,
    COMMAND_FILE,
    FINISHED_FILE,
    ROLLOUTS_FILE,
)
from tinkex.types.account.checkpoints import TinkerPath
from tinkex.wire.local_servers import RUN_NAMES, read_record, state_folder

MAX_TAIL = 64 * 1024
"""Of a file of checkpoints only its end is read."""


def resume_arguments(folder: Path | str) -> list[str]:
    """The command that resumes a run of a recipe, where it was started or anywhere."""
    return ["train", "resume", str(folder)]


def folder_of_run(log_dir: object, run_ids: Collection[str], base: Path) -> Path | None:
    """The log folder from which a server's run can be resumed, or None.

    Args:
        log_dir: As the run's settings say it.
        run_ids: All segments of the run.
        base: What a relative folder is relative to, unless the run has a name on this machine.
    """
    folders = _folders_of_run(log_dir, run_ids, base)
    return next((folder for folder in folders if is_resumable(folder)), None)


def rollouts_of_run(log_dir: object, run_ids: Collection[str], base: Path) -> Path | None:
    """The log folder that has the answers of a server's run, or None; arguments as above."""
    folders = _folders_of_run(log_dir, run_ids, base)
    return next((folder for folder in folders if _is_safe(folder / ROLLOUTS_FILE)), None)


def _folders_of_run(log_dir: object, run_ids: Collection[str], base: Path) -> Iterator[Path]:
    if not isinstance(log_dir, str) or not log_dir or "\0" in log_dir:
        return
    for folder in _candidates(log_dir, base):
        if _is_safe(folder) and _run_of(_last_checkpoint(folder)) in run_ids:
            yield folder


def named_folders() -> dict[str, Path]:
    """The log folders of this user that have a name, wherever they were trained."""
    names = read_record(state_folder() / RUN_NAMES)
    return {name: Path(path) for name, path in names.items() if isinstance(path, str)}


def is_resumable(folder: Path) -> bool:
    """Whether the folder says how its run was started, has a checkpoint, and is not at its end."""
    if not (_is_safe(folder) and _is_safe(folder / COMMAND_FILE)):
        return False
    step = _last_checkpoint(folder).get("step")
    end = read_record(folder / FINISHED_FILE).get("end")
    return step is not None and not (isinstance(end, dict) and end.get("step") == step)


def _candidates(log_dir: str, base: Path) -> Iterator[Path]:
    yield (base / log_dir).resolve()
    for path in named_folders().values():
        if path.name == Path(log_dir).name:
            yield path


def _is_safe(path: Path) -> bool:
    """Whether the path is ours and nobody but us, or our own group, can write to it."""
    try:
        facts = path.stat()
    except OSError:
        return False
    foreign = 0o002 if facts.st_gid == os.getegid() else 0o022
    return facts.st_uid == os.geteuid() and not facts.st_mode & foreign


def _last_checkpoint(folder: Path) -> Mapping[str, Any]:
    try:
        with (folder / CHECKPOINTS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_TAIL))
            last = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}
    return last if isinstance(last, dict) else {}


def _run_of(checkpoint: Mapping[str, Any]) -> str | None:
    try:
        return TinkerPath.parse(str(checkpoint.get("state_path"))).run_id
    except ValueError:
        return None
