"""The names of runs: `pirate` for the folder a recipe wrote, and where its weights are.

Names live in one file of the state folder. A run can also be called by its folder. Knows the files
of the folder, nothing of servers: a checkpoint it names may be gone there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinkex.contract.run_folder import CHECKPOINTS_FILE, CONFIG_FILE, METRICS_FILE, SERVER_FILE
from tinkex.errors import ConfigError, ModelNotFoundError
from tinkex.runs import json_lines
from tinkex.wire.local_servers import RUN_NAMES, read_record, state_folder

__all__ = ["NamedRun", "find", "find_path", "forget", "known", "remember"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRun:
    """A run's folder, and what the files in it say."""

    name: str
    folder: Path
    recipe: str
    model: str
    step: int
    loss: float | None
    saved_at: float
    state_path: str
    """Weights and optimizer; empty before the first checkpoint."""
    sampler_path: str
    server: str = ""
    """Its base URL, `local` for the private one; empty in a folder that does not say."""
    data_dir: str = ""
    """Of the private server."""
    is_named: bool = False
    """A recipe of this machine gave it its name; a folder alone may be anybody's."""


def remember(name: str, folder: str | Path) -> None:
    """Give a folder's run a name.

    Raises:
        ConfigError: The name cannot be one, or another run has it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a run: letters, digits, '.', '_' and '-', up to 64."
        )
    names, path = _names(), str(Path(folder).resolve())
    if (taken := names.get(name, path)) != path and Path(taken).exists():
        raise ConfigError(
            f"another run is called {name!r}: {taken}. Choose another name, or go on with that run "
            f"(--log-dir {taken})."
        )
    _write({**names, name: path})


def forget(what: str) -> None:
    """Take the names of a run, given by name or folder, back; its folder stays."""
    names = _names()
    path = names.get(what, str(Path(what).expanduser().resolve()))
    if path in names.values():
        _write({name: folder for name, folder in names.items() if folder != path})


def known() -> Iterator[NamedRun]:
    """Runs with a name whose folder is still there, the last used first."""
    read = [_read(Path(path), name) for name, path in _names().items()]
    runs = (replace(run, is_named=True) for run in read if run is not None)
    yield from sorted(runs, key=lambda run: -run.saved_at)


def find(what: str) -> NamedRun | None:
    """The run of a name or a folder; None when it is neither."""
    path = _names().get(what)
    if path is not None and (run := _read(Path(path), what)) is not None:
        return replace(run, is_named=True)
    folder = Path(what).expanduser()
    run = _read(folder, folder.name) if folder.is_dir() else None
    return run and replace(run, is_named=str(folder.resolve()) in _names().values())


def find_path(what: str, *, for_training: bool = False) -> str | None:
    """The checkpoint of a run by name or folder; None when `what` is no run.

    Raises:
        ModelNotFoundError: It is a run without a checkpoint.
    """
    if what.startswith("tinker://"):
        return what
    if (run := find(what)) is None:
        return None
    path = run.state_path if for_training else run.sampler_path or run.state_path
    if not path:
        raise ModelNotFoundError(
            f"the run {what!r} ({run.folder}) has no checkpoint yet. Let it train to its first one."
        )
    return path


def _file() -> Path:
    return state_folder() / RUN_NAMES


def _write(names: dict[str, str]) -> None:
    file = _file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    json_lines.write_whole(file, [json.dumps(names, indent=2), "\n"])


def _names() -> dict[str, str]:
    try:
        stored = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}


def _read(folder: Path, name: str) -> NamedRun | None:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "log_dir" not in config:
        return None  # a model's folder has a config.json, too
    server = read_record(folder / SERVER_FILE)
    saved, metrics = _last(folder / CHECKPOINTS_FILE), _last(folder / METRICS_FILE, "loss")
    return NamedRun(
        name=name,
        folder=folder,
        recipe=_recipe(config),
        model=str(config.get("model", "")),
        step=int(saved.get("step", 0)),
        loss=metrics.get("loss"),
        saved_at=folder.stat().st_mtime,
        state_path=str(saved.get("state_path") or ""),
        sampler_path=str(saved.get("sampler_path") or ""),
        server=str(server.get("server") or ""),
        data_dir=str(server.get("data_dir") or ""),
    )


def _recipe(config: dict[str, Any]) -> str:
    marks = {"teacher": "distill", "beta": "dpo", "group_size": "rl"}
    return next((recipe for field, recipe in marks.items() if field in config), "sft")


def _last(file: Path, field: str = "") -> dict[str, Any]:
    """The last whole line that has the field."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and (not field or field in record):
            return record
    return {}
