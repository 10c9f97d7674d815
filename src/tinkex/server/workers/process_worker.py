"""Reach an engine in a child process on this machine, over a socket pair."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from typing import IO, Any

from tinkex.engine import heartbeat
from tinkex.server.workers.child import HEADER, WorkerSpec, dumps
from tinkex.server.workers.deaths import Cause, KernelKills, cause_of
from tinkex.server.workers.supervised_worker import SupervisedWorker
from tinkex.server.workers.watchdog import Budget

BURST = 16
"""Events handled before others get a turn: a burst of results must not delay a heartbeat."""


class ProcessWorker(SupervisedWorker):
    """A child process with one engine; see `Worker`."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        name: str = "worker",
        start_timeout_s: float = 300.0,
        budget: Budget | None = None,
    ) -> None:
        super().__init__(name=name, start_timeout_s=start_timeout_s, budget=budget)
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heartbeat = memoryview(bytearray(heartbeat.SIZE_BYTES))
        self._kills = KernelKills()
        self._was_killed = False  # by us, not by the kernel

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def _live(self) -> None:
        reader, self._writer = await self._spawn()
        for count in itertools.count():
            if count % BURST == 0:
                await asyncio.sleep(0)  # reading buffered frames never yields by itself
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            self._take(pickle.loads(await reader.readexactly(size)))

    async def _spawn(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        # A thread of the mathematics that waits for its peers spins for a moment, then sleeps.
        # Spinning on made decoding five times slower beside another busy process; sleeping at
        # once (which other OpenMP libraries than GNU's are told) costs a tenth when alone.
        env = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", **os.environ}
        with _memory_file() as shared:  # both map it, so it may be closed
            shared.truncate(heartbeat.SIZE_BYTES)
            self._heartbeat = memoryview(mmap.mmap(shared.fileno(), heartbeat.SIZE_BYTES))
            fds = [theirs.fileno(), shared.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinkex.server.workers.child", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
            )
        # The child must have the only copy of its end, or its death would not end our stream.
        theirs.close()
        self.generation += 1
        self._was_killed = False
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
        writer.write(_frame(self._spec))
        return reader, writer

    async def _end(self) -> str:
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None:
            return "did not start"
        # A second: the child ends by itself when it reads the end of its socket, if it can.
        for _ in range(50):
            if process.poll() is not None:
                return f"ended with code {process.returncode}"
            await asyncio.sleep(0.02)
        self._was_killed = True
        process.kill()
        return f"ended with code {await asyncio.to_thread(process.wait)}"

    def _kill(self) -> None:
        if self._process is not None:
            self._was_killed = True
            self._process.kill()

    def _cause(self) -> Cause:
        code = self._process.returncode if self._process is not None else None
        return cause_of(code, is_ours=self._was_killed, kills=self._kills)

    def _flush(self) -> None:
        """Write all messages at once: each write would wake the child."""
        outbox, self._outbox = self._outbox, []
        if self._writer is not None and not self._writer.is_closing():  # else all are lost anyway
            self._writer.writelines([_frame(message) for message in outbox])

    def _look(self) -> heartbeat.Activity:
        return heartbeat.look(self._heartbeat)

    def _observed(self) -> heartbeat.Activity:
        self._kills.look()
        return super()._observed()


def _memory_file() -> IO[bytes]:
    """In memory where the system can: a full disk must not keep a worker from starting."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("tinkex-heartbeat"), "r+b")
    return tempfile.TemporaryFile()


def _frame(value: Any) -> bytes:
    payload = dumps(value)
    return HEADER.pack(len(payload)) + payload
