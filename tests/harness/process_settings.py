"""How `tinkex serve` is run inside a test process, up to where it refuses to start.

`serve` takes its process for its own: it sets up the log, the umask and how often threads take
turns. A log handler of it that stays writes to a stream that is closed when the test ends, and
prints a traceback for every line; the umask changes the files of all later tests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Give the process back what `serve` set in it."""
    root, error_log = logging.getLogger(), logging.getLogger("uvicorn.error")
    levels = {name: logging.getLogger(name).level for name in ("", "alembic", "uvicorn")}
    handlers, filters = root.handlers[:], error_log.filters[:]
    switch_s, umask = sys.getswitchinterval(), os.umask(0o022)
    os.umask(umask)
    try:
        yield
    finally:
        os.umask(umask)
        sys.setswitchinterval(switch_s)
        root.handlers[:], error_log.filters[:] = handlers, filters
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
