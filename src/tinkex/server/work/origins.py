"""Where a sample's weights come from: their name, the hash of their content, their step.

Read once from a checkpoint's manifest and remembered, because a folder never changes under its
name. Weights from elsewhere have no manifest, and base models no folder: less is said of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any

from tinkex.engine.folders import DIGEST, read_manifest
from tinkex.server.files.checkpoints import Shelf
from tinkex.store import SamplingSession

MAX_REMEMBERED = 10_000


class Origins:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def of(self, session: SamplingSession) -> dict[str, Any]:
        """The path, step and content hash of a session's weights, as far as they are known."""
        facts = {} if session.folder is None else await self._facts(session.folder)
        path = {} if session.model_path is None else {"path": session.model_path}
        return path | facts

    async def _facts(self, name: str) -> dict[str, Any]:
        facts = self._known.get(name)
        if facts is None:
            folder = await self._shelf.at_hand(name)
            facts = self._known[name] = await asyncio.to_thread(_read, folder)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return facts


def _read(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    facts = {"step": manifest.get("step"), "content": manifest.get(DIGEST)}
    kinds = {"step": int, "content": str}
    return {name: value for name, value in facts.items() if isinstance(value, kinds[name])}
