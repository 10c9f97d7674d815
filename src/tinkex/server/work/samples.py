"""Samples: unordered, bounded, and told apart by (sampling session, seq_id).

A sample waits at the worker's gate, runs, and settles its promise; when the worker dies it simply
runs again on the next one. Promises live in memory only: what a crash of the server loses is
remembered as lost in `SampleLedger`, so that a client waiting for it is told at once (410) and asks
again. Who waits for whom: `FinishedLog` wakes the batched poller, the promise wakes single polls.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from tinkex.engine.jobs import Event, ModelInfo, SampleJob, SampleResult
from tinkex.errors import EngineError, InvalidInputError
from tinkex.server.fairness.line import take_from
from tinkex.server.files.checkpoints import Shelf, parse_path
from tinkex.server.guard.quotas import Quotas
from tinkex.server.jobs import encode, validation
from tinkex.server.process.problems import ApiError
from tinkex.server.work.futures import FinishedLog, Outcome, Promise, PromiseTable
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.kept_results import KeptResults
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.origins import Origins
from tinkex.server.work.sample_run import SampleRun
from tinkex.server.workers.catalog import Catalog
from tinkex.store import Checkpoint, SampleLedger, SamplingSession, Store, UsageKind, User
from tinkex.types import SampleRequest

logger = logging.getLogger(__name__)
CLONE_STRIDE = 10**9
MAX_CACHED_SESSIONS = 10_000
IDLE_LOG_S = 3600.0
LOST_S = 86_400.0
ACCESS_S = 1.0
"""How long the right to read a checkpoint may be taken for granted."""


@dataclass(frozen=True, slots=True)
class AcceptedSample:
    promise: Promise
    sequence_ids: tuple[str, ...]
    snapshot: dict[str, Any]
    """Which weights it is from; see `Origins`."""


class Samples:
    """Every sampling request of the server."""

    def __init__(
        self,
        *,
        store: Store,
        shelf: Shelf,
        catalog: Catalog,
        place: GatedPool,
        promises: PromiseTable,
        ledger: SampleLedger,
        max_queued: int,
        max_sample_bytes: int,
        max_unnamed: int,
        kept: KeptResults,
        quotas: Quotas,
        open_work: OpenWork,
        on_use: Callable[[str], Awaitable[None]],
        on_sampled: Callable[[SamplingSession, SampleJob, SampleResult], None],
    ) -> None:
        self._store = store
        self._shelf = shelf
        self._catalog = catalog
        self._place = place
        self._promises = promises
        self._ledger = ledger
        self._max_queued = max_queued
        self._max_sample_bytes = max_sample_bytes
        self._max_unnamed = max_unnamed
        self._used: OrderedDict[str, float] = OrderedDict()  # when unnamed weights were asked for
        self.kept = kept
        self._quotas = quotas
        self._open_work = open_work
        self._num_open: Counter[str] = Counter()  # samples of each user that wait or run
        self._on_sampled = on_sampled
        self._origins = Origins(shelf)
        self._on_use = on_use  # a session shows a sign of life, if it may
        self._sessions: OrderedDict[str, SamplingSession] = OrderedDict()
        self._logs: dict[tuple[str, int], FinishedLog] = {}
        self._tasks: dict[asyncio.Task[None], SampleRun] = {}
        self._judged: dict[str, float] = {}  # when a session's right to read was looked at
        self._hashes: dict[str, bytes] = {}
        self._pending: dict[tuple[str, int], dict[str, Promise]] = {}
        self._lost = list(ledger.lost)
        self._started_at = time.monotonic()
        for request_id in self._lost:
            if (key := _poller_of(request_id)) is not None:
                self.log(*key).add(request_id, 0)

    # ------------------------------------------------------------------------ sampling sessions

    async def create_session(
        self, user: User, session_id: str, seq_id: int, base_model: str | None, path: str | None
    ) -> SamplingSession:
        """Open a sampling session; the same (session, seq_id) gives back the first."""
        named = (f"{session_id}:sample:{seq_id}", session_id, seq_id)
        session = await self._new_session(user, *named, base_model, path)
        if session is None:
            raise InvalidInputError("one of base_model and model_path is needed", path="base_model")
        self._catalog.resolve(session.base_model)
        return await self._store.call(self._store.sampling.create, session)

    async def _new_session(
        self,
        user: User,
        name: str,
        session_id: str,
        seq_id: int,
        base_model: str | None,
        path: str | None,
    ) -> SamplingSession | None:
        """Of a checkpoint or of a base model, not stored yet; None when neither is named."""
        folder = None
        if path is not None:
            found = await self._readable(user, path, base_model)
            base_model, folder = found.base_model, found.folder
        if base_model is None:
            return None
        return SamplingSession(
            sampling_session_id=name,
            session_id=session_id,
            user_id=user.user_id,
            seq_id=seq_id,
            base_model=base_model,
            model_path=path,
            folder=folder,
            ephemeral=False,
            created_at=time.time(),
        )

    async def _readable(self, user: User, path: str, base_model: str | None) -> Checkpoint:
        if parse_path(path).kind == "external_weights":
            raise InvalidInputError(
                f"{path} is an export; sample from weights/ or sampler_weights/", path="model_path"
            )
        found, resolve = await self._shelf.readable(path, user), self._catalog.resolve
        if base_model is not None and resolve(base_model) != resolve(found.base_model):
            raise InvalidInputError(
                f"{path} was trained on {found.base_model!r}, not on {base_model!r}",
                path="base_model",
            )
        return found

    async def session(self, user: User, sampling_session_id: str) -> SamplingSession:
        found = self._sessions.get(sampling_session_id)
        if found is None:
            found = await self._store.call(self._store.sampling.get, sampling_session_id)
            if found is not None:
                self._sessions[sampling_session_id] = found
                if len(self._sessions) > MAX_CACHED_SESSIONS:
                    self._sessions.popitem(last=False)
        if found is None or found.user_id != user.user_id:
            raise ApiError(404, f"No sampling session {sampling_session_id!r} of yours.")
        if found.ephemeral and found.folder is None:
            raise ApiError(
                410,
                f"The unnamed weights of {sampling_session_id!r} are gone: its session ended, or "
                f"{self._max_unnamed} others of its run were used since. To keep weights, save "
                "them under a name: save_weights_for_sampler(name).",
            )
        if found.ephemeral:
            self._used[sampling_session_id] = time.time()
            if len(self._used) > MAX_CACHED_SESSIONS:
                self._used.popitem(last=False)
        await self._check_access(found)
        return found

    async def drop_superseded(self, model_id: str) -> None:
        """Let the unnamed weights of a run go that were not used for longest, beyond its share.

        A loop that samples from each step's weights would otherwise fill the disk; the weights it
        goes on using, such as those it began with, stay.
        """
        found = await self._store.call(self._store.sampling.unnamed_of, model_id)
        num_many = len(found) - self._max_unnamed
        if not self._max_unnamed or num_many <= 0:
            return
        needed = {run.promise.request_id.rpartition(":")[0] for run in self._tasks.values()}
        needed.add(found[-1].sampling_session_id)  # just made
        names = {one.sampling_session_id: one.created_at for one in found}
        order = sorted(names, key=lambda name: max(names[name], self._used.get(name, 0.0)))
        for name in [name for name in order if name not in needed][:num_many]:
            await self._store.call(self._store.sampling.forget_folder, name)
            self._sessions.pop(name, None)
            self._used.pop(name, None)

    async def _check_access(self, session: SamplingSession) -> None:
        """Sampling from somebody else's checkpoint ends when it is no longer shared or replaced.

        Raises:
            ApiError: 410.
        """
        if session.model_path is None:
            return
        name, now = session.sampling_session_id, time.monotonic()
        if now - self._judged.get(name, -ACCESS_S) < ACCESS_S:
            return
        found = await self._store.call(self._store.checkpoints.get, session.model_path)
        is_own = session.user_id == (found.user_id if found else await self._run_owner(session))
        if not is_own and (found is None or not found.public or found.folder != session.folder):
            raise ApiError(
                410, f"{session.model_path} is no longer shared with you, or was replaced."
            )
        if len(self._judged) >= MAX_CACHED_SESSIONS:
            self._judged.clear()
        self._judged[name] = now

    async def _prepare(self, session: SamplingSession) -> None:
        """Right before a sample is sent: may it still be, and are its weights here?"""
        await self._check_access(session)
        if session.folder is not None:
            await self._shelf.at_hand(session.folder)

    async def _run_owner(self, session: SamplingSession) -> str | None:
        run_id = parse_path(session.model_path or "").run_id
        run = await self._store.call(self._store.models.get, run_id)
        return run.user_id if run else None

    # ------------------------------------------------------------------------ submitting

    async def submit(
        self, user: User, asked: SampleRequest, fields: dict[str, Any]
    ) -> AcceptedSample:
        """Promise a sample, or refuse it. `fields` is the request as it was sent.

        Raises:
            ApiError: 429 when too many wait.
        """
        session = await self._session_of(user, asked)
        snapshot = await self._origins.of(session)
        number = secrets.token_hex(8) if asked.seq_id is None else asked.seq_id
        request_id = f"{session.sampling_session_id}:{number}"
        digest = hashlib.blake2b(
            orjson.dumps(fields, option=orjson.OPT_SORT_KEYS), digest_size=16
        ).digest()
        known = self._promises.get(request_id)
        if known is not None:
            if self._hashes.get(request_id) != digest:
                raise InvalidInputError(
                    f"seq_id {asked.seq_id} was used before for another sample; "
                    "every sample needs a new number.",
                    path="seq_id",
                )
            return AcceptedSample(known, _sequence_ids(request_id, asked.num_samples), snapshot)
        job = await self._job(session, asked, request_id)
        self._check_room(user.user_id)
        self._quotas.check(user.user_id, "result_bytes", self.kept.bytes_of(user.user_id))
        promise = self._start(user, session, request_id, job, digest)
        return AcceptedSample(promise, _sequence_ids(request_id, job.num_samples), snapshot)

    def _check_room(self, user_id: str) -> None:
        """Refuse a sample when too many wait, in all or of this user.

        When the queue is full, a user with less than an equal share of it is still let in.

        Raises:
            ApiError: 429.
        """
        self._open_work.require(user_id)
        limit = self._max_queued + self._place.sampling.num_slots
        mine = self._num_open[user_id]
        num_users = len(self._num_open) + (user_id not in self._num_open)
        if mine < limit // (num_users + 1) or (len(self._tasks) < limit and mine < limit * 3 // 4):
            return
        raise ApiError(
            429,
            f"{mine} of your samples wait already, {len(self._tasks)} in all; try again in a "
            "moment.",
            headers={"Retry-After": "1"},
        )

    async def stream(
        self, user: User, asked: SampleRequest, on_event: Callable[[Event], None] | None
    ) -> tuple[Promise, asyncio.Task[None], tuple[str, ...]]:
        """Start a sample for a caller who stays connected.

        Its tokens are passed to `on_event` while they are made; None: only the whole is wanted.
        """
        session = await self._session_of(user, asked)
        request_id = f"{session.sampling_session_id}:stream-{secrets.token_hex(8)}"
        job = await self._job(session, asked, request_id, stream=on_event is not None)
        self._check_room(user.user_id)
        promise = Promise(request_id, user.user_id, "Sample")
        task = self._launch(promise, user, session, job, on_event)
        return promise, task, _sequence_ids(request_id, job.num_samples)

    async def snapshot(self, user: User, asked: SampleRequest) -> dict[str, Any]:
        """Which weights a request would sample from."""
        return await self._origins.of(await self._session_of(user, asked))

    async def _session_of(self, user: User, asked: SampleRequest) -> SamplingSession:
        if asked.sampling_session_id is not None:
            session = await self.session(user, asked.sampling_session_id)
            await self._on_use(session.session_id)
            return session
        name = f"direct-{secrets.token_hex(8)}"
        made = await self._new_session(user, name, "", 0, asked.base_model, asked.model_path)
        if made is None:
            raise InvalidInputError(
                "one of sampling_session_id, model_path and base_model is needed",
                path="sampling_session_id",
            )
        return made

    async def _job(
        self,
        session: SamplingSession,
        asked: SampleRequest,
        request_id: str,
        *,
        stream: bool = False,
    ) -> SampleJob:
        info: ModelInfo | None = await self._catalog.info(session.base_model)
        name = session.folder
        job = validation.sample_job(
            asked,
            job_id=f"{request_id}#1",
            base_model=self._catalog.resolve(session.base_model),
            folder=None if name is None else str(self._shelf.folders.path(name)),
            info=info,
            tenant=session.user_id,
            stream=stream,
        )
        validation.check_result_size(job, info, self._max_sample_bytes)
        return job

    def _start(
        self,
        user: User,
        session: SamplingSession,
        request_id: str,
        job: SampleJob,
        digest: bytes,
    ) -> Promise:
        self._ledger.promised(request_id)
        promise = self._promises.add(Promise(request_id, user.user_id, "Sample"))
        self._hashes[request_id] = digest
        promise.on_settle, promise.on_drop = self._settled, self._dropped
        if (key := _poller_of(request_id)) is not None:
            self._pending.setdefault(key, {})[request_id] = promise
        task = self._launch(promise, user, session, job, None)
        promise.cancel = task.cancel  # type: ignore[assignment]
        return promise

    def _settled(self, promise: Promise) -> None:
        self._promises.settled(promise)
        self.kept.keep(promise)
        key = _poller_of(promise.request_id)
        if key is None:
            return
        waiting = self._pending.get(key, {})
        waiting.pop(promise.request_id, None)
        if not waiting:
            self._pending.pop(key, None)
        size = promise.outcome.size_bytes if promise.outcome else 0
        self.log(*key).add(promise.request_id, size)

    def _dropped(self, promise: Promise) -> None:
        """It was fetched, or nobody came for it in time."""
        self.kept.drop(promise)
        self._ledger.handed_out([promise.request_id])
        self._hashes.pop(promise.request_id, None)

    def waiting(self, sampling_session_id: str, clone: int, limit: int) -> list[Promise]:
        """The samples of a batched poller that are not done, oldest first."""
        found = self._pending.get((sampling_session_id, clone), {})
        return [promise for promise, _ in zip(found.values(), range(limit), strict=False)]

    # ------------------------------------------------------------------------ running

    def _launch(
        self,
        promise: Promise,
        user: User,
        session: SamplingSession,
        job: SampleJob,
        on_event: Callable[[Event], None] | None,
    ) -> asyncio.Task[None]:
        run = SampleRun(
            promise=promise,
            session=session,
            job=job,
            on_event=on_event,
            key_id=user.key_id,
            place=self._place,
            open_work=self._open_work,
            prepare=self._prepare,
        )
        promise.reason = run.reason
        task = asyncio.create_task(self._run(run))
        self._tasks[task] = run
        self._num_open[user.user_id] += 1
        self._open_work.begin(user.user_id)
        task.add_done_callback(lambda done: self._ended(done, user.user_id))
        return task

    def _ended(self, task: asyncio.Task[None], user_id: str) -> None:
        self._tasks.pop(task, None)
        self._open_work.end(user_id)
        take_from(self._num_open, user_id)

    async def _run(self, run: SampleRun) -> None:
        run.promise.settle(await self._outcome(run))

    async def _outcome(self, run: SampleRun) -> Outcome:
        try:
            result = await run.result()
        except asyncio.CancelledError:
            return Outcome(error="The sample was cancelled.", category="cancelled")
        except (ApiError, InvalidInputError) as exc:
            return Outcome(error=str(exc), category="user")
        except EngineError as exc:
            return Outcome(error=str(exc), category="server")
        except Exception as exc:
            logger.exception("sample %s failed", run.promise.request_id)
            return Outcome(error=f"The server failed: {exc}", category="server")
        self._count(run, result)
        self._on_sampled(run.session, run.job, result)
        return Outcome(kind="sample", payload=encode.sample_payload(result))

    def _count(self, run: SampleRun, result: SampleResult) -> None:
        session, cached = run.session, result.prompt_cache_hit_tokens
        counts: dict[UsageKind, float] = {
            "sampling_prefill": result.num_prompt_tokens - cached,
            "sampling_prefill_cached": cached,
            "sampling_sample": result.num_sampled_tokens,
            "device_seconds": result.device_seconds,
        }
        self._store.usage.add_kinds(
            {kind: count for kind, count in counts.items() if count},
            user_id=run.user_id,
            session_id=session.session_id,
            model_id=_model_of(session),
            base_model=session.base_model,
            key_id=run.key_id,
        )

    # ------------------------------------------------------------------------ handing out

    def log(self, sampling_session_id: str, clone: int) -> FinishedLog:
        key = (sampling_session_id, clone)
        found = self._logs.get(key)
        if found is None:
            found = self._logs[key] = FinishedLog()
        return found

    def leave_log(self, sampling_session_id: str, clone: int) -> None:
        """A poll was answered: forget a log that has nothing to tell."""
        key = (sampling_session_id, clone)
        found = self._logs.get(key)
        if found is not None and found.is_of_no_use:
            del self._logs[key]

    def handed_out(self, request_ids: Iterable[str]) -> None:
        self._ledger.handed_out(request_ids)

    def forget(self) -> None:
        """Drop logs nobody asked for in an hour, and losses nobody asked for in a day."""
        now = time.monotonic()
        if self._lost and now - self._started_at > LOST_S:
            self.handed_out(self._lost)
            self._lost = []
        for key in [k for k, log in self._logs.items() if now - log.used_at > IDLE_LOG_S]:
            del self._logs[key]

    def under_way(self) -> dict[str, tuple[int, int]]:
        """How many samples of each user wait, and how many a worker holds."""
        sent = Counter(run.user_id for run in self._tasks.values() if run.sent)
        return {name: (number - sent[name], sent[name]) for name, number in self._num_open.items()}

    def stop(
        self, outcome: Outcome, *, user_id: str | None = None, session_id: str | None = None
    ) -> int:
        """End the samples of a user or of a session with `outcome`; gives how many."""
        ended = [
            (task, run.promise)
            for task, run in self._tasks.items()
            if run.user_id == user_id or (session_id and run.session.session_id == session_id)
        ]
        for task, promise in ended:
            promise.settle(outcome)
            task.cancel()
        return len(ended)

    def wake_all(self) -> None:
        for log in self._logs.values():
            log.polls.wake()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ledger.close()


def _model_of(session: SamplingSession) -> str | None:
    """The run whose weights are sampled, when they are a run's."""
    if session.model_path is not None:
        return parse_path(session.model_path).run_id
    return session.model_id


def _poller_of(request_id: str) -> tuple[str, int] | None:
    """The (sampling session, clone) whose poller waits for a sample; None when it has no number."""
    session_id, _, seq_id = request_id.rpartition(":")
    return (session_id, int(seq_id) // CLONE_STRIDE) if seq_id.isdigit() else None


def _sequence_ids(request_id: str, num_samples: int) -> tuple[str, ...]:
    return tuple(f"{request_id}:{i}" for i in range(num_samples))
