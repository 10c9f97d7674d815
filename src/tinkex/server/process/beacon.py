"""Tell programs of the same user where this server listens, so that local mode can join it.

One small file per server in `$TINKEX_HOME/serving`, written once requests are answered and removed
at the end; `wire/local_servers.py` says how such files are read, and when a dead server's goes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.owner import OWNER_TOKEN
from tinkex.wire.local_servers import (
    SERVING,
    remove_dead,
    state_folder,
    this_machine,
    write_record,
)


class Beacon:
    """The file of this server, there while it is lit."""

    def __init__(self, config: ServerConfig, base_url: str, *, needs_key: bool) -> None:
        self._is_private = bool(config.parent_pid)
        self._file = state_folder() / SERVING / f"{os.getpid()}.json"
        self._content = {
            "base_url": base_url,
            "pid": os.getpid(),
            "engine": config.engine,
            "models": [*(config.models or (DEFAULT_MODEL,)), *config.aliases],
            "needs_key": needs_key,
            "data_dir": str(config.data_dir.resolve()),
            **({} if needs_key else {"owner_token": OWNER_TOKEN}),
            **this_machine(),
        }

    @contextlib.contextmanager
    def lit(self) -> Iterator[None]:
        """Best effort: a home that cannot be written costs local mode a server, not this one."""
        with contextlib.suppress(OSError):
            remove_dead(self._file.parent)
        if self._is_private:  # local mode has a record of its own for it
            yield
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.parent.chmod(0o700)  # the files have the owner's token
            write_record(self._file, self._content)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
