"""One sample on its way through gate and worker.

It waits for a slot, runs, and runs again when the worker died under it; it says in words why it is
not done. Who promised it, and what becomes of its result, is `sample_queue`'s business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tinkex.engine.jobs import Event, Progress, SampleJob, SampleResult, Tokens
from tinkex.errors import EngineError, WorkerLostError
from tinkex.server.fairness.gate import FairGate
from tinkex.server.fairness.pauses import Pauses
from tinkex.server.guard.budgets import Reservation
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Promise, is_loading
from tinkex.server.workers.suspicion import Suspicion
from tinkex.store import SamplingSession

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class SampleRun:
    promise: Promise
    session: SamplingSession
    job: SampleJob
    on_event: Callable[[Event], None] | None
    key_id: int | None
    is_stream: bool
    """Its caller stays connected, and is told while it runs."""
    reservation: Reservation
    deps: Dependencies
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_sent: int = 0
    sent: bool = False
    accepted_at: float = field(default_factory=time.time)
    sent_at: float = 0.0
    num_told: int = 0
    """Tokens that its caller was told while it ran."""
    progress: str = ""

    @property
    def user_id(self) -> str:
        return self.promise.user_id

    async def result(self) -> SampleResult:
        cost = len(self.job.prompt) + self.job.num_samples * (self.job.max_tokens or 256)
        while True:
            try:
                await self.deps.open_work.budgets.wait(self.reservation)
                async with (
                    self.deps.open_work.slot(self.user_id),
                    self._line.slot(self.user_id, cost),
                ):
                    return await self._attempt()
            except EngineError as exc:
                if exc.is_to_blame:
                    cause = exc.cause if isinstance(exc, WorkerLostError) else "stuck"
                    request_id = self.promise.request_id
                    self._pauses.blame(self.user_id, cause=cause, request_id=request_id)
                if not isinstance(exc, WorkerLostError):
                    raise
                self.suspicion.attempts += not exc.is_blameless
                self.sent, self.progress = False, ""
                if self.suspicion.note(exc) or self.suspicion.is_hopeless:
                    advice = "Ask for fewer samples or tokens at a time."
                    raise EngineError(self.suspicion.why_given_up("sample", advice)) from exc

    @property
    def _line(self) -> FairGate:
        workers = self.deps.workers
        return workers.trials if self.suspicion.on_trial else workers.sampling

    @property
    def _pauses(self) -> Pauses:
        return self.deps.open_work.pauses

    async def _attempt(self) -> SampleResult:
        await self.deps.workers.pool.wait_ready()
        await self.deps.sampling_sessions.prepare(self.session)
        self.num_sent, self.num_told = self.num_sent + 1, 0
        if self.num_sent > 1:  # a job has a new name each time it is sent
            name = f"{self.promise.request_id}#{self.num_sent}"
            self.job = replace(self.job, job_id=name, alone=self.suspicion.on_trial)
        self.sent, self.sent_at = True, time.time()
        result = await self.deps.workers.pool.post(self.job, self._note)
        assert isinstance(result, SampleResult)
        return result

    def reason(self) -> str:
        if not self.deps.workers.pool.is_ready:
            return "the worker is starting"
        if self.sent:
            return self.progress or "sampling"
        if pause := self._pauses.reason(self.user_id) or self.reservation.reason:
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
        if isinstance(event, Tokens):
            self.num_told += len(event.tokens)
        if self.on_event is not None:
            self.on_event(event)
