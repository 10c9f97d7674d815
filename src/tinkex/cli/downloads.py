"""Bring checkpoints to this machine or the hub, with a bar where a person waits."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from tinkex.cli.state import State
from tinkex.client.service import downloads
from tinkex.client.service.downloads import download_checkpoint, folder_name, progress_bar

__all__ = ["check_room", "fetch_folder", "folder_name", "keep_adapter_only", "push_to_hub", "put"]

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
