"""One server per database and per data folder: two would replay the same journal and overwrite
each other's state.

A claim is a lock that the system drops with the process, however it ends: an advisory lock of
PostgreSQL, a locked file beside the SQLite file, a locked file in the data folder. Readers need no
claim.

The lock of PostgreSQL ends with its connection, and a second server may take it while the first one
still runs. So there each claim also raises an epoch in the database (`Fence`), and each transaction
of the writer first looks whether the epoch is still its own; the row stays shared until the commit,
so no claim comes in between. The lock of a file ends with its process, and needs no fence; a writer
without a claim (`tinkex keys`) has none either.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, Engine, select, text, update
from sqlalchemy.exc import OperationalError

from tinkex.errors import ConfigError, TinkerError
from tinkex.store import schema
from tinkex.store.upsert import insert_or_ignore

POLL_S = 0.1
LOCK_FILE = "store.lock"
_PG_KEY = 0x74696E6B6578  # "tinkex"
_EPOCH = "epoch"
_epoch_row = schema.meta.c.name == _EPOCH


class InUseError(ConfigError):
    """Another server holds what this one needs; it may be ending just now."""


class FileLock:
    """A file that one process at a time holds locked; it holds that process's number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def try_take(self) -> bool:
        try:
            import fcntl
        except ImportError:  # Windows: no such lock; the port is the only guard there.
            return True
        if self._file is None:
            # Not "w", which would erase the holder's process number before the lock is ours.
            self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return True

    def holder(self) -> str:
        """The process that holds the lock, in words."""
        if self._file is None:
            return ""
        self._file.seek(0)
        return f" (process {self._file.read().strip() or 'unknown'})"

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Claim:
    """The locks that make this process the only server of a database and a data folder."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._database_lock = FileLock(Path(f"{engine.url.database}.lock"))
        self._folder_lock: FileLock | None = None
        self._connection: Connection | None = None

    def take(self, timeout_s: float, data_dir: Path | None = None) -> None:
        """Wait for the claim, as a server that is just stopping may still hold it.

        Raises:
            InUseError: Another server keeps it.
        """
        deadline = time.monotonic() + timeout_s
        if data_dir is not None and self._folder_lock is None:
            self._folder_lock = FileLock(data_dir / LOCK_FILE)
        while (other := self._try(data_dir)) is not None:
            if time.monotonic() > deadline:
                raise InUseError(
                    f"Another server uses {other}. "
                    "Stop it, or use it (TINKER_BASE_URL names its address), or give this one its "
                    "own --data-dir, --database or TINKEX_HOME."
                )
            time.sleep(POLL_S)

    @property
    def can_be_lost(self) -> bool:
        """Whether another server may take it while this process runs."""
        return self._engine.dialect.name == "postgresql" or sys.platform == "win32"

    def release(self) -> None:
        self._database_lock.release()
        if self._folder_lock is not None:
            self._folder_lock.release()
        if self._connection is not None:
            self._connection.invalidate()  # a pool would keep it open, and the lock with it
            self._connection.close()
            self._connection = None

    def _try(self, data_dir: Path | None) -> str | None:
        """Try all locks: the one that another process holds, or None if we hold them all."""
        if self._folder_lock is not None and not self._folder_lock.try_take():
            return f"the data folder {data_dir}{self._folder_lock.holder()}"
        if self._engine.dialect.name == "postgresql":
            is_ours, holder = self._try_postgresql(), ""
        else:
            is_ours, holder = self._database_lock.try_take(), self._database_lock.holder()
        return None if is_ours else f"{self._engine.url.render_as_string()}{holder}"

    def _try_postgresql(self) -> bool:
        if self._connection is None:
            # The lock belongs to the connection, not to a transaction. An open one would idle for
            # days, and PostgreSQL may end it (idle_in_transaction_session_timeout).
            self._connection = self._engine.connect().execution_options(
                isolation_level="AUTOCOMMIT"
            )
        query = text("SELECT pg_try_advisory_lock(:k)")
        try:
            return bool(self._connection.execute(query, {"k": _PG_KEY}).scalar_one())
        except OperationalError:  # the connection died while we waited; the next try has another
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
            return False


class FencedError(TinkerError, RuntimeError):
    """Another server took over this database; nothing of this one is written any more."""

    code = "fenced"


class Fence:
    """The epoch of one claim, which ends when another server claims the database."""

    def __init__(self, engine: Engine) -> None:
        """Raise the epoch: every fence before this one refuses from now on."""
        with engine.begin() as connection:
            connection.execute(insert_or_ignore(connection, schema.meta), _first())
            current = select(schema.meta.c.value).where(_epoch_row).with_for_update()
            self.epoch = int(connection.execute(current).scalar_one()) + 1
            raised = update(schema.meta).where(_epoch_row).values(value=str(self.epoch))
            connection.execute(raised)
        # Every transaction asks this, so it is compiled once.
        query = select(schema.meta.c.value).where(_epoch_row).with_for_update(read=True)
        self._query = str(query.compile(engine, compile_kwargs={"literal_binds": True}))

    def check(self, connection: Connection) -> None:
        """To be called first in a transaction.

        Raises:
            FencedError: The epoch is another's.
        """
        epoch = connection.exec_driver_sql(self._query).scalar()
        if epoch != str(self.epoch):
            raise FencedError(
                f"Another server took over this database (epoch {epoch}, this one has "
                f"{self.epoch}). This one stops; what it accepted is the other's now."
            )


def _first() -> dict[str, str]:
    return {"name": _EPOCH, "value": "0"}
