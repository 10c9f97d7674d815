"""The result of a call that is still under way.

`APIFuture` is a `concurrent.futures.Future` that can also be awaited: from any thread, any event
loop, a notebook. Behind it runs one task on the background loop; however that task ends, the future
ends the same way, so a crash in the machinery reaches the caller as an error and never as a hang.
A future that ended keeps its result; asking again costs nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dis
import functools
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tinkex.client.background_loop import background
from tinkex.errors import BlockedLoopError, ResultTimeoutError, TinkerError

T = TypeVar("T")

NO_STEPS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL"})


@dataclass(frozen=True, slots=True)
class FutureStatus:
    """Why a future is not done, or how it ended."""

    state: str
    """submitting, submitted (the server has it and has said no more yet), queued, running,
    fetching, done, failed or cancelled."""
    reason: str | None
    """The server's own words, when it gave some: `3 requests ahead`."""
    request_id: str | None
    num_polls: int
    waited_s: float

    def __str__(self) -> str:
        text = self.state if self.reason is None else f"{self.state}: {self.reason}"
        return f"{text} ({self.waited_s:.1f} s, {self.num_polls} polls)"


class Waiting:
    """The state of one request while it waits: written by the machinery, read by `status()`."""

    __slots__ = ("num_polls", "reason", "request_id", "started_s", "state")

    def __init__(self) -> None:
        self.state = "submitting"
        self.reason: str | None = None
        self.request_id: str | None = None
        self.num_polls = 0
        self.started_s = time.monotonic()

    def hear(self, queue_state: str | None, reason: object) -> None:
        """The server's own words about a request that it has taken: `active` is being worked on."""
        self.state = "running" if queue_state == "active" else "queued"
        self.reason = reason if isinstance(reason, str) else queue_state


class Ender(Protocol):
    """A thread that ends futures: the background loop, or that of a recovering client."""

    @property
    def is_current(self) -> bool:
        """True where waiting for such a future would be waiting for oneself."""

    def submit(self, callback: Callable[..., object], *args: Any) -> None: ...


