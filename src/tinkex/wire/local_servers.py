"""Servers on this machine: the small files by which programs of one user find them.

Each file is a JSON object in the user's state folder and says where a server listens and which
process it is. `tinkex serve` writes its own to `serving/`, the embedded server's is written by the
client that started it. A killed server leaves its file, so a reader asks whether the process lives.
Homes are shared between machines and containers: a file is removed only when its server is dead for
certain, written on this machine by a process that is no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SERVING = "serving"
"""Folder of the state folder in which every `tinkex serve` says where it listens."""
RUN_NAMES = "runs.json"
"""File of the state folder with the names of runs and their log folders."""


def state_folder(env: Mapping[str, str] | None = None) -> Path:
    """The folder of all that Tinkex keeps for this user: `$TINKEX_HOME`, else `~/.tinkex`."""
    env = os.environ if env is None else env
    return Path(env.get("TINKEX_HOME") or Path.home() / ".tinkex")


def private_data_folder(env: Mapping[str, str] | None = None) -> Path:
    """Where the private server keeps its database and checkpoints."""
    env = os.environ if env is None else env
    return state_folder(env) / private_kind(env)


def private_kind(env: Mapping[str, str]) -> str:
    """The kind of engine, for each has a server: a test's toy is not a notebook's model."""
    engine = env.get("TINKEX_LOCAL_ENGINE")
    return f"local-{''.join(c if c.isalnum() else '_' for c in engine)}" if engine else "local"


def read_record(file: Path) -> dict[str, Any]:
    """The facts in a server's file; empty when it is gone or not one of ours."""
    try:
        facts = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def living_servers(env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The records of every `tinkex serve` of this user whose process is there.

    A killed server leaves its file; the next one that starts removes it.
    """
    for file in sorted((state_folder(env) / SERVING).glob("*.json")):
        record = read_record(file)
        if record and is_alive(record.get("pid")):
            yield record


def keeper_of(data_folder: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The record of the living `tinkex serve` of this machine that has a data folder, or {}."""
    # A home may be shared: a process of another machine may have the number of one of ours.
    here = {**this_machine(), "data_dir": str(data_folder.resolve())}
    keepers = (record for record in living_servers(env) if here.items() <= record.items())
    return next(keepers, {})


def write_record(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace a server's file in one step: no reader meets half of it."""
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(facts), "utf-8")
    os.replace(aside, file)


def is_alive(pid: object) -> bool:
    """Whether a process exists and is no zombie; True where that cannot be known."""
    if os.name != "posix" or not isinstance(pid, int) or pid < 1:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # The program's name comes first, in parentheses, and may hold parentheses of its own.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return True  # no /proc here; the signal said that it exists


def this_machine() -> dict[str, str]:
    """Names of this machine, of its start, and of the namespace of process ids we are in.

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


def remove_dead(folder: Path) -> None:
    """Remove the files of servers that are dead for certain."""
    here = this_machine()
    for file in folder.glob("*.json"):
        facts = read_record(file)
        if facts and _is_dead(facts, here):
            file.unlink(missing_ok=True)


def _is_dead(facts: Mapping[str, Any], here: Mapping[str, str]) -> bool:
    """Whether a server's process is known to have ended; False where this machine cannot know."""
    if facts.get("host") != here["host"]:
        return False
    if facts.get("boot") != here["boot"]:
        return True
    return facts.get("pids") == here["pids"] and not is_alive(facts.get("pid"))
