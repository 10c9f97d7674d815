"""The one object a server holds to remember things across a crash.

`Store` opens the database and offers one attribute per noun. Reads and writes block (a write until
it is committed): call them off the event loop, with `await store.call(store.models.get, id)`. The
journal's hot methods, `sessions.heartbeat`, `models.touch` and `usage.add` never block; the
journal's return `concurrent.futures.Future`s (`await asyncio.wrap_future(...)`). The store knows no
HTTP, no tensors, and of the folders that rows name only whether they belong to this database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tinkex.store.accounts import Accounts
from tinkex.store.binding import bind
from tinkex.store.budgets import StoredBudgets
from tinkex.store.checkpoints import Audit, CheckpointNames, Checkpoints
from tinkex.store.claim import Claim, Fence
from tinkex.store.curves import Curves
from tinkex.store.database import open_database, sqlite_url
from tinkex.store.folders import Folders
from tinkex.store.journal import RESULT_TTL_S, ROW_TTL_S, Journal
from tinkex.store.models import Models
from tinkex.store.rates import StoredRates
from tinkex.store.runs import Runs
from tinkex.store.sampling import Sampling
from tinkex.store.sessions import Sessions
from tinkex.store.stored_bytes import Counts, recount
from tinkex.store.trajectories import Trajectories
from tinkex.store.usage import Usage
from tinkex.store.writer import GroupWriter

T = TypeVar("T")
NUM_THREADS = 4


class Store:
    """Open with a database URL, or with `Store.in_folder(data_dir)`. Close it to lose nothing.

    `full_sync` False lets a power cut (never a crash of the process) undo the last moments.
    """

    def __init__(
        self,
        url: str,
        *,
        full_sync: bool = True,
        result_ttl_s: float = RESULT_TTL_S,
        row_ttl_s: float = ROW_TTL_S,
    ) -> None:
        self._database = open_database(url, full_sync=full_sync)
        self._writer = GroupWriter(self._database.writer)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tinkex-store")
        self._claim = Claim(self._database.writer)
        reader = self._database.reader
        self.stored = self._writer.stored
        self.accounts = Accounts(reader, self._writer)
        self.sessions = Sessions(reader, self._writer)
        self.models = Models(reader, self._writer)
        self.runs = Runs(reader, self._writer)
        self.usage = Usage(reader, self._writer)
        self.rates = StoredRates(reader, self._writer)
        self.budgets = StoredBudgets(reader, self._writer)
        self.journal = Journal(reader, self._writer, result_ttl_s, row_ttl_s)
        self.sampling = Sampling(reader, self._writer)
        self.checkpoints = Checkpoints(reader, self._writer)
        self.folders = Folders(reader, self._writer)
        self.names = CheckpointNames(reader, self._writer)
        self.curves = Curves(reader, self._writer)
        self.trajectories = Trajectories(reader, self._writer)
        self.audit = Audit(reader, self._writer)

    @classmethod
    def in_folder(cls, data_dir: Path, **how: Any) -> Store:
        """The SQLite store of a data folder, which is made when absent; `how` as for `Store`."""
        data_dir.mkdir(parents=True, exist_ok=True)
        return cls(sqlite_url(data_dir), **how)

    def claim(self, timeout_s: float = 10.0, *, data_dir: Path | None = None) -> None:
        """Make sure that no other server uses this database, until `close`. Blocks.

        Args:
            data_dir: The folder of the files that rows name: no other server may use it either,
                and it must belong to this database.

        Raises:
            ConfigError: Another one does, or the two do not belong together.
        """
        # The fence comes last: a server that is refused for its data folder must not stop one that
        # lost its lock with its connection and still writes.
        self._claim.take(timeout_s, data_dir)
        if data_dir is not None:
            bind(self._database.writer, data_dir)
        if self._claim.can_be_lost:
            self._writer.fence = Fence(self._database.writer)

    def count_bytes(self) -> None:
        """Take the counts of `stored` from the database, once; writes keep them from then on."""
        self._writer.run(self.stored.load)

    def recount_bytes(self) -> Counts:
        """The bytes of all users as the database says, which `stored` must be equal to."""
        return self._writer.run(recount)

    def on_fenced(self, told: Callable[[], None]) -> None:
        """Be told, on another thread, when another server took this database over."""
        self._writer.on_fenced = told

    async def call(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking method of a noun on the store's own threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(method, *args, **kwargs))

    def flush(self) -> None:
        """Wait until everything handed in so far is committed: journal, heartbeats, counts."""
        self._writer.flush()

    def close(self) -> None:
        """Commit everything that was handed in, then let go of the database."""
        self._pool.shutdown(wait=True)
        self._writer.close()
        # After the last commit: the next server reads the journal as soon as it has the claim.
        self._claim.release()
        self._database.dispose()
