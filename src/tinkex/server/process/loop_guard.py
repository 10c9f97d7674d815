"""Find what holds the event loop, with the stack of it: for `tinkex serve --debug` and for tests.

Everybody's heartbeats wait while one callback runs, so none may take a tenth of a second. Time is
that of the loop's thread alone, less what the garbage collector took: on a machine that is busy
with other things a callback takes long and is still innocent. A second thread looks at the stack of
the loop's thread a hundred times a second and charges it with the time since the look before. A
call in C that keeps Python's lock is seen as soon as it returns, in the line that made it.

The frames of a thread that runs may be asked for their callers only while it stands still, which is
while we keep Python's lock: a generator's frame that goes on meanwhile points to memory that is
something else by then. So a look takes the whole stack in one call that is C all the way.

Needs asyncio's own loop, whose callbacks can be wrapped; uvloop's cannot.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

logger = logging.getLogger(__name__)
LIMIT_S = 0.1
LOOK_S = 0.01

_Stack = tuple[tuple[CodeType, int | None], ...]
"""The code and the line of each frame, the innermost first."""
_run: Callable[[Any], None] = asyncio.Handle._run
_guards: dict[object, LoopGuard] = {}
"""The guards of the loops of this process."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A callback that held the loop."""

    seconds: float
    """Of the loop's thread."""
    stack: str
    """Where most of the time was spent."""

    def __str__(self) -> str:
        return f"held the event loop for {self.seconds:.2f} s of its time, at\n{self.stack}"


class LoopGuard:
    """`with LoopGuard():` inside the loop that is watched; `holds` has what was found."""

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        is_ours: Callable[[Sequence[FrameType]], bool] = lambda stack: True,
        on_hold: Callable[[Hold], None] | None = None,
    ) -> None:
        """
        Args:
            is_ours: Whether a stack, the innermost frame first, is of the code that is watched.
                Other time counts as somebody else's.
            on_hold: Told at once, in the loop's thread; by default it is logged.
        """
        self.holds: list[Hold] = []
        self._limit_s, self._is_ours = limit_s, is_ours
        self._on_hold = on_hold or (lambda hold: logger.error("%s", hold))
        self._began = self._seen = self._collecting = self._collected = 0.0
        self._number = 0  # of the callback that runs; a look that finds another one is thrown away
        self._is_running = False
        self._spent: defaultdict[_Stack, float] = defaultdict(float)
        self._ends = threading.Event()

    def __enter__(self) -> LoopGuard:
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        _guards[self._loop] = self
        _set_run(_guarded_run)
        gc.callbacks.append(self._note_collection)
        threading.Thread(target=self._watch, name="loop-guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        gc.callbacks.remove(self._note_collection)
        del _guards[self._loop]
        if not _guards:
            _set_run(_run)

    # ------------------------------------------------------------------------ the loop's thread

    def begin(self) -> None:
        self._number += 1
        self._collected = 0.0
        self._began = self._seen = time.thread_time()
        self._is_running = True

    def end(self) -> None:
        self._is_running = False
        if time.thread_time() - self._began - self._collected < self._limit_s:
            if self._spent:
                self._spent.clear()
            return
        spent, self._spent = self._spent, defaultdict(float)
        if (ours_s := sum(spent.values())) >= self._limit_s:
            hold = Hold(ours_s, _shown(max(spent, key=lambda stack: spent[stack])))
            self.holds.append(hold)
            self._on_hold(hold)

    def _note_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread_id:
            return
        now = time.thread_time()
        if phase == "start":
            self._collecting = now
        else:
            self._collected += now - self._collecting
            self._seen += now - self._collecting

    # ------------------------------------------------------------------------ the other thread

    def _watch(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread_id)
        while not self._ends.wait(LOOK_S):
            number = self._number
            if not self._is_running:
                continue
            frames, now = _frames(self._thread_id), time.clock_gettime(clock)
            spent_s, self._seen = now - self._seen, now
            if not self._is_ours(frames):
                continue
            # Not as text: that reads files, and the callback would be over before it is charged.
            stack = tuple((each.f_code, each.f_lineno) for each in frames)
            if self._is_running and self._number == number:
                self._spent[stack] += spent_s


def _frames(thread_id: int) -> list[FrameType]:
    """The frames of a thread's callback, the innermost first, without those of the loop around it.

    The thread does not run between the first frame and the last: nothing here is Python code.
    """
    frames: list[FrameType] = []
    innermost = islice(map(itemgetter(thread_id), iter(sys._current_frames, None)), 1)
    callers: Any = accumulate(chain(innermost, repeat("f_back")), getattr)
    with suppress(AttributeError, KeyError):  # the last has no caller; the thread has ended
        frames.extend(callers)
    codes = [frame.f_code if frame is not None else None for frame in frames]
    ends = (code is None or code is _guarded_run.__code__ for code in codes)
    return frames[: next((index for index, is_end in enumerate(ends) if is_end), len(frames))]


def _shown(stack: _Stack) -> str:
    summaries = [
        traceback.FrameSummary(code.co_filename, line or 0, code.co_name)
        for code, line in reversed(stack)
    ]
    return "".join(traceback.format_list(summaries))


def _set_run(run: Callable[[Any], None]) -> None:
    setattr(asyncio.Handle, "_run", run)  # noqa: B010 - it is not ours to assign


def _guarded_run(handle: Any) -> None:
    guard = _guards.get(handle._loop)
    if guard is None:
        _run(handle)
        return
    guard.begin()
    try:
        _run(handle)
    finally:
        guard.end()
