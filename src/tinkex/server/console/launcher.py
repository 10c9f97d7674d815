"""Commands that a person starts from the browser, as child processes on their own machine.

For the owner of a server on this machine, or of a folder of runs, and for nobody else: a recipe
reads files and runs reward functions in the owner's name. A server with keys for several people has
no launcher; its pages show the command instead. What runs, what is kept and what is logged is
bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.server.console.command_line import line
from tinkex.server.process.problems import ApiError

MAX_RUNNING = 4
MAX_KEPT = 30
MAX_LOG = 200_000
STOP_S = 3.0
# As in a terminal, no module is taken from the folder where the server was started (-P).
_PROGRAM = (sys.executable, "-P", "-m", "tinkex.cli")
_INTERRUPTED = 130


@dataclass(slots=True)
class Launch:
    """A command, and what it printed last."""

    launch_id: str
    argv: tuple[str, ...]
    process: asyncio.subprocess.Process
    started_at: float
    output: bytearray = field(default_factory=bytearray)
    is_stopping: bool = False
    reader: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        """In the words that runs have: running, finished, stopped or failed."""
        code = self.process.returncode
        if code is None:
            return "running"
        if code == 0:
            return "finished"
        return "stopped" if self.is_stopping or code == _INTERRUPTED else "failed"

    def facts(self) -> dict[str, Any]:
        return {
            "launch_id": self.launch_id,
            "command": line(self.argv),
            "status": self.status,
            "is_stopping": self.is_stopping,
            "is_recipe": self.argv[:1] == ("train",),
            "started_at": self.started_at,
            "log": _text(self.output),
        }


class Launcher:
    """All commands of one console. On the event loop only."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, needs_token: bool) -> None:
        """Run commands in `folder` with more variables of the environment.

        Args:
            needs_token: The visitor must prove to be the owner: everyone on this machine can ask.
        """
        self.folder = folder
        self.needs_token = needs_token
        self._env = env
        self._launches: OrderedDict[str, Launch] = OrderedDict()
        self._starting = 0

    @property
    def launches(self) -> list[Launch]:
        """The newest first."""
        return list(reversed(self._launches.values()))

    def get(self, launch_id: str) -> Launch:
        if launch_id not in self._launches:
            raise ApiError(
                404, f"No command {launch_id[:40]!r}; this server may have been restarted."
            )
        return self._launches[launch_id]

    async def start(self, argv: Sequence[str], base_url: str) -> Launch:
        """Run `tinkex ARGV` against the server at `base_url`.

        Raises:
            ApiError: 429, too many run already.
        """
        running = self._starting + sum(one.status == "running" for one in self.launches)
        if running >= MAX_RUNNING:
            raise ApiError(429, f"{MAX_RUNNING} commands run already; stop one, or wait for it.")
        self._starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *_PROGRAM,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self._env_of(base_url)},
                start_new_session=True,  # Ctrl-C at the server reaches it through `close` alone
            )
        finally:
            self._starting -= 1
        launch = Launch(secrets.token_hex(6), tuple(argv), process, time.time())
        launch.reader = asyncio.create_task(_read(launch))
        self._launches[launch.launch_id] = launch
        for old in list(self._launches.values())[: max(len(self._launches) - MAX_KEPT, 0)]:
            if old.status != "running":
                del self._launches[old.launch_id]
        return launch

    def _env_of(self, base_url: str) -> dict[str, str]:
        """Without an address the command finds a server as it does in a terminal."""
        address = {"TINKEX_BASE_URL": base_url} if base_url else {}
        return {"COLUMNS": "100", **address, **self._env}

    def stop(self, launch: Launch) -> None:
        """Interrupt as Ctrl-C does: a recipe ends after its step, a second time at once."""
        if launch.status == "running":
            launch.is_stopping = True
            with contextlib.suppress(ProcessLookupError):
                launch.process.send_signal(signal.SIGINT)

    async def close(self) -> None:
        """End what still runs, with a moment to save."""
        left = [one for one in self.launches if one.status == "running"]
        for launch in left:
            self.stop(launch)
        waits = [asyncio.create_task(launch.process.wait()) for launch in left]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for launch in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launch.process.pid, signal.SIGKILL)  # with what it started itself
        readers = [one.reader for one in self.launches if one.reader]
        if readers:
            # A program that left its session keeps the pipe open for as long as it likes.
            _, reading = await asyncio.wait(readers, timeout=STOP_S)
            for reader in reading:
                reader.cancel()
        for launch in self.launches:
            # asyncio closes a pipe only at its end, which such a program keeps from coming.
            launch.process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)


async def _read(launch: Launch) -> None:
    assert launch.process.stdout is not None
    while part := await launch.process.stdout.read(4096):
        launch.output += part
        if len(launch.output) > 2 * MAX_LOG:
            del launch.output[:-MAX_LOG]
    await launch.process.wait()


def _text(output: bytes | bytearray) -> str:
    """The text as a terminal shows it: of a line that was written over, its last state."""
    text = bytes(output[-MAX_LOG:]).decode("utf-8", "replace").replace("\r\n", "\n")
    return "\n".join(part.rpartition("\r")[2] for part in text.split("\n"))


class Forms:
    """Fields of each command, as the command line itself declares them; asked for once."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def all(self) -> dict[str, Any]:
        if self._asking is None or (self._asking.done() and self._asking.exception()):
            self._asking = asyncio.create_task(_ask())
        return await asyncio.shield(self._asking)

    async def of(self, name: str) -> dict[str, Any]:
        forms = await self.all()
        if name not in forms:
            raise ApiError(404, f"No recipe {name[:40]!r}; there are {', '.join(forms)}.")
        found: dict[str, Any] = forms[name]
        return found


async def _ask() -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *_PROGRAM,
        "train",
        "forms",
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ApiError(500, "`tinkex train forms` failed; the server's log says why.")
    forms: dict[str, Any] = json.loads(output)
    return forms
