"""Jobs for the helper process, from the server's side: fair turns, a time limit, a fresh start.

Each user has one job under way at a time, and there are two processes: whoever keeps one busy, or
kills it with every job, does not stand in the way of others. The pipe is written and read on a
thread; the event loop never waits for it. A process starts with the first job and stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import orjson

from tinkex.chat.template import TooLongError
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.fairness.gate import FairGate
from tinkex.server.process.problems import ApiError

logger = logging.getLogger(__name__)
PROCESSES = 2
TIME_S = 60.0
"""Of a job, on a clock; the process limits its seconds of a processor."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
# Modules are looked for where this interpreter finds them, whatever the environment says.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tinkex.server.sandbox.child import main; main()"
)
_KINDS = {kind.__name__: kind for kind in (InvalidInputError, NotSupportedError, TooLongError)}


class Sandbox:
    def __init__(self, *, num_processes: int = PROCESSES, time_s: float = TIME_S) -> None:
        self._time_s = time_s
        self._turns = FairGate(num_processes)
        # A lock lives as long as somebody holds it or waits for it.
        self._own_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()

    async def run(
        self,
        user_id: str,
        task: str,
        facts: dict[str, Any],
        payload: bytes = b"",
        *,
        cost: float = 1.0,
    ) -> Any:
        """The result of a job of `tasks.TASKS`; `cost` is what it counts among the user's turns.

        Raises:
            InvalidInputError: The task refuses, or the job needs more than it may have.
            OSError: The disk is full, or the like.
        """
        mine = self._own_turns.setdefault(user_id, asyncio.Lock())
        async with mine, self._turns.slot(user_id, cost):
            answer = await self._ask(task, facts, payload)
        if answer is None:
            logger.warning("the sandbox ended with a job of %s: %s", user_id, task)
            raise InvalidInputError(
                f"it took more than {self._time_s:g} s, or more memory than it may; send less"
            )
        return _result(answer, task)

    async def _ask(self, task: str, facts: dict[str, Any], payload: bytes) -> dict[str, Any] | None:
        process = await self._ready()
        self._busy.add(process)
        timer = asyncio.get_running_loop().call_later(self._time_s, process.kill)
        answer = None
        try:
            answer = await asyncio.to_thread(process.ask, task, facts, payload)
        finally:
            timer.cancel()
            self._busy.discard(process)
            if answer is None:  # it died, or the caller went away and does not wait for it
                await asyncio.to_thread(process.end)
            else:
                self._idle.append(process)
        return answer

    async def _ready(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            await asyncio.to_thread(process.end)
        return await asyncio.to_thread(_Process)

    def close(self) -> None:
        """End the processes. Blocks for a moment."""
        for process in (*self._idle, *self._busy):
            process.end()
        self._idle.clear()


class _Process:
    """A helper process, used by one thread at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                "OPENBLAS_NUM_THREADS": "1",  # numpy comes with some modules; nothing computes
            },
        )

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, task: str, facts: dict[str, Any], payload: bytes) -> dict[str, Any] | None:
        """The answer to a job; None when the process ended instead."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        job = _line({"task": task, "facts": facts, "size": len(payload)})
        try:
            self._child.stdin.write(job)
            self._child.stdin.write(payload)
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except (OSError, ValueError):  # the pipe is broken, or closed by `end`
            return None
        return _read(line) if line.endswith(b"\n") else None

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> None:
        """End the process, and wait until it is gone."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(OSError):  # what it had not read is lost with it
                if pipe is not None:
                    pipe.close()


def _line(job: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(job) + b"\n"
    except TypeError:  # a number beyond 64 bits
        return json.dumps(job).encode() + b"\n"


def _read(line: bytes) -> dict[str, Any]:
    answer: dict[str, Any]
    try:
        answer = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, which `json` writes
        answer = json.loads(line)
    return answer


def _result(answer: dict[str, Any], task: str) -> Any:
    if "result" in answer:
        return answer["result"]
    if "refused" in answer:
        path = answer.get("path", "")
        kind = _KINDS.get(answer.get("kind", ""), InvalidInputError)
        # An error's text begins with its path.
        raise kind(answer["refused"].removeprefix(f"{path}: "), path=path)
    if "errno" in answer:
        raise OSError(answer["errno"], answer["strerror"])
    logger.error("the sandbox failed with %s: %s", task, answer["failed"])
    raise ApiError(500, "The server failed in its sandbox; its log says more.")
