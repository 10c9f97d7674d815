"""Bring checkpoints to this machine or the hub, with a bar where a person waits."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from tinkex.cli.state import State
from tinkex.client.service import downloads
from tinkex.client.service.downloads import download_checkpoint, folder_name, progress_bar

__all__ = [
    "check_room",
    "fetch_folder",
    "fetch_trace",
    "folder_name",
    "keep_adapter_only",
    "push_to_hub",
    "put",
    "trace_file",
]

# What a run needs to go on and nobody needs to load the adapter.
_STATE_FILES = ("optimizer.safetensors", "gradients.safetensors")


def fetch_folder(state: State, path: str, folder: Path, *, force: bool = False) -> int:
    """Download a checkpoint into `folder`; gives its size in bytes."""
    check_room(folder, force=force)
    with state.service(patient=False) as service, progress_bar("Downloading") as report:
        return download_checkpoint(service, path, folder, force=force, on_progress=report)


def keep_adapter_only(folder: Path) -> None:
    """Drop optimizer state from a downloaded folder."""
    for name in _STATE_FILES:
        (folder / name).unlink(missing_ok=True)


def check_room(target: Path, *, force: bool) -> None:
    if target.exists() and not force:
        raise click.ClickException(f"{target} exists. Name another, or give --force.")


def put(source: Path, target: Path) -> None:
    """Move a finished folder or file to its target, replacing what is there only now."""
    if target.is_dir():
        shutil.rmtree(target)
    # Writers of weights make files for their owner alone; an export is an ordinary file.
    umask = os.umask(0)
    os.umask(umask)
    for file in (source, *source.rglob("*")) if source.is_dir() else (source,):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
    source.replace(target)


def push_to_hub(
    state: State,
    path: str,
    repo_id: str,
    *,
    allow_pattern: tuple[str, ...],
    ignore_pattern: tuple[str, ...],
    **options: Any,
) -> None:
    """Download a checkpoint and push it; the options are those of the client's `push_to_hub`."""
    # Without a pattern every file goes; an empty list would let none through.
    options["allow_patterns"] = list(allow_pattern) or None
    options["ignore_patterns"] = list(ignore_pattern) or None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        fetch_folder(state, path, folder)
        downloads.push_to_hub(folder, repo_id, **options)


def trace_file(name: str) -> Path:
    """The file that a trace is written to by default."""
    return Path(f"{name.replace(':', '_').replace('/', '_')}.pftrace")  # not all disks take colons


def fetch_trace(url: str, target: Path) -> int:
    """Download aside, then rename: a broken download never looks like a finished one."""
    import httpx

    from tinkex.wire.loopback import DIRECT

    aside = target.with_name(target.name + ".part")
    try:
        with (
            httpx.Client(follow_redirects=True, timeout=60, mounts=DIRECT) as client,
            client.stream("GET", url) as answer,
        ):
            answer.raise_for_status()
            with aside.open("wb") as out:
                for piece in answer.iter_bytes():
                    out.write(piece)
    except httpx.HTTPError as exc:
        aside.unlink(missing_ok=True)
        raise click.ClickException(f"Could not download the trace: {exc}") from exc
    aside.replace(target)
    return target.stat().st_size
