"""Every sample that waits or runs: unordered, bounded, told apart by (sampling session, seq_id).

A sample waits at the workers' gate, runs, and settles its promise; when the worker dies it simply
runs again on the next one. Promises live in memory only: what a crash of the server loses is
remembered as lost by the ledger of `FinishedLogs`. Which weights a sample is of, and who may read
them, is `SamplingSessions`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinkex.engine.jobs import Event, ModelInfo, SampleJob, SampleResult
from tinkex.errors import EngineError, InvalidInputError
from tinkex.server.fairness.line import take_from
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.guard.budgets import BudgetError, Reservation
from tinkex.server.jobs import encode, validation
from tinkex.server.process.problems import ApiError
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.finished_logs import FinishedLogs
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.work.kept_results import KeptResults
from tinkex.server.work.metering import count_sample, count_told, run_of, sample_spans
from tinkex.server.work.sample_run import SampleRun
from tinkex.store import SamplingSession, User
from tinkex.types import SampleRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptedSample:
    promise: Promise
    sequence_ids: tuple[str, ...]
    snapshot: dict[str, Any]
    """Which weights it is from; see `Origins`."""


class SampleQueue:
    def __init__(self, deps: Dependencies, finished_logs: FinishedLogs, kept: KeptResults) -> None:
        self._deps = deps
        self._finished_logs = finished_logs
        self.kept = kept
        self._runs: dict[asyncio.Task[None], SampleRun] = {}
        self._num_open: Counter[str] = Counter()  # samples of each user that wait or run

    # ------------------------------------------------------------------------ submitting

    async def submit(self, user: User, request: SampleRequest, body: bytes) -> AcceptedSample:
        """Promise a sample, or refuse it.

        Args:
            body: The bytes that the request came in. A repeat of a number has the same.

        Raises:
            ApiError: 429 when too many wait, or results that were not fetched.
        """
        sessions = self._deps.sampling_sessions
        session = await sessions.of_request(user, request)
        snapshot = await sessions.origins.of(session)
        number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
        request_id = f"{session.sampling_session_id}:{number}"
        # Kept in memory with the promise, never written: only a repeat within the life of the
        # promise is compared with it, so how it is made may change with any release.
        digest = hashlib.blake2b(body, digest_size=16).digest()
        known = self._deps.promises.get(request_id)
        if known is not None:
            if known.digest != digest:
                raise InvalidInputError(
                    f"seq_id {request.seq_id} was used before for another sample; "
                    "every sample needs a new number.",
                    path="seq_id",
                )
            return AcceptedSample(known, _sequence_ids(request_id, request.num_samples), snapshot)
        job, most_bytes, reserve = await self._job(session, user, request, request_id)
        self._check_room(user.user_id)
        self._deps.quotas.check(user.user_id, "result_bytes", self.kept.bytes_of(user.user_id))
        promise = Promise(request_id, user.user_id, "Sample", digest=digest)
        reservation = reserve()
        try:
            self.kept.expect(promise, most_bytes)
            self._start(promise, user, session, job, reservation)
        except BaseException:
            self._deps.open_work.budgets.release(reservation)
            self.kept.forget(promise)
            raise
        return AcceptedSample(promise, _sequence_ids(request_id, job.num_samples), snapshot)

    async def stream(
        self, user: User, request: SampleRequest, on_event: Callable[[Event], None] | None
    ) -> tuple[Promise, asyncio.Task[None], tuple[str, ...]]:
        """Start a sample for a caller who stays connected.

        Its tokens are passed to `on_event` while they are made; None: only the whole is wanted.

        Raises:
            ApiError: 429 when too many wait, or the user's work is paused.
        """
        self._deps.open_work.require_no_pause(user.user_id)
        session = await self._deps.sampling_sessions.of_request(user, request)
        request_id = f"{session.sampling_session_id}:stream-{secrets.token_hex(8)}"
        stream = on_event is not None
        job, _, reserve = await self._job(session, user, request, request_id, stream=stream)
        self._check_room(user.user_id)
        promise = Promise(request_id, user.user_id, "Sample")
        reservation = reserve()
        if reason := reservation.reason:  # nobody should wait for it on an open connection
            raise BudgetError(reason)
        task = self._launch(promise, user, session, job, reservation, on_event, is_stream=True)
        return promise, task, _sequence_ids(request_id, job.num_samples)

    async def _job(
        self,
        session: SamplingSession,
        user: User,
        request: SampleRequest,
        request_id: str,
        *,
        stream: bool = False,
    ) -> tuple[SampleJob, int, Callable[[], Reservation]]:
        """The job of a sample, the most bytes of its result, and what reserves its budgets."""
        weights = await self._deps.sampling_sessions.weights(session)
        job = validation.sample_job(
            request,
            job_id=f"{request_id}#1",
            base_model=weights.base_model,
            folder=weights.folder,
            info=weights.info,
            tenant=session.user_id,
            stream=stream,
        )
        most_bytes = validation.check_result_size(
            job, weights.info, self._deps.config.max_sample_bytes
        )
        counts = _most(job, weights.info)
        reserve = self._deps.open_work.budgets.reserve
        return job, most_bytes, partial(reserve, user.user_id, user.key_id, run_of(session), counts)

    def _check_room(self, user_id: str) -> None:
        """Refuse a sample when too many wait, in all or of this user.

        When the queue is full, a user with less than an equal share of it is still let in.

        Raises:
            ApiError: 429.
        """
        self._deps.open_work.require(user_id)
        limit = self._deps.config.max_queued_samples + self._deps.workers.sampling.num_slots
        mine = self._num_open[user_id]
        num_users = len(self._num_open) + (user_id not in self._num_open)
        if mine < limit // (num_users + 1) or (len(self._runs) < limit and mine < limit * 3 // 4):
            return
        raise ApiError(
            429,
            f"{mine} of your samples wait already, {len(self._runs)} in all; try again in a "
            "moment.",
            headers={"Retry-After": "1"},
        )

    def _start(
        self,
        promise: Promise,
        user: User,
        session: SamplingSession,
        job: SampleJob,
        reservation: Reservation,
    ) -> None:
        # On disk first: where there is no room for its line, nothing was promised.
        self._finished_logs.promised(promise)
        self._deps.promises.add(promise)
        promise.on_settle, promise.on_drop = self._settled, self._dropped
        task = self._launch(promise, user, session, job, reservation, None)
        promise.cancel = task.cancel  # type: ignore[assignment]

    def _settled(self, promise: Promise) -> None:
        self._deps.promises.settled(promise)
        self.kept.keep(promise)
        self._finished_logs.settled(promise)

    def _dropped(self, promise: Promise) -> None:
        """The result was fetched, or nobody came for it in time."""
        self.kept.drop(promise)
        self._finished_logs.handed_out([promise.request_id])

    # ------------------------------------------------------------------------ running

    def _launch(
        self,
        promise: Promise,
        user: User,
        session: SamplingSession,
        job: SampleJob,
        reservation: Reservation,
        on_event: Callable[[Event], None] | None,
        *,
        is_stream: bool = False,
    ) -> asyncio.Task[None]:
        run = SampleRun(
            promise=promise,
            session=session,
            job=job,
            on_event=on_event,
            key_id=user.key_id,
            is_stream=is_stream,
            reservation=reservation,
            deps=self._deps,
        )
        promise.reason = run.reason
        task = asyncio.create_task(self._run(run))
        self._runs[task] = run
        self._num_open[user.user_id] += 1
        self._deps.open_work.begin(user.user_id)
        self._deps.sampling_sessions.begin_sample(session)
        # Not at the end of `_run`: a task that is cancelled before its first step never gets there.
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._runs.pop(task)
        self._deps.open_work.end(run.user_id)
        self._deps.open_work.budgets.release(run.reservation)
        self._deps.sampling_sessions.end_sample(run.session)
        take_from(self._num_open, run.user_id)

    async def _run(self, run: SampleRun) -> None:
        run.promise.settle(await self._outcome(run))

    async def _outcome(self, run: SampleRun) -> Outcome:
        try:
            result = await run.result()
        except (Exception, asyncio.CancelledError) as exc:
            count_told(self._deps, run)
            return _failure(run, exc)
        count_sample(self._deps, run, result)
        if run.reservation.parts:  # a budget must know of it even if this process is killed now
            await self._deps.store.call(self._deps.store.usage.flush)
        self._deps.timelines.add(run.user_id, sample_spans(run, result))
        self._keep_rollout(run, result)
        return Outcome(kind="sample", payload=encode.sample_payload(result))

    def _keep_rollout(self, run: SampleRun, result: SampleResult) -> None:
        """Keep an answer that was sampled from the weights of a run, if its user agreed."""
        session, rollouts = run.session, self._deps.rollouts
        if not rollouts.agreement(session.user_id):
            return
        source = rollouts.source(session.sampling_session_id)
        if source is None and session.model_path is not None:
            run_id = parse_path(session.model_path).run_id
            source = run_id, self._deps.curves.num_steps(run_id)
        if source is not None:
            rollouts.sampled(
                session.user_id,
                *source,
                run.job.prompt,
                result,
                base_model=session.base_model,
                snapshot=session.model_path or session.sampling_session_id,
            )

    # ------------------------------------------------------------------------ for administrators

    def under_way(self) -> dict[str, tuple[int, int]]:
        """How many samples of each user wait, and how many a worker holds."""
        sent = Counter(run.user_id for run in self._runs.values() if run.sent)
        return {name: (number - sent[name], sent[name]) for name, number in self._num_open.items()}

    def stop(
        self, outcome: Outcome, *, user_id: str | None = None, session_id: str | None = None
    ) -> int:
        """End the samples of a user or of a session with `outcome`; gives how many."""
        ended = [
            (task, run.promise)
            for task, run in self._runs.items()
            if run.user_id == user_id or (session_id and run.session.session_id == session_id)
        ]
        for task, promise in ended:
            promise.settle(outcome)
            task.cancel()
        return len(ended)

    async def end_revoked(self) -> None:
        """End what is told to callers whose key was revoked, or whose user was disabled, since."""
        streams = [(task, run) for task, run in self._runs.items() if run.is_stream]
        for key_id, user_id in {(run.key_id, run.user_id) for _, run in streams}:
            if await self._deps.auth.may_act(key_id, user_id):
                continue
            outcome = Outcome(error="The key of this request was revoked.", category="user")
            for task, run in streams:
                if (run.key_id, run.user_id) == (key_id, user_id) and not task.done():
                    run.promise.settle(outcome)
                    task.cancel()

    async def close(self) -> None:
        for task in list(self._runs):
            task.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)


def _failure(run: SampleRun, exc: BaseException) -> Outcome:
    if isinstance(exc, asyncio.CancelledError):
        return Outcome(error="The sample was cancelled.", category="cancelled")
    if isinstance(exc, ApiError | InvalidInputError):
        return Outcome(error=str(exc), category="user")
    if isinstance(exc, EngineError):
        return Outcome(error=str(exc), category="server")
    logger.error("sample %s failed", run.promise.request_id, exc_info=exc)
    return Outcome(error=f"The server failed: {exc}", category="server")


def _most(job: SampleJob, info: ModelInfo | None) -> dict[str, float]:
    """The most tokens that a sample can use, by `MODEL kind`."""
    num_prompt, max_tokens = len(job.prompt), job.max_tokens
    if max_tokens is None:  # as many as the context takes
        max_tokens = max(0, info.max_context_length - num_prompt) if info is not None else 0
    return {
        f"{job.base_model} sampling_prefill": num_prompt,
        f"{job.base_model} sampling_sample": job.num_samples * max_tokens,
    }


def _sequence_ids(request_id: str, num_samples: int) -> tuple[str, ...]:
    return tuple(f"{request_id}:{i}" for i in range(num_samples))
