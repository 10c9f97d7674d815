"""One sample on its way through gate and worker.

It waits for a place, runs, and runs again when the worker died under it; it says in words why it is
not done. Who promised it, and what becomes of its result, is `samples`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinkex.engine.jobs import Event, Progress, SampleJob, SampleResult
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Promise, is_loading
from tinkex.store import SamplingSession

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 5
MAX_MEMORY_DEATHS = 2
"""A sample whose worker died for lack of memory while it ran alone is run once more."""


@dataclass(slots=True, eq=False, kw_only=True)
class SampleRun:
    promise: Promise
    session: SamplingSession
    job: SampleJob
    on_event: Callable[[Event], None] | None
    key_id: int | None
    deps: Dependencies
    attempts: int = 0
    memory_deaths: int = 0
    num_sent: int = 0
    sent: bool = False
    progress: str = ""

    @property
    def user_id(self) -> str:
        return self.promise.user_id

    async def result(self) -> SampleResult:
        cost = len(self.job.prompt) + self.job.num_samples * (self.job.max_tokens or 256)
        while True:
            try:
                async with self.deps.open_work.slot(self.user_id):
                    async with self.deps.workers.sampling.slot(self.user_id, cost):
                        return await self._attempt()
            except EngineError as exc:
                if exc.is_to_blame:
                    self.deps.open_work.pauses.blame(self.user_id)
                if not isinstance(exc, WorkerLostError):
                    raise
                self.attempts += not exc.is_blameless
                self.sent, self.progress = False, ""
                self.memory_deaths += exc.cause == "memory" and exc.was_alone
                if self.memory_deaths >= MAX_MEMORY_DEATHS:
                    raise EngineError(
                        f"The worker ran out of memory {self.memory_deaths} times while it ran "
                        "this sample, and the kernel ended it; it was given up. Ask for fewer "
                        "samples or tokens at a time."
                    ) from exc
                if self.attempts >= MAX_ATTEMPTS:
                    raise EngineError(
                        f"The worker died {self.attempts} times while it ran this sample."
                    ) from exc

    async def _attempt(self) -> SampleResult:
        await self.deps.workers.pool.wait_ready()
        await self.deps.sampling_sessions.prepare(self.session)
        self.num_sent += 1
        if self.num_sent > 1:  # a job has a new name each time it is sent
            name = f"{self.promise.request_id}#{self.num_sent}"
            self.job = replace(self.job, job_id=name)
        self.sent = True
        result = await self.deps.workers.pool.post(self.job, self._note)
        assert isinstance(result, SampleResult)
        return result

    def reason(self) -> str:
        if not self.deps.workers.pool.is_ready:
            return "the worker is starting"
        if self.sent:
            return self.progress or "sampling"
        if pause := self.deps.open_work.pauses.reason(self.user_id):
            return pause
        num_ahead = self.deps.workers.sampling.ahead_of(self.user_id)
        return f"about {num_ahead} samples ahead" if num_ahead else "next in line"

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress):
            if event.text != self.progress:
                logger.info("%s: %s", self.promise.request_id, event.text)
            self.progress = event.text
            if not is_loading(event.text):
                return
            self.promise.polls.wake()
        if self.on_event is not None:
            self.on_event(event)
