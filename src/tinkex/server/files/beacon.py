"""Tell programs of the same user where this server listens, so that local mode can join it.

One small file per server in `$TINKEX_HOME/serving`, written once requests are answered and removed
at the end. A server that was killed leaves its file: whoever reads it asks the address first, and
the next server removes it. Homes are shared between machines and containers, so a file goes only
when its server is dead for certain: written on this machine, by a process that is no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.server.config import ServerConfig, state_folder
from tinkex.server.presence import is_alive


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
            **_here(),
        }

    @contextlib.contextmanager
    def lit(self) -> Iterator[None]:
        """Best effort: a home that cannot be written costs local mode a server, not this one."""
        with contextlib.suppress(OSError):
            _remove_dead(self._file.parent)
        if self._is_private:  # local mode has a record of its own for it
            yield
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            aside = self._file.with_suffix(".new")
            aside.write_text(json.dumps(self._content), "utf-8")
            os.replace(aside, self._file)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)


def _remove_dead(folder: Path) -> None:
    here = _here()
    for file in folder.glob("*.json"):
        try:
            written = json.loads(file.read_bytes())
        except (OSError, ValueError):  # removed meanwhile, or not one of ours
            continue
        if isinstance(written, dict) and _is_dead(written, here):
            file.unlink(missing_ok=True)


def _is_dead(written: dict[str, Any], here: dict[str, str]) -> bool:
    """Whether its process is known to have ended; False where this machine cannot know."""
    if written.get("host") != here["host"]:
        return False
    if written.get("boot") != here["boot"]:
        return True
    pid = written.get("pid")
    return written.get("pids") == here["pids"] and isinstance(pid, int) and not is_alive(pid)


def _here() -> dict[str, str]:
    """Which machine this is, which start of it, and in which world of process ids we are.

    Containers may share a home and a boot, and each counts processes from one.
    """
    machine, boot, pids = "", "", ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    return {"host": f"{socket.gethostname()} {machine}".strip(), "boot": boot, "pids": pids}
