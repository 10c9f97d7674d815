"""Checkpoints whose home is an object store; the data folder holds copies of those in use.

A save is copied to the store before its row is written, so a row never names what is not there. A
folder that is not here is fetched when somebody needs it, once, however many ask. Copies that
nobody used lately go when there are too many; one whose original is not known to be in the store
never does. Recovery snapshots and unnamed sampler weights stay on the disk, beside the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tinkex.errors import ConfigError, how_to_install
from tinkex.server.files.folders import DataFolder, folder_size
from tinkex.store.binding import ID_FILE

if TYPE_CHECKING:
    from tinkex.server.files.object_store import Bucket

log = logging.getLogger(__name__)
T = TypeVar("T")
URL_FILE = "storage.url"
NUM_THREADS = 4
IN_USE_S = 600.0
"""A copy that was asked for within this time stays, whatever it takes."""


def is_stored(name: str) -> bool:
    """Whether a folder's home is the object store, where there is one."""
    return name.startswith("checkpoints/")


class Depot:
    def __init__(self, bucket: Bucket, folders: DataFolder, cache_bytes: int) -> None:
        self._bucket = bucket
        self._folders = folders
        self._cache_bytes = cache_bytes
        self._stored: set[str] = set()
        self._used_at: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        # Transfers may take minutes. On the loop's own threads they would hold up those that parse
        # bodies.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="depot")

    @classmethod
    def open(cls, url: str, data_dir: Path, cache_bytes: int) -> Depot:
        """The one of a data folder that is bound to its database. Blocks.

        Raises:
            ConfigError: The bucket cannot be used, or belongs to others, or `obstore` is missing.
        """
        try:
            from tinkex.server.files.object_store import Bucket
        except ImportError as exc:
            text = f"storage in a bucket needs obstore: {how_to_install('s3')}."
            raise ConfigError(text) from exc
        bucket = Bucket(url)
        known = storage_of(data_dir)
        if known not in (None, bucket.url):
            raise ConfigError(
                f"The checkpoints of {data_dir} are in {known}, not in {bucket.url}. Give that "
                f"one. If you have copied them, write {bucket.url} into {data_dir / URL_FILE}."
            )
        bucket.check()
        bucket.bind((data_dir / ID_FILE).read_text(encoding="utf-8").strip())
        depot = cls(bucket, DataFolder(data_dir), cache_bytes)
        depot._stored = bucket.stored()
        # Last, because `refuse_without` holds the folder to this URL from now on: it is written
        # only for a bucket that works and is bound to this database.
        (data_dir / URL_FILE).write_text(f"{bucket.url}\n", encoding="utf-8")
        return depot

    @property
    def url(self) -> str:
        return self._bucket.url

    def has(self, name: str) -> bool:
        return name in self._stored

    def unknown(self, known: set[str]) -> list[str]:
        """Folders in the store that no row knows. They stay: only an operator may remove them."""
        return sorted(self._stored - known)

    async def put(self, name: str) -> None:
        """Copy a complete folder to the store."""
        await self._run(lambda: self._bucket.put_folder(name, self._folders.path(name)))
        self._stored.add(name)
        self._used_at[name] = time.monotonic()

    async def fetch(self, name: str) -> None:
        """Have a copy here."""
        self._used_at[name] = time.monotonic()
        folder = self._folders.path(name)
        if folder.is_dir():
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            if not folder.is_dir() and name in self._stored:
                await self._run(lambda: self._bucket.get_folder(name, folder))

    async def remove(self, name: str) -> bool:
        """Remove one that the database says was deleted; False when it is still there."""
        if not await self._run(lambda: self._bucket.remove(name)):
            log.warning("%s could not be removed from %s; it is tried again", name, self.url)
            return False
        self._stored.discard(name)
        self._used_at.pop(name, None)
        self._locks.pop(name, None)
        return True

    async def move_in(self, known: set[str]) -> None:
        """Copy what is listed and lies only here: the checkpoints from before there was a store."""
        names = sorted(name for name in known - self._stored if is_stored(name))
        names = [name for name in names if self._folders.path(name).is_dir()]
        for name in names:
            await self.put(name)
        if names:
            log.info("%d checkpoints were copied to %s", len(names), self.url)

    async def trim(self) -> None:
        """Remove the copies that were used least lately, while they take too much of the disk."""
        await self._run(self._trim)

    def _trim(self) -> None:
        sizes = {name: folder_size(self._folders.path(name)) for name in self._stored}
        excess = sum(sizes.values()) - self._cache_bytes
        used_at = {name: self._used_at.get(name, -math.inf) for name in sizes if sizes[name]}
        limit = time.monotonic() - IN_USE_S
        for name in sorted(used_at, key=lambda name: used_at[name]):
            if excess <= 0 or used_at[name] > limit:
                return
            folder = self._folders.path(name)
            aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                folder.rename(aside)  # whole or not at all, for whoever looks
            shutil.rmtree(aside, ignore_errors=True)
            excess -= sizes[name]

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def storage_of(data_dir: Path) -> str | None:
    """Where a data folder's checkpoints are kept; None: in itself."""
    try:
        return (data_dir / URL_FILE).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def refuse_without(data_dir: Path) -> None:
    """Refuse to serve from the disk alone what is kept in an object store.

    Raises:
        ConfigError: It is.
    """
    known = storage_of(data_dir)
    if known is not None:
        raise ConfigError(
            f"The checkpoints of {data_dir} are in {known}: give --storage {known}. If they are "
            f"back in the folder, delete {data_dir / URL_FILE}."
        )
