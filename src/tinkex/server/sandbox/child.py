"""The helper process: one job at a time from standard input, within limits of the kernel.

A job is a line of JSON (its task, facts for it, and how many bytes follow), then those bytes; an
answer is a line of JSON. Nothing is unpickled. Memory, files and processes are limited for the life
of the process, the processor for each job. A job that needs more ends the process, not the server.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from tinkex.errors import InvalidInputError
from tinkex.server.sandbox.tasks import TASKS

MEMORY_BYTES = 1 << 30
"""Of addresses, beside those of the interpreter and its modules."""
CPU_S = 30
"""Of each job."""
MAX_FILES = 64
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_CHUNK_BYTES = 1 << 20


class Payload:
    """The bytes that belong to a job, to be read forwards; never those of the next one."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, count: int = -1) -> bytes:
        count = self._left if count < 0 else min(count, self._left)
        data = self._stream.read(count) if count else b""
        self._left -= len(data)
        if count and not data:
            raise EOFError("the server ended")
        return data

    def skip(self) -> None:
        while self._left:
            self.read(min(self._left, _CHUNK_BYTES))


def confine() -> None:
    """Give up what no job needs; before the first one."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PDEATHSIG, signal.SIGKILL)
        prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = {
        "RLIMIT_AS": _size_bytes() + MEMORY_BYTES,
        "RLIMIT_NOFILE": MAX_FILES,
        "RLIMIT_NPROC": 0,  # neither processes nor threads; root is not held by it
        "RLIMIT_CORE": 0,
    }
    for name, most in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            _lower(kind, most)
    # A Ctrl-C in the server's terminal is the server's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _size_bytes() -> int:
    """Addresses in use: libraries take more of them on a machine with more cores."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux
        return 0


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _allow_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_S, hard))


def answer_to(task: str, facts: dict[str, Any], payload: Payload) -> dict[str, Any]:
    """Do a job: its result, or why it is refused."""
    try:
        return {"result": TASKS[task](facts, payload)}
    except InvalidInputError as exc:
        return {"refused": str(exc), "path": exc.path, "kind": type(exc).__name__}
    except MemoryError:
        return {"refused": f"it needs more than {MEMORY_BYTES >> 20} MB of memory"}
    except RecursionError:
        return {"refused": "it is nested too deeply"}
    except OSError as exc:  # a full disk is no fault of the job's
        return {"errno": exc.errno, "strerror": exc.strerror or type(exc).__name__}
    except Exception as exc:
        return {"failed": f"{type(exc).__name__}: {str(exc)[:500]}"}


def main() -> None:
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    confine()
    while line := jobs.readline():
        job = json.loads(line)
        _allow_cpu()
        payload = Payload(jobs, job["size"])
        answer = answer_to(job["task"], job["facts"], payload)
        payload.skip()
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
