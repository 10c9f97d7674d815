"""The jobs of a worker and the death of its engine, wherever the engine runs.

Jobs go out, events come back. When the engine is gone every job it held fails with
`WorkerLostError` and a new engine is started at once; `generation` counts them. When it hangs, the
watchdog says which job is to blame: that one fails for good, the others are lost with the engine
and run again. Of several that shared a pass none is to blame yet: each is on trial, that is, it
runs again in passes of its own, and what happens in one of them is its fault. A job that only
waited for its turn is never to blame. This module does not know what an adapter is and restores
nothing; how an engine is started, reached and ended is for the classes below to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tinkex.engine.heartbeat import KINDS, Activity
from tinkex.engine.hosting import Cancel, Ready, Refused
from tinkex.engine.jobs import Done, Event, Failed, Job, Result, SampleJob, TrainJob
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError, WrongBaseError
from tinkex.server.workers.deaths import Cause
from tinkex.server.workers.utilisation import Utilisation
from tinkex.server.workers.watchdog import Budget, Watchdog
from tinkex.server.workers.worker import OnEvent

logger = logging.getLogger(__name__)


class SupervisedWorker(ABC):
    """An engine that is started again whenever it ends; see `Worker`."""

    address: str = ""

    on_refusal: Callable[[], None] | None = None
    """Told once when it cannot run with its settings."""

    def __init__(
        self, *, name: str = "worker", start_timeout_s: float = 300.0, budget: Budget | None = None
    ) -> None:
        self.name = name
        self.generation = 0
        self.refusal = ""
        """Why the engine cannot run with its settings at all; empty while it can."""
        self._start_timeout_s = start_timeout_s
        self._pending: dict[str, tuple[asyncio.Future[Result], OnEvent | None]] = {}
        self._on_trial: set[str] = set()
        self._outbox: list[Job | Cancel] = []
        self._ready = asyncio.Event()
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._broken: str = ""
        self._watchdog = Watchdog(budget or Budget())
        self._utilisation = Utilisation()

    # ------------------------------------------------------------------------ for those below

    @abstractmethod
    async def _live(self) -> None:
        """Start an engine, count it, and `_take` what it says, until it is gone.

        May raise whatever its transport does; it is gone then as well.
        """

    @abstractmethod
    async def _end(self) -> str:
        """Make sure that the engine is gone; says how it ended."""

    def _cause(self) -> Cause:
        """Why the engine is gone, where that is known."""
        return ""

    @abstractmethod
    def _kill(self) -> None:
        """End an engine that hangs. `_live` notices."""

    @abstractmethod
    def _flush(self) -> None:
        """Give the engine the jobs and `Cancel`s of the outbox, in their order."""

    @abstractmethod
    def _look(self) -> Activity:
        """The last report of what the engine's thread was doing."""

    # ------------------------------------------------------------------------ Worker

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def is_moving(self) -> bool:
        return self._watchdog.is_moving

    @property
    def held_bytes(self) -> dict[str, int]:
        if not self._ready.is_set():
            return {}
        return dict(zip(KINDS, self._look().held_bytes, strict=True))

    @property
    def utilisation(self) -> float:
        return self._utilisation.share if self._ready.is_set() else 0.0

    async def start(self) -> None:
        """Begin starting the engine. Jobs wait until it is ready."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(
                self._supervise(), name=f"{self.name}-supervisor"
            )

    async def wait_ready(self) -> None:
        if self._ready.is_set():
            return
        try:
            await asyncio.wait_for(self._ready.wait(), self._start_timeout_s)
        except TimeoutError as exc:
            reason = self._broken or f"{self.name} did not start in {self._start_timeout_s:g} s"
            raise EngineError(f"{reason}; see the server's log.") from exc

    def post(self, job: Job, on_event: OnEvent | None = None) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if not self._ready.is_set():
            future.set_exception(WorkerLostError(f"{self.name} is starting"))
            return future
        self._pending[job.job_id] = (future, on_event)
        if isinstance(job, TrainJob | SampleJob) and job.alone:
            self._on_trial.add(job.job_id)
        self._watchdog.posted(job)
        future.add_done_callback(lambda done: self._forget(job.job_id, done))
        self._outbox.append(job)
        self._flush_soon()
        return future

    def _flush_soon(self) -> None:
        """Send jobs that are posted in one turn of the loop together."""
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _forget(self, job_id: str, future: asyncio.Future[Result]) -> None:
        self._watchdog.ended(job_id)
        self._on_trial.discard(job_id)
        if self._pending.pop(job_id, None) is not None and future.cancelled():
            self.cancel(job_id)

    def cancel(self, job_id: str) -> None:
        if self._ready.is_set():
            self._outbox.append(Cancel(job_id))
            self._flush_soon()

    async def close(self) -> None:
        self._closing = True
        if self._supervisor is not None:
            await self._end()
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_pending()

    # ------------------------------------------------------------------------ the engine's life

    async def _supervise(self) -> None:
        failures = 0
        while not self._closing:
            started = time.monotonic()
            watch = asyncio.create_task(
                self._watchdog.bark(self._observed), name=f"{self.name}-watchdog"
            )
            watch.add_done_callback(self._end_stuck)
            try:
                await self._live()
            except (EOFError, ConnectionError):
                pass
            except Exception:
                logger.exception("%s sent something unreadable", self.name)
            watch.cancel()
            self._ready.clear()
            # Before `_end`, which may forget what the engine was working on.
            working = self._working()
            end = await self._end()
            self._fail_pending(cause=self._cause(), working=working)
            if self._closing:
                return
            if self.refusal:
                self._broken = self.refusal
                if self.on_refusal is not None:
                    self.on_refusal()
                return
            failures = failures + 1 if time.monotonic() - started < 5 else 0
            logger.warning("%s %s; starting it again", self.name, end)
            # An engine that dies at its start would otherwise be started in a tight loop.
            if failures:
                self._broken = f"{self.name} {end} right after its start"
                await asyncio.sleep(min(2 ** (failures - 1) * 0.1, 10.0))

    def _observed(self) -> Activity:
        activity = self._look()
        self._utilisation.note(activity.busy_s)
        return activity

    def _take(self, message: Ready | Refused | Event) -> None:
        """Act on what the engine's process said of itself, or of a job."""
        if isinstance(message, Ready):
            self._broken = ""
            self._ready.set()
            return
        if isinstance(message, Refused):
            self.refusal = message.text
            return
        self._watchdog.heard()
        future, on_event = self._pending.get(message.job_id, (None, None))
        if isinstance(message, Done):
            if future is not None and not future.done():
                future.set_result(message.result)
        elif isinstance(message, Failed):
            if future is not None and not future.done():
                _fail(future, message)
        elif on_event is not None:
            on_event(message)

    def _end_stuck(self, watch: asyncio.Task[str]) -> None:
        """The engine hangs: fail the jobs to blame and end it; the others run again."""
        if watch.cancelled() or self._closing:
            return
        trouble = watch.result()
        suspects = self._suspects(self._watchdog.suspects or self._watchdog.sampling)
        logger.error(
            "%s is stuck: %s; starting it again. At work: %s", self.name, trouble, suspects
        )
        if len(suspects) > 1:
            self._fail_pending(cause="stuck", working=suspects)
        for job_id in suspects:
            future, _ = self._pending.get(job_id, (None, None))
            if future is not None and not future.done():
                text = (
                    f"The engine did not get on with this request: {trouble}. It was given up, and "
                    "the engine was started again. Send less at a time, or tell whoever runs the "
                    "server."
                )
                error = EngineError(text)
                error.is_to_blame = True
                future.set_exception(error)
        self._fail_pending(self._watchdog.is_blameless)
        self._kill()

    # ------------------------------------------------------------------------ jobs

    def _working(self) -> list[str]:
        """The jobs one of which may have ended the engine, by what it last said of its work."""
        activity = self._look()
        at_work = [job_id for job_id in activity.job_ids if job_id in self._pending]
        if not at_work and activity.is_busy:
            at_work = [job_id for job_id in self._watchdog.samples if job_id in self._pending]
        return self._suspects(at_work or list(self._pending))

    def _suspects(self, at_work: Sequence[str]) -> list[str]:
        """The job on trial whose turn it was, or else all that the engine worked on."""
        # The first is the one that has its turn; the others wait in the middle of theirs.
        return list(at_work[:1] if at_work[:1] and at_work[0] in self._on_trial else at_work)

    def _fail_pending(
        self,
        is_blameless: Callable[[str], bool] = lambda _: False,
        *,
        cause: Cause = "",
        working: Sequence[str] = (),
    ) -> None:
        for job_id, (future, _) in list(self._pending.items()):
            if not future.done():
                lost = WorkerLostError(f"{self.name} died while the job ran")
                waited = job_id not in working if working else is_blameless(job_id)
                lost.is_blameless = waited
                lost.cause = cause if job_id in working else ""
                lost.was_alone = [job_id] == list(working)
                lost.is_to_blame = bool(lost.cause) and lost.was_alone
                future.set_exception(lost)
                future.exception()  # a job nobody waits for any more must not log a warning


def _fail(future: asyncio.Future[Result], event: Failed) -> None:
    if event.category == "cancelled":
        future.cancel()
    elif event.category == "user":
        kind = WrongBaseError if event.code == WrongBaseError.code else InvalidInputError
        future.set_exception(kind(event.message))
    else:
        future.set_exception(EngineError(event.message))
