"""Measure the way of one forward_backward: which calls of ours carry it out, and which back.

Run by `test_walk.py`, in a process of its own; by hand it prints the two lists:

    python tests/contracts/walk.py

The rule. A real client trains a model of a real server (uvicorn, SQLite, a pool with one worker
that hosts the toy engine), all in one process, each in the thread or threads that it always has.
The worker's child is a thread instead of a process, behind the same socket pair. At every hand-over
of `OUT` and `BACK`, where the request or its result is left for somebody else to take (a queue, a
socket, a future), the stack is recorded. A call counts when it is of a function in `tinkex`,
stands in such a stack, and was made for this request: it began after `forward_backward` was called,
for the way back after the engine had the result. Loops that wait (a reader of a socket, an engine's
thread) and polls that are held by then stand there before, and only take up what comes. Each
function counts once a way. What is called on the way and returns before the hand-over (validation,
encoding, a place in a line) is work done to the request, not a layer that it passes. asyncio,
uvicorn and concurrent.futures are not ours; our guards of a connection (`server/guard`) are hooks
in uvicorn's parser and see bytes, not requests, so nothing is recorded there.

Beside it, every form that the datum takes on its way out, and every check that is made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import uvicorn

import tinkex
from tinkex import types
from tinkex.client.background_loop import background
from tinkex.engine.toy.compute import ToyCompute
from tinkex.server.app import create_app
from tinkex.server.guard.connections import ConnectionLimits, guarded
from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import open_store
from tinkex.server.workers import child
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.process_worker import ProcessWorker

PACKAGE = str(Path(tinkex.__file__).parent) + os.sep
Function = tuple[str, str]
"""A file below the package, and the qualified name of a function in it."""
WAIT_S = 100.0

Condition = Callable[[dict[str, Any]], bool]


def _always(seen: dict[str, Any]) -> bool:
    return True


def _is_pass(seen: dict[str, Any]) -> bool:
    return b"/forward_backward" in seen["head"]


def _is_job(seen: dict[str, Any]) -> bool:
    return type(seen["job"]).__name__ == "TrainJob"


def _is_result(seen: dict[str, Any]) -> bool:
    return "TrainResult" in str(seen)


def _is_poll(seen: dict[str, Any]) -> bool:
    return "retrieve_future" in seen["self"].scope["path"]


def _is_our_future(seen: dict[str, Any]) -> bool:
    return "APIFuture" in type(seen["self"]).__name__


def _is_wake_of_queue(seen: dict[str, Any]) -> bool:
    return "SubmitQueue" in str(seen["callback"])


# Where the request is left for somebody else: the last function of ours there, or the library's
# that takes it. The condition tells this request from the heartbeats and polls that pass there too.
OUT: dict[Function, Condition] = {
    ("client/background_loop.py", "LoopThread.submit"): _is_wake_of_queue,
    ("client/http/http1.py", "_Connection.send"): _is_pass,
    ("store/journal.py", "Journal.append"): _always,
    ("server/work/lane.py", "Lane.kick"): _always,
    ("server/work/flights.py", "Flights.send"): _is_job,
    ("server/workers/supervised_worker.py", "SupervisedWorker._flush_soon"): _always,
    ("asyncio/streams.py", "StreamWriter.writelines"): _always,
    ("engine/loop/loop.py", "Loop.submit"): _is_job,
}
# Where the request was left just before, and whoever takes it is woken: no call that carries it.
BELLS = {
    ("client/background_loop.py", "LoopThread.submit"),
    ("server/work/lane.py", "Lane.kick"),
    ("server/workers/supervised_worker.py", "SupervisedWorker._flush_soon"),
}
BACK: dict[Function, Condition] = {
    ("server/workers/child.py", "FrameSocket.send"): _is_result,
    ("server/workers/supervised_worker.py", "SupervisedWorker._take"): _is_result,
    ("server/work/futures.py", "Promise.settle"): _always,
    ("http/httptools_impl.py", "RequestResponseCycle.send"): _is_poll,
    ("client/http/http1.py", "_Connection._finish"): _always,
    ("futures/_base.py", "Future.set_result"): _is_our_future,
}


class Recorder:
    """A profile function for every thread that takes part."""

    def __init__(self) -> None:
        self.ways: dict[str, list[Function]] = {"out": [], "back": []}
        self.reached: set[Function] = set()
        self.forms: set[str] = set()
        self.checks: list[Function] = []
        self._way = ""
        self._places: dict[Function, Condition] = {}
        self._standing: set[FrameType] = set()

    def begin(self, way: str, places: dict[Function, Condition]) -> None:
        """From here on calls are made for this way; those under way by now stand there before."""
        waiting = [item.cr_frame for item in gc.get_objects() if isinstance(item, CoroutineType)]
        standing = {frame for frame in waiting if frame is not None}
        for running in sys._current_frames().values():
            standing.update(_stack(running))
        self._standing, self._places, self._way = standing, places, way

    def end(self) -> None:
        self._places = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self._places:
            return
        function = _function(frame)
        if function is not None:
            self._look_at_datums(function, frame)
        else:
            function = _library_function(frame)
        condition = self._places.get(function)
        if condition is None or not condition(frame.f_locals):
            return
        self.reached.add(function)
        seen = self.ways[self._way]
        if function in BELLS:
            frame = frame.f_back
        for called in reversed([f for f in _stack(frame) if f not in self._standing]):
            if (name := _function(called)) is not None and name not in seen:
                seen.append(name)

    def _look_at_datums(self, function: Function, frame: FrameType) -> None:
        """Which kinds of datums, or of lists of them, are among the arguments of a call."""
        given = frame.f_locals.values()
        each = [item[0] if isinstance(item, list | tuple) and item else item for item in given]
        kinds = {type(item) for item in each}
        forms = {f"{kind.__module__}.{kind.__name__}" for kind in kinds if "Datum" in kind.__name__}
        self.forms |= forms
        name = frame.f_code.co_name
        is_check = name.lstrip("_").startswith(("check", "validate")) or name == "read_datum"
        if is_check and forms:
            self.checks.append(function)

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _function(frame: FrameType) -> Function | None:
    """None: not ours. A comprehension is no function of its own since Python 3.12."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or code.co_name == "<listcomp>":
        return None
    return code.co_filename.removeprefix(PACKAGE), code.co_qualname


