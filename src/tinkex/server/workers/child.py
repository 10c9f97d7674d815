"""The worker process: one engine behind one socket.

Started by `ProcessWorker`, never by hand. The first frame it receives is a `WorkerSpec`; after
that it receives `Job`s and `Cancel`s and answers with `Event`s. Frames are an 8-byte length
and a pickle: both ends are our own processes, on a socket pair nobody else can open. When the
server's end closes, for whatever reason, the process ends at once: a worker without a server is
useless, and its state is in the journal.
"""

from __future__ import annotations

import copyreg
import io
import logging
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.heartbeat import SIZE_BYTES
from tinkex.engine.hosting import Cancel, Ready, Refused, submitting
from tinkex.engine.jobs import Job
from tinkex.engine.registry.engines import EngineSpec, make_engine
from tinkex.errors import ConfigError

HEADER = struct.Struct("<Q")
SMALL_ARRAY_BYTES = 16 * 1024


def dumps(value: Any) -> bytes:
    """The pickle of a message."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _reduce(array: NDArray[Any]) -> Any:
    """A small array as its shape, type and bytes.

    numpy's own way has more to say about it than there are bytes in it, and makes a new type for
    each that is read: half of what a small job costs both processes on the pipe.
    """
    # The character of a type says neither its byte order nor its fields; native builtin types need
    # neither. The copy is a bytearray because an array over bytes could not be written to.
    is_plain = array.dtype.isbuiltin == 1 and not array.dtype.hasobject
    if is_plain and array.flags.c_contiguous and array.nbytes <= SMALL_ARRAY_BYTES:
        return np.ndarray, (array.shape, array.dtype.char, bytearray(array.data))
    return array.__reduce_ex__(5)


class _Pickler(pickle.Pickler):
    dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(EngineSpec):
    """The engine of a worker process, and how much it logs."""

    log_level: str = "info"


class FrameSocket:
    """Blocking frames over a socket; writes may come from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._reader = sock.makefile("rb", buffering=1 << 16)

    def send(self, value: Any) -> None:
        """The process ends when the other end is gone: nobody is left to work for."""
        payload = dumps(value)
        with self._lock:
            try:
                if len(payload) < 1 << 16:
                    self._sock.sendall(HEADER.pack(len(payload)) + payload)
                else:
                    self._sock.sendall(HEADER.pack(len(payload)))
                    self._sock.sendall(payload)
            except OSError:
                os._exit(0)

    def receive(self) -> Any:
        """The next value; EOFError when the other end is gone."""
        (size,) = HEADER.unpack(self._exactly(HEADER.size))
        return pickle.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data: bytes = self._reader.read(size)
        if len(data) < size:
            raise EOFError("the server closed the worker's socket")
        return data


def serve(frames: FrameSocket, heartbeat_fd: int) -> None:
    """Host the engine until the server's end of the socket closes."""
    spec: WorkerSpec = frames.receive()
    logging.basicConfig(
        level=spec.log_level.upper(), stream=sys.stderr, format="%(levelname)s worker: %(message)s"
    )
    try:
        engine = make_engine(spec)
    except ConfigError as exc:
        frames.send(Refused(str(exc)))
        return
    frames.send(Ready(os.getpid()))
    engine.heartbeat.share(memoryview(mmap.mmap(heartbeat_fd, SIZE_BYTES)))

    while True:
        message: Job | Cancel = frames.receive()
        if isinstance(message, Cancel):
            engine.cancel(message.job_id)
            continue
        with submitting(message, frames.send):
            engine.submit(message, frames.send)


def main() -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group
        signal.signal(sig, signal.SIG_IGN)  # the server decides, and closes the socket
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(FrameSocket(sock), int(sys.argv[2]))
    except (EOFError, ConnectionError):
        os._exit(0)  # compute may be under way in another thread; nobody waits for it any more


if __name__ == "__main__":
    # As `__main__` our classes would be pickled under a name the server cannot import.
    from tinkex.server.workers.child import main as run

    run()
