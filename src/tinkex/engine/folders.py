"""The folder of a checkpoint: names of its files, and how it is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter, as PEFT names them."""
MANIFEST, TOY_MANIFEST = "tinkex.json", "manifest.json"
MANIFESTS = (MANIFEST, TOY_MANIFEST)
DIGEST = "content_sha256"
"""The field of a manifest with the digest of the weights, as they were when they were written."""


def write_whole(
    target: Path,
    fill: Callable[[Path], None],
    texts: Mapping[str, Mapping[str, Any]],
    *,
    sync: bool = True,
) -> int:
    """Write files aside and rename the folder; gives its size. The folder must not exist yet.

    Args:
        fill: Writes into the folder it is given.
        texts: JSON by file name, written after that.
        sync: False: it outlives this process at once, a crash of the machine only after
            `make_safe`.
    """
    if target.exists():
        raise InvalidInputError(f"{target.name} exists already; a checkpoint is never overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        fill(aside)
        for name, value in texts.items():
            (aside / name).write_text(json.dumps(value, indent=2) + "\n")
        size_bytes = sum(file.stat().st_size for file in aside.iterdir())
        aside.chmod(0o755)
        if sync:
            make_safe(aside)
        aside.rename(target)
        if sync:
            _sync(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return size_bytes


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that an engine of ours wrote into a folder; empty for folders from elsewhere."""
    for name in MANIFESTS:
        try:
            manifest = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        return manifest if isinstance(manifest, dict) else {}
    return {}


def make_safe(folder: str | Path) -> None:
    """Have a folder and its files on the disk, not only on their way to it."""
    for path in (*Path(folder).iterdir(), Path(folder)):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
