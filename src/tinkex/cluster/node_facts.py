"""What a node has to have in common with the server, looked at on the node itself.

Code first: jobs are pickled between the two, and equal bits need equal programs, so every module
of ours must be the same. Then the files of the models that are named by a path.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tinkex


@dataclass(frozen=True, slots=True)
class NodeFacts:
    version: str
    code: str
    """A hash of all our modules."""
    python: str
    missing: tuple[str, ...] = ()
    """Models that are not on its disk."""


def look(models: Sequence[str]) -> NodeFacts:
    missing = tuple(name for name in models if is_path(name) and not _exists(name))
    return NodeFacts(tinkex.__version__, code_hash(), platform.python_version(), missing)


def is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))


def objection(facts: NodeFacts, ours: NodeFacts) -> str:
    """Why a node cannot be used; empty when it can."""
    if facts.code != ours.code or facts.python.split(".")[:2] != ours.python.split(".")[:2]:
        return (
            f"it has tinkex {facts.version} ({facts.code}) on Python {facts.python}, the server "
            f"has {ours.version} ({ours.code}) on Python {ours.python}; install the same there"
        )
    if facts.missing:
        return f"it has no model at {', '.join(facts.missing)}; copy the files there"
    return ""


@functools.cache
def code_hash() -> str:
    digest = hashlib.sha256()
    root = Path(tinkex.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _exists(name: str) -> bool:
    return Path(name).expanduser().exists()
