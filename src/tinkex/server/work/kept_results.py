"""Sample results that wait to be fetched: so many bytes in memory, more on disk, and an end.

Samples of one user may fill a share of the memory; what comes after is written to a file and read
again when it is asked for. Files are scratch: promises do not survive a restart, so the folder is
emptied at the start. Knows bytes and users, not tokens, and refuses nobody.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tinkex.server.fairness.line import take_from
from tinkex.server.work.futures import Promise

logger = logging.getLogger(__name__)
SMALL_BYTES = 4096
"""Results below this stay in memory: a file costs more."""


class KeptResults:
    def __init__(self, folder: Path, *, memory_bytes: int) -> None:
        self._folder = folder
        self._memory_limit = memory_bytes
        self._in_memory: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}
        self._writing: set[asyncio.Task[None]] = set()
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def memory_bytes(self) -> int:
        return self._in_memory.total()

    @property
    def kept_bytes(self) -> int:
        return self._kept.total()

    @property
    def by_user(self) -> Mapping[str, int]:
        return self._kept

    def bytes_of(self, user_id: str) -> int:
        """Of one user, in memory and on disk."""
        return self._kept[user_id]

    def keep(self, promise: Promise) -> None:
        """A promise was settled. Must be given back with `drop`."""
        size = promise.outcome.size_bytes if promise.outcome else 0
        if not size or promise.request_id in self._sizes:
            return
        user_id = promise.user_id
        self._sizes[promise.request_id] = size
        self._kept[user_id] += size
        self._in_memory[user_id] += size
        share = self._memory_limit // 4
        if size >= SMALL_BYTES and (
            self._in_memory[user_id] > share or self.memory_bytes > self._memory_limit
        ):
            task = asyncio.create_task(self._spill(promise))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def drop(self, promise: Promise) -> None:
        """Its result was fetched, or its time is over."""
        size = self._sizes.pop(promise.request_id, 0)
        take_from(self._kept, promise.user_id, size)
        outcome = promise.outcome
        if outcome is not None and outcome.file is not None:
            asyncio.get_running_loop().run_in_executor(None, _unlink, outcome.file)
        else:
            take_from(self._in_memory, promise.user_id, size)

    async def _spill(self, promise: Promise) -> None:
        outcome = promise.outcome
        assert outcome is not None
        file = self._folder / secrets.token_hex(16)
        try:
            await asyncio.to_thread(_write, file, outcome.payload)
        except OSError as exc:
            logger.warning("a result stays in memory: %s", exc.strerror)
            return
        if promise.request_id not in self._sizes:  # fetched meanwhile
            await asyncio.to_thread(_unlink, file)
            return
        size = len(outcome.payload)
        promise.outcome = replace(
            outcome, payload=b"", file=file, load=file.read_bytes, stored_bytes=size
        )
        take_from(self._in_memory, promise.user_id, size)


def _write(file: Path, payload: bytes) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_bytes(payload)


def _unlink(file: Path) -> None:
    file.unlink(missing_ok=True)
