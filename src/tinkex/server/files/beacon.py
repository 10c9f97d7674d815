"""Tell programs of the same user where this server listens, so that local mode can join it.

One small file per server in `$TINKEX_HOME/serving`, written once requests are answered and removed
at the end. A server that was killed leaves its file; whoever reads it asks the address first.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.server.config import ServerConfig, state_folder


class Beacon:
    def __init__(self, config: ServerConfig, base_url: str, *, needs_key: bool) -> None:
        self._is_private = bool(config.parent_pid)
        self._file = state_folder() / "serving" / f"{os.getpid()}.json"
        self._content = {
            "base_url": base_url,
            "pid": os.getpid(),
            "engine": config.engine,
            "models": [*(config.models or (DEFAULT_MODEL,)), *config.aliases],
            "needs_key": needs_key,
        }

    @contextlib.contextmanager
    def lit(self) -> Iterator[None]:
        """Best effort: a home that cannot be written costs local mode a server, not this one."""
        if self._is_private:  # local mode has a record of its own for it
            yield
            return
        with contextlib.suppress(OSError):
            self._write(self._file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _write(self, file: Path) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(self._content), "utf-8")
        os.replace(aside, file)
