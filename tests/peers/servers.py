"""Start `tinkex serve` as users do, as a process on a free loopback port, and stop it again."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 15


@dataclass(frozen=True)
class Running:
    base_url: str
    pid: int
    log: Path


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Running]:
    """A server over `folder` for as long as the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--data-dir", str(folder)]
    with log.open("a") as stderr:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        yield Running(_announced(process, log)["base_url"], process.pid, log)
    finally:
        stop(process)


def _announced(process: subprocess.Popen[str], log: Path) -> dict[str, str]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + START_TIMEOUT_S
        if not selector.select(deadline - time.monotonic()):
            raise TimeoutError(f"the server said nothing for {START_TIMEOUT_S} s; see {log}")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the server ended at start:\n{log.read_text()[-3000:]}")
    announced: dict[str, str] = json.loads(line)
    return announced


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
