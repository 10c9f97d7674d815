"""Reach an engine in a child process, notice when it dies or hangs, and start it again.

Jobs go out and events come back over a socket pair. When the child dies every job it held fails
with `WorkerLostError` and a new child is started at once; `generation` counts the children. When it
hangs, the watchdog says which job is to blame: that one fails for good, the others are lost with
the child and run again. This module does not know what an adapter is and restores nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from tinkex.engine import pulse
from tinkex.engine.jobs import Done, Event, Failed, Job, Result
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError, WrongBaseError
from tinkex.server.workers.child import HEADER, Cancel, Ready, Refused, WorkerSpec
from tinkex.server.workers.watchdog import Budget, Watchdog
from tinkex.server.workers.worker import OnEvent

logger = logging.getLogger(__name__)

BURST = 16
"""Events handled before others get a turn: a burst of results must not delay a heartbeat."""


class ProcessWorker:
    """One child process with one engine; see `Worker`."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        name: str = "worker",
        start_timeout_s: float = 300.0,
        budget: Budget | None = None,
        on_refusal: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.generation = 0
        self.refusal = ""
        """Why the engine cannot run with its settings at all; empty while it can."""
        self._on_refusal = on_refusal
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[str, tuple[asyncio.Future[Result], OnEvent | None]] = {}
        self._ready = asyncio.Event()
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._broken: str = ""
        self._watchdog = Watchdog(budget or Budget())
        self._pulse = memoryview(b"")

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def generation_of(self, adapter_id: str) -> int:
        return self.generation

    async def start(self) -> None:
        """Begin starting the child. Jobs wait until it is ready."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(
                self._supervise(), name=f"{self.name}-supervisor"
            )

    @property
    def is_moving(self) -> bool:
        return self._watchdog.is_moving

    async def wait_ready(self) -> None:
        if self._ready.is_set():
            return
        try:
            await asyncio.wait_for(self._ready.wait(), self._start_timeout_s)
        except TimeoutError as exc:
            reason = self._broken or f"{self.name} did not start in {self._start_timeout_s:g} s"
            raise EngineError(f"{reason}; see the server's log.") from exc

    def post(
        self, job: Job, on_event: OnEvent | None = None, *, generation: int | None = None
    ) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if not self._ready.is_set() or generation not in (None, self.generation):
            future.set_exception(WorkerLostError(f"{self.name} is not the one that was meant"))
            return future
        self._pending[job.job_id] = (future, on_event)
        self._watchdog.posted(job)
        future.add_done_callback(lambda done: self._forget(job.job_id, done))
        self._send(job)
        return future

    def _forget(self, job_id: str, future: asyncio.Future[Result]) -> None:
        self._watchdog.ended(job_id)
        if self._pending.pop(job_id, None) is not None and future.cancelled():
            self.cancel(job_id)

    def cancel(self, job_id: str) -> None:
        if self._ready.is_set():
            self._send(Cancel(job_id))

    async def close(self) -> None:
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        if self._supervisor is not None:
            await self._stop_child()
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_pending()

    # ---------------------------------------------------------------------------- the child

    async def _supervise(self) -> None:
        failures = 0
        while not self._closing:
            started = time.monotonic()
            reader, self._writer = await self._spawn()
            watch = asyncio.create_task(
                self._watchdog.bark(partial(pulse.look, self._pulse)), name=f"{self.name}-watchdog"
            )
            watch.add_done_callback(self._end_stuck)
            try:
                await self._read_events(reader)
            except (EOFError, ConnectionError, asyncio.IncompleteReadError):
                pass
            except Exception:
                logger.exception("%s sent something unreadable", self.name)
            watch.cancel()
            self._ready.clear()
            code = await self._stop_child()
            self._fail_pending()
            if self._closing:
                return
            if self.refusal:
                self._broken = self.refusal
                if self._on_refusal is not None:
                    self._on_refusal()
                return
            failures = failures + 1 if time.monotonic() - started < 5 else 0
            logger.warning("%s ended with code %s; starting it again", self.name, code)
            if failures:
                self._broken = f"{self.name} ended with code {code} right after its start"
                await asyncio.sleep(min(2 ** (failures - 1) * 0.1, 10.0))

    async def _spawn(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        # A thread of the mathematics that waits for its peers spins for a moment, then sleeps.
        # Spinning on made decoding five times slower beside another busy process; sleeping at
        # once (which other OpenMP libraries than GNU's are told) costs a tenth when alone.
        env = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", **os.environ}
        with _memory_file() as shared:  # both map it, so it may be closed
            shared.truncate(pulse.SIZE_BYTES)
            self._pulse = memoryview(mmap.mmap(shared.fileno(), pulse.SIZE_BYTES))
            fds = [theirs.fileno(), shared.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinkex.server.workers.child", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
            )
        theirs.close()
        self.generation += 1
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
        writer.write(_frame(self._spec))
        return reader, writer

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        for count in itertools.count():
            if count % BURST == 0:
                await asyncio.sleep(0)  # reading buffered frames never yields by itself
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            message = pickle.loads(await reader.readexactly(size))
            if isinstance(message, Ready):
                self._broken = ""
                self._ready.set()
            elif isinstance(message, Refused):
                self.refusal = message.text
            else:
                self._deliver(message)

    def _end_stuck(self, watch: asyncio.Task[str]) -> None:
        """The engine hangs: fail the jobs to blame and end the child; the others run again."""
        if watch.cancelled() or self._closing or self._process is None:
            return
        trouble = watch.result()
        blamed = self._watchdog.suspects
        logger.error("%s is stuck: %s; starting it again. To blame: %s", self.name, trouble, blamed)
        for job_id in blamed:
            future, _ = self._pending.get(job_id, (None, None))
            if future is not None and not future.done():
                future.set_exception(
                    EngineError(
                        f"The engine did not get on with this request: {trouble}. It was given up, "
                        "and the engine was started again. Send less at a time, or tell whoever "
                        "runs the server."
                    )
                )
        self._fail_pending(self._watchdog.is_blameless)
        self._process.kill()

    async def _stop_child(self) -> int | None:
        process = self._process
        if process is None:
            return None
        if self._writer is not None:
            self._writer.close()
        for _ in range(50):
            if process.poll() is not None:
                return process.returncode
            await asyncio.sleep(0.02)
        process.kill()
        return await asyncio.to_thread(process.wait)

    # ---------------------------------------------------------------------------- jobs

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(_frame(message))

    def _deliver(self, event: Event) -> None:
        self._watchdog.heard()
        future, on_event = self._pending.get(event.job_id, (None, None))
        if isinstance(event, Done):
            if future is not None and not future.done():
                future.set_result(event.result)
        elif isinstance(event, Failed):
            if future is not None and not future.done():
                _fail(future, event)
        elif on_event is not None:
            on_event(event)

    def _fail_pending(self, is_blameless: Callable[[str], bool] = lambda _: False) -> None:
        for job_id, (future, _) in list(self._pending.items()):
            if not future.done():
                error = WorkerLostError(f"{self.name} died while the job ran")
                error.is_blameless = is_blameless(job_id)
                future.set_exception(error)
                future.exception()  # a job nobody waits for any more must not log a warning


def _fail(future: asyncio.Future[Result], event: Failed) -> None:
    if event.category == "cancelled":
        future.cancel()
    elif event.category == "user":
        kind = WrongBaseError if event.code == WrongBaseError.code else InvalidInputError
        future.set_exception(kind(event.message))
    else:
        future.set_exception(EngineError(event.message))


def _memory_file() -> IO[bytes]:
    """In memory where the system can: a full disk must not keep a worker from starting."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("tinkex-pulse"), "r+b")
    return tempfile.TemporaryFile()


def _frame(value: Any) -> bytes:
    payload = pickle.dumps(value, protocol=5)
    return HEADER.pack(len(payload)) + payload
