"""Sample results that wait to be fetched: so many bytes in memory, more on disk, and an end.

Samples of one user may fill a share of the memory; what comes after is written to a file and read
again when it is asked for. A sample whose result may not stay in memory is accepted only with room
for the largest that it can be in its user's quota on the disk, and no result takes the last room of
the disk. Files are scratch: promises do not survive a restart, so the folder is emptied at the
start. Knows bytes and users, not tokens.
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
from tinkex.server.files.disk_quota import DiskQuota, OverQuotaError, megabytes
from tinkex.server.process.disk import Room
from tinkex.server.process.problems import ApiError
from tinkex.server.work.futures import Promise
from tinkex.store.journal import result_name

logger = logging.getLogger(__name__)
SMALL_BYTES = 4096
"""Results below this stay in memory: a file costs more."""


class KeptResults:
    def __init__(
        self, folder: Path, *, memory_bytes: int, disk_quota: DiskQuota, room: Room
    ) -> None:
        self._folder = folder
        self._memory_limit = memory_bytes
        self._disk_quota = disk_quota
        self._room = room
        self._in_memory: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._expected: Counter[str] = Counter()
        """By user, the most that results of samples under way may take."""
        self._expected_of: dict[str, int] = {}
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

    def expect(self, promise: Promise, num_bytes: int) -> None:
        """A sample is accepted whose result has at most so many bytes.

        Raises:
            ApiError: 429: with what its user did not fetch it may not fit their disk quota.
        """
        user_id = promise.user_id
        if self._kept[user_id] + self._expected[user_id] + num_bytes > self._share:
            try:
                self._disk_quota.admit(result_name(promise.request_id), user_id, num_bytes)
            except OverQuotaError:
                raise self._refusal(user_id, num_bytes) from None
        self._expected[user_id] += num_bytes
        self._expected_of[promise.request_id] = num_bytes

    def forget(self, promise: Promise) -> None:
        """A sample that was expected has ended, or was not accepted after all."""
        expected = self._expected_of.pop(promise.request_id, 0)
        take_from(self._expected, promise.user_id, expected)
        self._disk_quota.release(result_name(promise.request_id))

    def keep(self, promise: Promise) -> None:
        """A promise was settled. Must be given back with `drop`."""
        user_id = promise.user_id
        self.forget(promise)
        size = promise.outcome.size_bytes if promise.outcome else 0
        if not size or promise.request_id in self._sizes:
            return
        self._sizes[promise.request_id] = size
        self._kept[user_id] += size
        self._in_memory[user_id] += size
        if size >= SMALL_BYTES and (
            self._in_memory[user_id] > self._share or self.memory_bytes > self._memory_limit
        ):
            self._disk_quota.hold(result_name(promise.request_id), user_id, size)
            task = asyncio.create_task(self._spill(promise))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def drop(self, promise: Promise) -> None:
        """Its result was fetched, or its time is over."""
        size = self._sizes.pop(promise.request_id, 0)
        take_from(self._kept, promise.user_id, size)
        self._disk_quota.release(result_name(promise.request_id))
        outcome = promise.outcome
        if outcome is not None and outcome.file is not None:
            asyncio.get_running_loop().run_in_executor(None, _unlink, outcome.file)
        else:
            take_from(self._in_memory, promise.user_id, size)

    @property
    def _share(self) -> int:
        """Bytes of one user in memory, above which the next ones go to the disk."""
        return self._memory_limit // 4

    async def _spill(self, promise: Promise) -> None:
        outcome = promise.outcome
        assert outcome is not None
        file = self._folder / secrets.token_hex(16)
        try:
            self._room.require()
            await asyncio.to_thread(_write, file, outcome.payload)
        except OSError as exc:
            logger.warning("a result stays in memory: %s", exc.strerror or exc)
            self._disk_quota.release(result_name(promise.request_id))
            await asyncio.to_thread(_unlink, file)
            return
        if promise.request_id not in self._sizes:  # fetched meanwhile
            await asyncio.to_thread(_unlink, file)
            return
        size = len(outcome.payload)
        promise.outcome = replace(
            outcome, payload=b"", file=file, load=file.read_bytes, stored_bytes=size
        )
        take_from(self._in_memory, promise.user_id, size)

    def _refusal(self, user_id: str, num_bytes: int) -> ApiError:
        waiting = megabytes(self._kept[user_id])
        expected = megabytes(self._expected[user_id])
        left = self._disk_quota.left(user_id) or 0
        return ApiError(
            429,
            f"{waiting} of your results wait to be fetched and {expected} may come of samples "
            f"under way; this one may have {megabytes(num_bytes)}, and your disk quota has "
            f"{megabytes(left)} left ('disk_bytes'). Fetch results before you ask for more "
            "samples, or delete what you do not need.",
            code="quota",
            headers={"Retry-After": "5"},
        )


def _write(file: Path, payload: bytes) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_bytes(payload)


def _unlink(file: Path) -> None:
    file.unlink(missing_ok=True)
