"""One server per database: two would replay the same journal and overwrite each other's state.

The claim is a lock that the system drops with the process, however it ends: an advisory lock of
PostgreSQL, or a locked file beside the SQLite file. Readers need no claim.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO

from sqlalchemy import Connection, Engine, text

from tinkex.errors import ConfigError

POLL_S = 0.1
_PG_KEY = 0x74696E6B6578  # "tinkex"


class Claim:
    """Held from `take` to `release`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._file: IO[str] | None = None
        self._connection: Connection | None = None

    def take(self, timeout_s: float) -> None:
        """Wait for the claim, as a server that is just stopping may still hold it.

        Raises:
            ConfigError: Another server keeps it.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Another server uses {self._engine.url.render_as_string()}{self._holder()}. "
                    "Stop it, or use it (TINKER_BASE_URL names its address), or give this one its "
                    "own --data-dir, --database or TINKEX_HOME."
                )
            time.sleep(POLL_S)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _try(self) -> bool:
        if self._engine.dialect.name == "postgresql":
            return self._try_postgresql()
        return self._try_file(Path(f"{self._engine.url.database}.lock"))

    def _try_postgresql(self) -> bool:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(
                isolation_level="AUTOCOMMIT"
            )
        found = self._connection.execute(text("SELECT pg_try_advisory_lock(:k)"), {"k": _PG_KEY})
        return bool(found.scalar_one())

    def _try_file(self, path: Path) -> bool:
        try:
            import fcntl
        except ImportError:  # Windows: no such lock; the port is the only guard there.
            return True
        if self._file is None:
            self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return True

    def _holder(self) -> str:
        if self._file is None:
            return ""
        self._file.seek(0)
        return f" (process {self._file.read().strip() or 'unknown'})"
