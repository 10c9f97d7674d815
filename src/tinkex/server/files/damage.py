"""Whether the folder of a checkpoint or snapshot holds what an engine wrote into it.

A quick look reads what is small: JSON must be whole, and files of tensors as long as their headers
say. A deep one reads every byte of the weights and compares their digest with the manifest's, as an
engine does when it loads them. Folders from elsewhere have no manifest and no digest to compare.
Changes nothing. Blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinkex.engine.folders import DIGEST, MANIFEST, MANIFESTS
from tinkex.server.files.tensor_file import read_header

MAX_JSON_BYTES = 64_000_000
MAX_NAMES = 10_000_000
"""In files of our own engines, which wrote them: far more than any model has."""


def damage_of(folder: Path, *, deep: bool = False) -> str:
    """The first thing that is wrong with a folder, in words; empty when nothing is."""
    try:
        for file in sorted(folder.glob("*.json")):
            _check_json(file)
        for file in sorted(folder.glob("*.safetensors")):
            if not read_header(file, MAX_NAMES).is_whole:
                return f"{file.name} is not as long as its header says"
        return _digest_damage(folder) if deep else ""
    except Exception as exc:  # whatever reading it raises is damage
        return f"{type(exc).__name__}: {str(exc)[:200]}"


def _check_json(file: Path) -> None:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes")
    try:
        whole = isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{file.name} cannot be read, it may be cut off: {exc}") from exc
    if not whole:
        raise ValueError(f"{file.name} holds no JSON object")


def _digest_damage(folder: Path) -> str:
    for name in MANIFESTS:
        if not (folder / name).is_file():
            continue
        claimed = json.loads((folder / name).read_bytes()).get(DIGEST)
        content = _content_of(folder, name) if claimed else None
        if claimed != content:
            return f"its weights have the digest {content!s:.12}, but {claimed!s:.12} was written"
    return ""


def _content_of(folder: Path, manifest: str) -> str:
    """The digest of the weights as the engine that wrote them computes it."""
    # Imported here: neither numpy archives nor torch are needed for a quick look.
    if manifest == MANIFEST:
        from tinkex.engine.checkpoint.reader import content_of

        return content_of(folder)
    import numpy as np

    from tinkex.engine.toy import checkpoint

    with np.load(folder / checkpoint.ARRAYS) as arrays:
        return checkpoint.content_of(dict(arrays))