class APIFuture(concurrent.futures.Future[T]):
    """A result that will come. Wait with `.result()`, or `await` it.

    Also works with `asyncio.gather`, `asyncio.wrap_future` and `concurrent.futures.as_completed`.
    Cancelling stops the wait; a sample is also cancelled on the server, a training call that was
    submitted still runs, because later calls build on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._task: asyncio.Task[T] | None = None
        self._ender: Ender | None = None
        self._pid = os.getpid()
        self._ended_s: float | None = None
        self._followed: APIFuture[Any] | None = None
        self.waiting = Waiting()

    if not TYPE_CHECKING:  # a type checker says so by itself

        def __getattr__(self, name: str) -> Any:
            # Only asked for what a future does not have, which is mostly something of its result.
            text = f"'{type(self).__name__}' object has no attribute {name!r}"
            if not name.startswith("_"):
                text += ": it is a result that is still to come. Call .result() on it, or await it"
            raise AttributeError(text, name=name, obj=self)

    # -- waiting

    def result(self, timeout: float | None = None) -> T:
        """The result; blocks until it is there.

        Raises:
            ResultTimeoutError: Nothing came within `timeout` seconds; the request goes on.
        """
        self._check_can_block()
        _refuse_to_be_awaited(sys._getframe(1))
        try:
            return super().result(timeout)
        except TimeoutError as exc:
            if self.done():
                raise  # the result itself is a timeout error
            raise ResultTimeoutError(
                f"No result within {timeout} s; the request is {self.status()}. It goes on: call "
                "result() again, or cancel()."
            ) from exc

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_can_block()
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Like `result`, without blocking the event loop. A timeout cancels the request."""
        if self.cancelled():
            raise asyncio.CancelledError
        if self.done():
            return self.result()
        wrapped = asyncio.wrap_future(self)
        if timeout is None:
            return await wrapped
        done, _ = await asyncio.wait([wrapped], timeout=timeout)
        if done:
            return wrapped.result()
        status = self.status()  # now: after the cancel it would say no more than that
        wrapped.cancel()
        self.cancel()
        raise ResultTimeoutError(f"No result within {timeout} s; the request was {status}.")

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """This as a `concurrent.futures.Future`, which it is."""
        return self

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """This as a coroutine, for what takes nothing else: `asyncio.create_task` and its like."""
        return self.result_async()

    def _check_can_block(self) -> None:
        if self.done():
            return
        if os.getpid() != self._pid:  # the loop that would end it was not copied by the fork
            raise TinkerError(
                "This future was made before a fork and its result stays in the parent process. "
                "Make clients in the process that uses them."
            )
        if self._ender is not None and self._ender.is_current:
            raise BlockedLoopError(
                "result() would block the SDK's own thread: it was called in a callback. "
                "Await the future, or wait in another thread."
            )

    # -- looking

    def status(self) -> FutureStatus:
        """Why this waits, or how it ended. Never blocks."""
        waiting = self._told()
        until = self._ended_s if self._ended_s is not None else time.monotonic()
        state = waiting.state
        if self.cancelled():
            state = "cancelled"
        elif self.done():
            state = "done" if super().exception() is None else "failed"
        return FutureStatus(
            state=state,
            reason=None if self.done() else waiting.reason,
            request_id=waiting.request_id,
            num_polls=waiting.num_polls,
            waited_s=until - self.waiting.started_s,
        )

    def __repr__(self) -> str:
        return f"<APIFuture {self.status()}>"

    def follow(self, other: APIFuture[Any] | None) -> None:
        """Let `status()` tell what `other` waits for; None is back to its own."""
        self._followed = other

    def _told(self) -> Waiting:
        followed = self._followed
        return self.waiting if followed is None else followed._told()

    # -- ending

    def cancel(self) -> bool:
        """Stop waiting. True when the future had not ended before."""
        if self.cancelled() or not super().cancel():
            return False
        # The base class ends a future at its first cancel and says True again at each later one.
        self._ended_s = time.monotonic()
        self.set_running_or_notify_cancel()  # else `as_completed` and `wait` would not hear of it
        if self._ender is not None:
            # A task belongs to its loop's thread; only there may it be cancelled.
            self._ender.submit(self._cancel_task)
        return True

    def _abandon(self, error: Exception) -> None:
        """End with an error now, and stop the wait behind it. No effect on one that ended."""
        if self._fail(error) and self._ender is not None:
            self._ender.submit(self._cancel_task)

    def _succeed(self, result: T) -> bool:
        """End with a result; False when it had ended before."""
        self._ended_s = self._ended_s or time.monotonic()  # before anyone is woken who may ask
        try:
            self.set_result(result)
        except concurrent.futures.InvalidStateError:
            # The user's thread may cancel while the loop brings the result: the first one counts.
            return False
        return True

    def _fail(self, error: BaseException) -> bool:
        """End with an error; False when it had ended before."""
        self._ended_s = self._ended_s or time.monotonic()
        try:
            self.set_exception(error)
        except concurrent.futures.InvalidStateError:
            return False
        return True

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _launch(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """On the loop: run the coroutine and end as it ends."""
        if self.done():  # cancelled before the loop came to it
            coroutine.close()
            return
        self._task = asyncio.get_running_loop().create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._task = None  # it holds the coroutine's frame, and with that the batch that was sent
        self._ended_s = self._ended_s or time.monotonic()  # before anyone is woken who may ask
        if task.cancelled():
            # Something on the loop ended it (a client that closes): nobody may wait on for ever.
            if not self.cancelled() and super().cancel():
                self.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self._fail(error)
        else:
            try:
                self.set_result(task.result())
            except concurrent.futures.InvalidStateError:
                pass  # it was cancelled


AwaitableConcurrentFuture = APIFuture


def next_step(caller: FrameType) -> dis.Instruction | None:
    """The next instruction of the code that called, which gets the value."""
    return _step_after(caller.f_code, caller.f_lasti)


# Reading a long function takes milliseconds, and a loop asks from the same place each time.
@functools.lru_cache(maxsize=256)
def _step_after(code: CodeType, offset: int) -> dis.Instruction | None:
    for step in dis.get_instructions(code):
        if step.offset > offset and step.opname not in NO_STEPS:
            return step
    return None


def _refuse_to_be_awaited(caller: FrameType) -> None:
    """`await future.result()` blocks the loop first, and then awaits what cannot be awaited."""
    if not caller.f_code.co_flags & inspect.CO_COROUTINE:
        return
    step = next_step(caller)
    if step is not None and step.opname == "GET_AWAITABLE":
        raise TinkerError(
            "`await future.result()` waits twice. Write `await future`; or `future.result()`, "
            "which blocks, outside an event loop."
        )


def spawn(start: Callable[[Waiting], Coroutine[Any, Any, T]]) -> APIFuture[T]:
    """Run `start(waiting)` on the background loop; returns at once with the future it will end."""
    future: APIFuture[T] = APIFuture()
    thread = background()
    future._ender = thread
    work = start(future.waiting)
    try:
        thread.submit(future._launch, work)
    except BaseException:
        work.close()  # else Python would say that it was never awaited
        raise
    return future


async def gather_or_cancel(works: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order; the first error cancels the rest and is raised."""
    waited = list(works)
    if len(waited) == 1:  # most calls are one request, and need no task of its own
        return [await waited[0]]
    tasks = [asyncio.ensure_future(work) for work in waited]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        # Waited for, so that what they hold (room for results) is free before the error is told.
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    ending = [task for task in tasks if task is not asyncio.current_task()]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def is_in_loop() -> bool:
    """True where waiting would stop an event loop of the caller's. Notebooks are used to that."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return "ipykernel" not in sys.modules
