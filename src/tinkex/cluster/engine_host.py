"""The inside of an actor: one engine on a node, and the files that its jobs name.

A job names folders by their path on the server's disk. Here they lie under a scratch folder, at
the same path: what a job reads was brought before the job (`receive`), what it writes is fetched
before anybody is told that it is done (`read`). Nothing here imports ray, and nothing here knows
what makes an engine: it is given a function for that.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.cluster import job_paths
from tinkex.engine import heartbeat
from tinkex.engine.hosting import Cancel, submitting
from tinkex.engine.jobs import Done, Emit, Engine, Event, Job, SaveAdapterJob
from tinkex.errors import ConfigError

HEARTBEAT_S = 1.0
"""How long a call for events waits for the first one."""
MAX_EVENTS = 256
_SCRATCH = "tinkex-worker-"


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what no job here needs."""

    path: str


@dataclass(frozen=True, slots=True)
class WrittenOnNode:
    """A job that wrote a folder or a file is done; what it wrote is still on the node."""

    done: Done
    path: str
    """On the server."""
    sizes: dict[str, int]
    is_ephemeral: bool
    """It need not outlive the server's machine at once."""
    stays: bool
    """It is needed on the node too."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first report of a host; with a refusal it has no engine."""

    pid: int
    refusal: str = ""


class EngineHost:
    def __init__(
        self, build: Callable[[Any], Engine], spec: Any, node_id: str, log_level: str
    ) -> None:
        logging.basicConfig(
            level=log_level.upper(), stream=sys.stderr, format="%(levelname)s worker: %(message)s"
        )
        os.umask(0o077)
        self._events: queue.SimpleQueue[Event | WrittenOnNode] = queue.SimpleQueue()
        clear_scratch()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))
        self._node_id = node_id
        self._memory = memoryview(bytearray(heartbeat.SIZE_BYTES))
        self._engine: Engine | None = None
        self._next = 0
        self._early: dict[int, bytes] = {}
        """What overtook others on its way: ray promises an order only within one thread."""
        self._started_at = time.time()
        refusal = ""
        try:
            self._engine = build(spec)
            self._engine.heartbeat.share(self._memory)
        except ConfigError as exc:
            refusal = str(exc)
        self._started = Started(os.getpid(), refusal)

    def started(self) -> Started:
        return self._started

    def facts(self) -> dict[str, Any]:
        """For `tinkex cluster status`."""
        activity = heartbeat.look(self._memory)
        return {
            "node_id": self._node_id,
            "pid": self._started.pid,
            "started_at": self._started_at,
            "is_busy": activity.is_busy,
            "is_loading": activity.is_loading,
            "num_turns": activity.num_turns,
        }

    # ------------------------------------------------------------------------ jobs and events

    def tell(self, number: int, frame: bytes) -> None:
        """Take a job, a `Cancel` or a `Forget`, in the order of their numbers."""
        self._early[number] = frame
        while (next_frame := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._act(pickle.loads(next_frame))

    def _act(self, message: Job | Cancel | Forget) -> None:
        assert self._engine is not None
        if isinstance(message, Forget):
            remove(self._path(message.path))
        elif isinstance(message, Cancel):
            self._engine.cancel(message.job_id)
        else:
            emit = self._emitter(message)
            with submitting(message, emit):
                self._engine.submit(self._moved_here(message), emit)

    def events(self) -> tuple[bytes, heartbeat.Activity]:
        """Events since the last call, or of the next second; and what the engine does."""
        events: list[Event | WrittenOnNode] = []
        try:
            events.append(self._events.get(timeout=HEARTBEAT_S))
            while len(events) < MAX_EVENTS:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        return pickle.dumps(events, protocol=5), heartbeat.look(self._memory)

    def _emitter(self, job: Job) -> Emit:
        if not isinstance(job, SaveAdapterJob):
            return self._events.put

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                files = job_paths.files_of(self._path(job.folder))
                sizes = {name: file.stat().st_size for name, file in files}
                self._events.put(
                    WrittenOnNode(event, job.folder, sizes, job.ephemeral, job.for_sampling)
                )
            else:
                self._events.put(event)

        return emit

    # ------------------------------------------------------------------------ files

    def _path(self, folder: str) -> Path:
        return self._scratch / folder.lstrip("/")

    def _moved_here(self, job: Job) -> Job:
        if isinstance(job, SaveAdapterJob):
            self._path(job.folder).parent.mkdir(parents=True, exist_ok=True)
        return job_paths.moved(job, self._path)

    def receive(self, path: str, sizes: dict[str, int], *pieces: Any) -> None:
        """Write a folder of the server: the bytes of its files, one after the other."""
        here = self._path(path)
        if here.exists():
            return
        aside = here.with_name(f".{here.name}.new")
        aside.mkdir(parents=True, exist_ok=True)
        left = list(pieces)
        for name, size in sizes.items():
            with (aside / name).open("wb") as out:
                while size:
                    size -= out.write(left.pop(0))
        # Last, because a folder that exists counts as whole, here and for the jobs that read it.
        aside.rename(here)

    def read(self, path: str, name: str, start: int, size: int) -> bytes:
        with (self._path(path) / name).open("rb") as stream:
            stream.seek(start)
            return stream.read(size)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_scratch() -> None:
    """Remove what engines that are gone left on this node."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
