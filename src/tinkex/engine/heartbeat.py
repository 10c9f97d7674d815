"""The activity of an engine's thread, for a watchdog that looks from outside.

The thread says what it works on before it begins, because a thread that hangs says nothing more,
and counts its turns: a training pass, a decode step, a small job. It writes to memory that the
watchdog may share (a file mapped by two processes): that costs a microsecond, wakes nobody, and can
be read even while the engine holds its whole process up.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from typing import NamedTuple

SIZE_BYTES = 4096
KINDS = ("base", "packed", "kv", "adapters", "snapshots", "process")
"""What an engine's memory is for: the base model, copies of it arranged for sampling, keys and
values, adapters with gradients and optimizer state, weights to sample from; all of its process."""
HEARTBEAT_S = 0.25
_HEAD = struct.Struct("<Q??H")
_HEARTBEATS = struct.Struct("<Q")
_HEARTBEATS_AT = SIZE_BYTES - _HEARTBEATS.size
_HELD = struct.Struct(f"<{len(KINDS)}Q")
_HELD_AT = _HEARTBEATS_AT - _HELD.size
_BUSY = struct.Struct("<d")
_BUSY_AT = _HELD_AT - _BUSY.size
_MAX_NAMES = _BUSY_AT - _HEAD.size
MEASURE_EVERY = 8
"""Heartbeats between two looks at the memory of the process."""


class Activity(NamedTuple):
    """The state of an engine at one look."""

    num_turns: int = 0
    is_busy: bool = False
    is_loading: bool = False
    """It loads a base model, which takes as long as it takes."""
    job_ids: tuple[str, ...] = ()
    """Of what it works on, and of what that came in the middle of; none in a step of sampling that
    many share."""
    num_heartbeats: int = 0
    """Counted by a thread beside the engine's: its process is alive, and lets others run."""
    held_bytes: tuple[int, ...] = (0,) * len(KINDS)
    """By `KINDS`."""
    busy_s: float = 0.0
    """Seconds of work since it started, as of the last turn."""


class Heartbeat:
    def __init__(self) -> None:
        self.now = Activity()
        self._memory: memoryview = memoryview(bytearray(SIZE_BYTES))
        self._held = dict.fromkeys(KINDS, 0)
        self._busy_s = 0.0
        self._said_at = 0.0

    def share(self, memory: memoryview) -> None:
        """Write to this memory, of `SIZE_BYTES`, from now on."""
        self._memory = memory
        self.say(self.now)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        for count in itertools.count(1):
            _HEARTBEATS.pack_into(self._memory, _HEARTBEATS_AT, count)
            if count % MEASURE_EVERY == 1:
                self.hold(process=process_bytes())
            time.sleep(HEARTBEAT_S)

    def hold(self, **held_bytes: int) -> None:
        """Say how much memory some of the `KINDS` take."""
        self._held.update(held_bytes)
        _HELD.pack_into(self._memory, _HELD_AT, *self._held.values())

    def turned(self) -> None:
        """Count a turn in the middle of work."""
        self.say(self.now._replace(num_turns=self.now.num_turns + 1))

    def work(self, *job_ids: str, is_loading: bool = False) -> _Work:
        """Say that the thread works on something; work within work is told, then taken back."""
        return _Work(self, job_ids, is_loading)

    def say(self, activity: Activity) -> None:
        at = time.perf_counter()
        if self.now.is_busy:
            self._busy_s += at - self._said_at
            _BUSY.pack_into(self._memory, _BUSY_AT, self._busy_s)
        self.now, self._said_at = activity, at
        names = b""
        if activity.job_ids:
            names = "\n".join(activity.job_ids).encode()[:_MAX_NAMES]
            self._memory[_HEAD.size : _HEAD.size + len(names)] = names
        # The head last: a reader that comes in between sees the activity before, at worst with
        # names that it does not know.
        head = (activity.num_turns, activity.is_busy, activity.is_loading, len(names))
        _HEAD.pack_into(self._memory, 0, *head)


class _Work:
    """See `Heartbeat.work`. A class: a generator costs twice as much, at every small job."""

    __slots__ = ("_before", "_activity", "_heartbeat")

    def __init__(self, heartbeat: Heartbeat, job_ids: tuple[str, ...], is_loading: bool) -> None:
        self._heartbeat, self._before = heartbeat, heartbeat.now
        if job_ids:  # what waits for it holds its memory meanwhile; a job may wait for a part of it
            job_ids += tuple(waits for waits in heartbeat.now.job_ids if waits not in job_ids)
        self._activity = Activity(heartbeat.now.num_turns + 1, True, is_loading, job_ids)

    def __enter__(self) -> None:
        self._heartbeat.say(self._activity)

    def __exit__(self, *_: object) -> None:
        before, num_turns = self._before, self._heartbeat.now.num_turns + 1
        self._heartbeat.say(Activity(num_turns, before.is_busy, before.is_loading, before.job_ids))


def look(memory: memoryview) -> Activity:
    """The last activity of an engine that writes to this memory."""
    num_turns, is_busy, is_loading, size = _HEAD.unpack_from(memory, 0)
    names = bytes(memory[_HEAD.size : _HEAD.size + size]).decode(errors="replace")
    (num_heartbeats,) = _HEARTBEATS.unpack_from(memory, _HEARTBEATS_AT)
    job_ids = tuple(names.split("\n")) if names else ()
    held = _HELD.unpack_from(memory, _HELD_AT)
    (busy_s,) = _BUSY.unpack_from(memory, _BUSY_AT)
    return Activity(num_turns, is_busy, is_loading, job_ids, num_heartbeats, held, busy_s)


def process_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