def _library_function(frame: FrameType) -> Function:
    """The last folder and the file, as `asyncio/streams.py`."""
    parts = Path(frame.f_code.co_filename).parts
    return "/".join(parts[-2:]), frame.f_code.co_qualname


class ThreadWorker(ProcessWorker):
    """The child's own loop behind the same socket pair, in a thread."""

    async def _spawn(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        shared = tempfile.TemporaryFile()
        shared.truncate(len(self._heartbeat))

        def serve() -> None:
            with contextlib.suppress(EOFError, ConnectionError):
                child.serve(child.FrameSocket(theirs), shared.fileno())

        threading.Thread(target=serve, daemon=True).start()
        self.generation += 1
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        payload = child.pickle.dumps(self._spec)
        writer.write(child.HEADER.pack(len(payload)) + payload)
        return reader, writer


def _serve(sock: socket.socket, folder: Path, apps: list[Any]) -> None:
    async def run() -> None:
        config = ServerConfig(engine="toy", data_dir=folder)
        store = await asyncio.to_thread(open_store, config)
        spec = child.WorkerSpec(engine="toy", log_level="error")
        app = create_app(config, store, Pool([ThreadWorker(spec)], deterministic=True))
        http = guarded(ConnectionLimits())
        server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_config=None))
        apps.extend([app, server])
        await server.serve(sockets=[sock])
        await asyncio.to_thread(store.close)

    asyncio.run(run())


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def _datum() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def measure(folder: Path) -> Recorder:
    record = Recorder()
    threading.setprofile(record)
    sock = socket.create_server(("127.0.0.1", 0))
    apps: list[Any] = []
    threading.Thread(target=_serve, args=(sock, folder, apps), daemon=True).start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    background().submit(sys.setprofile, record)
    _until(lambda: len(apps) == 2 and apps[1].started)
    service = tinkex.ServiceClient(base_url=url, api_key="tml-walk")
    training = service.create_lora_training_client("toy", rank=4)
    training.forward([_datum()], "cross_entropy").result(WAIT_S)  # connections are open from here

    train = ToyCompute._train

    def train_then_wait(self: ToyCompute, job: Any) -> Any:
        result = train(self, job)
        promises = apps[0].state.dependencies.service.promises
        held = promises.get(job.job_id.partition("#")[0])
        _until(lambda: held.polls)  # the poll is there and waits
        record.begin("back", BACK)
        return result

    ToyCompute._train = train_then_wait  # type: ignore[method-assign]
    with record.in_this_thread():
        record.begin("out", OUT)
        future = training.forward_backward([_datum()], "cross_entropy")
    future.result(WAIT_S)
    record.end()
    return record


def main() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        record = measure(Path(folder))
    places = {*OUT, *BACK}
    found = {
        **record.ways,
        "not_reached": sorted(places - record.reached),
        "forms": sorted(record.forms),
        "checks": record.checks,
    }
    print(json.dumps(found, indent=1), flush=True)
    os._exit(0)  # the server runs on, and has nothing left to say


if __name__ == "__main__":
    main()
