"""The server's living state: lanes, promises, sessions and samples, and how they start and stop.

Routes call this; it calls the store and the workers. A model's lane is made from the journal when
first needed and dropped when its session has been silent for long, so memory follows activity, not
history. After a restart the lanes with unfinished requests come back by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from weakref import WeakValueDictionary

import orjson

from tinkex.errors import InvalidInputError
from tinkex.server.fairness import pauses
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.guard.auth import Auth
from tinkex.server.guard.budgets import Prices, SpendingBudgets
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.quotas import Quotas
from tinkex.server.jobs import validation
from tinkex.server.jobs.score_cache import ScoreCache
from tinkex.server.operations.table import make_operations
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.disk import Room
from tinkex.server.process.problems import ApiError
from tinkex.server.process.steady_clock import SteadyClock
from tinkex.server.runs.curves import LiveCurves
from tinkex.server.runs.live_sessions import LiveSessions
from tinkex.server.runs.rates import MeasuredRates
from tinkex.server.runs.rollouts import Rollouts
from tinkex.server.runs.timeline import Timelines
from tinkex.server.service.interpolation import Interpolations
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.finished_logs import FinishedLogs
from tinkex.server.work.futures import Outcome, Promise, PromiseTable
from tinkex.server.work.gated_pool import GatedPool
from tinkex.server.work.inbox import Inbox
from tinkex.server.work.kept_results import KeptResults
from tinkex.server.work.lane import Lane
from tinkex.server.work.model_state import ModelState, SnapshotFiles
from tinkex.server.work.open_work import OpenWork
from tinkex.server.work.operation import Operation
from tinkex.server.work.results import Results
from tinkex.server.work.sample_queue import SampleQueue
from tinkex.server.work.sampling_sessions import SamplingSessions
from tinkex.server.work.write_behind import WriteBehind
from tinkex.server.workers.catalog import Catalog
from tinkex.server.workers.pool import Pool
from tinkex.store import (
    CustomLoss,
    Model,
    SampleLedger,
    SeqConflictError,
    Store,
    User,
)
from tinkex.types import CreateCustomLossRequest
from tinkex.wire.requests import Opened

logger = logging.getLogger(__name__)
TICK_S = 5.0
LOOK_FOR_SILENT_S = 3600.0


class Service:
    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        shelf: Shelf,
        pool: Pool,
        auth: Auth,
        failed_logins: FailedLogins,
        quotas: Quotas,
    ) -> None:
        self.config = config
        self.store = store
        self.shelf = shelf
        self._quotas = quotas
        self.stopping = asyncio.Event()
        self.workers = GatedPool.before(
            pool,
            max_training=config.max_running_training,
            max_sampling=config.max_running_samples,
        )
        self.catalog = Catalog(config, pool)
        self.sessions = LiveSessions(store)
        self.curves = LiveCurves(store)
        self.timelines = Timelines()
        self.rates = MeasuredRates(store)
        self.rollouts = Rollouts(
            is_on=config.keep_rollouts,
            ttl_s=config.rollout_ttl_s,
            max_bytes=config.max_rollout_bytes,
        )
        self.budgets = SpendingBudgets(store, Prices.read(config.prices, self.catalog.engine_name))
        self.open_work = OpenWork(quotas, self.budgets, store.audit.record)
        self.room = Room(config.data_dir, config.min_free_bytes)
        self.promises = PromiseTable(ttl_s=config.result_ttl_s, grace_s=config.result_grace_s)
        self.ends = WriteBehind(store.journal)
        self.results = Results(
            store, self.promises, self.ends, grace_s=config.result_grace_s, resume=self._resume
        )
        self.sampling_sessions = SamplingSessions(
            store, shelf, self.catalog, self.sessions, max_unnamed=config.max_unnamed_samplers
        )
        self._deps = self._dependencies(quotas, auth, failed_logins)
        self.finished_logs = FinishedLogs(SampleLedger(config.data_dir / "samples.log"))
        self.kept = KeptResults(
            config.data_dir / "results",
            memory_bytes=config.max_kept_result_bytes,
            disk_quota=shelf.disk_quota,
            room=self.room,
        )
        self.samples = SampleQueue(self._deps, self.finished_logs, self.kept)
        self.interpolations = Interpolations(self._deps)
        self.operations = make_operations(self._deps)
        self._snapshots = self._snapshot_files()
        self._inboxes: dict[str, Inbox] = {}  # of every model that is in memory, with its lane
        # A lock lives as long as somebody holds it or waits for it.
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._housekeeping: asyncio.Future[tuple[None, None]] | None = None
        self._clock = SteadyClock()

    def _dependencies(
        self, quotas: Quotas, auth: Auth, failed_logins: FailedLogins
    ) -> Dependencies:
        return Dependencies(
            config=self.config,
            store=self.store,
            shelf=self.shelf,
            workers=self.workers,
            catalog=self.catalog,
            quotas=quotas,
            disk_quota=self.shelf.disk_quota,
            open_work=self.open_work,
            room=self.room,
            promises=self.promises,
            ends=self.ends,
            results=self.results,
            curves=self.curves,
            rollouts=self.rollouts,
            timelines=self.timelines,
            rates=self.rates,
            sampling_sessions=self.sampling_sessions,
            teacher_scores=ScoreCache(),
            auth=auth,
            failed_logins=failed_logins,
        )

    def _snapshot_files(self) -> SnapshotFiles:
        return SnapshotFiles(
            store=self.store,
            ends=self.ends,
            folders=self.shelf.folders,
            disk_quota=self.shelf.disk_quota,
            every_requests=self.config.snapshot_every_ops,
            every_s=self.config.snapshot_every_s,
        )

    # ------------------------------------------------------------------------ life

    async def start(self) -> None:
        await self._restore_pauses()
        await asyncio.to_thread(self.room.keep_reserves)
        await self.store.call(self._quotas.load)
        await self.store.call(self.shelf.measure)
        await self.store.call(self.store.count_bytes)
        await self.budgets.open()
        await self.rates.open()
        await self.workers.pool.start()
        # Only those with unfinished requests: the others are opened when somebody asks for them.
        # All before any goes on: what one waits for of a budget may be held by another.
        for model_id in await self.store.call(self.store.journal.unfinished_models):
            try:
                await self._open(model_id)
            except (ApiError, InvalidInputError) as exc:
                logger.warning("requests of %s cannot go on: %s", model_id, exc)
        for lane in self.lanes:
            logger.info("%s goes on with %d requests", lane.model.model_id, lane.num_waiting)
            lane.kick()
        self._housekeeping = asyncio.gather(self._keep_house(), self._watch_streams())

    async def _restore_pauses(self) -> None:
        now, page = time.time(), self.store.audit.page
        entries = await self.store.call(
            page, pauses.MAX_USERS, 0, prefix=pauses.EVENTS, start=now - 2 * pauses.FORGET_S
        )
        self.open_work.pauses.restore(
            (now - entry.timestamp, entry.user_id, entry.event, entry.details)
            for entry in reversed(entries)
        )

    async def _resume(self, model_id: str) -> None:
        """Let the unfinished requests of a model go on."""
        lane = (await self._open(model_id)).lane
        logger.info("%s goes on with %d requests", model_id, lane.num_waiting)
        lane.kick()

    def begin_stop(self) -> None:
        """Answer every waiting poll now; called as soon as the server is told to stop."""
        self.stopping.set()
        self.promises.wake_all()
        self.finished_logs.wake_all()

    async def stop(self) -> None:
        self.begin_stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        # Lanes before the notes of ends: one that closes may still leave some. The pool last: lanes
        # and samples wait for what it runs.
        for lane in self.lanes:
            await lane.close()
        self.ends.flush()
        await self.curves.flush()
        await self.rates.flush()
        await self.catalog.close()
        await self.samples.close()
        await self.interpolations.close()
        self.finished_logs.close()
        await self.workers.pool.close()

    async def _keep_house(self) -> None:
        looked_at = -LOOK_FOR_SILENT_S
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if time.monotonic() - looked_at >= LOOK_FOR_SILENT_S:
                    looked_at = time.monotonic()
                    await self.drop_silent(self._clock.now())
                await asyncio.to_thread(self.room.keep_reserves)
                await self.curves.flush()
                await self.rates.flush()
                self.rollouts.forget()
                self.promises.forget_expired()
                self.finished_logs.forget()
                for session_id in self.sessions.fell_silent(self.config.park_after_s):
                    await self.park_session(session_id)
            except Exception:
                logger.exception("housekeeping failed; it goes on in %g s", TICK_S)

    async def _watch_streams(self) -> None:
        """Not in the rounds of `_keep_house`, which may take long over models that are saved."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.samples.end_revoked()
            except Exception:
                logger.exception("streams were not looked at; again in %g s", TICK_S)

    async def park_session(self, session_id: str, *, save: bool = True) -> None:
        """Save the models of a session and free their memory. Busy ones stay.

        Without `save` the journal since their last snapshots is what they are restored from.
        """
        for lane in [lane for lane in self.lanes if lane.model.session_id == session_id]:
            if await lane.park(save=save):
                self._inboxes.pop(lane.model.model_id, None)
                self.curves.let_go(lane.model.model_id)
            else:
                self.sessions.touch(session_id)  # look again after the next silence
        self.sessions.forget(session_id)

    async def drop_silent(self, now: float) -> None:
        """Drop the state of models that nobody used for long; their checkpoints stay.

        That of a session that its client closed goes first, since nobody can train on there; its
        curves stay as long as all others.
        """
        limit = now - self.config.state_ttl_s
        await self.store.call(self.store.curves.drop_unloaded, limit)
        models = self.store.models
        closed = await self.store.call(models.closed_since, now - self.config.closed_state_ttl_s)
        for model_id in closed:
            if await self._drop_state(model_id):
                logger.info("%s was closed by its client; its state is dropped", model_id)
        for model_id in await self.store.call(models.silent_since, limit):
            if await self._drop_state(model_id):
                await self.curves.drop(model_id)
                self.rollouts.drop_run(model_id)
                logger.info("%s was silent for too long; its state is dropped", model_id)

    async def _drop_state(self, model_id: str) -> bool:
        """Forget what a model could be restored from, unless it is in memory."""
        # Under the lock of `_open`: a model that is being opened reads what would be dropped here.
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            if model_id in self._inboxes:
                return False
            await self.store.call(self.store.models.mark, model_id, unloaded=True)
            await self._snapshots.forget(model_id)
            return True

    async def forget_state(self, model_id: str) -> bool:
        """Forget what a model is in memory and could be restored from. False while it has work."""
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            lane = self.find_lane(model_id)
            if lane is not None and (lane.num_waiting or not await lane.discard()):
                return False
            await self.store.call(self.store.models.mark, model_id, unloaded=True)
            await self._snapshots.forget(model_id)
            self._inboxes.pop(model_id, None)
            return True

    async def finish_session(self, session_id: str) -> None:
        """Its client said goodbye: give the memory back as soon as the running work allows.

        No snapshot is made: hardly anyone comes back, and a replay would bring it all back.
        """
        self.sessions.forget(session_id)
        await self.park_session(session_id, save=False)

    @property
    def num_lanes(self) -> int:
        return len(self._inboxes)

    @property
    def lanes(self) -> list[Lane]:
        return [inbox.lane for inbox in self._inboxes.values()]

    def find_lane(self, model_id: str) -> Lane | None:
        """The lane of a model that is in memory: every one that has work under way."""
        inbox = self._inboxes.get(model_id)
        return inbox.lane if inbox is not None else None

    def doing(self, model_id: str) -> str:
        """The work of a model right now, in words; empty when it has nothing to do."""
        lane = self.find_lane(model_id)
        return lane.doing if lane is not None else ""

    def busy_models(self) -> list[str]:
        """The models that have something to do right now."""
        return [lane.model.model_id for lane in self.lanes if lane.num_waiting]

    # ------------------------------------------------------------------------ models

    async def model(self, user: User, model_id: str) -> Model:
        if (lane := self.find_lane(model_id)) is not None:
            model: Model | None = lane.model
        else:
            model = await self.store.call(self.store.models.get, model_id)
        if model is None or model.user_id != user.user_id:
            raise ApiError(404, f"No model {model_id!r} of yours; create it first.")
        if model.unloaded:
            raise _unloaded(model_id)
        return model

    async def inbox(self, user: User, model_id: str) -> Inbox:
        """The inbox of a model of the caller's own."""
        model = await self.model(user, model_id)
        await self.sessions.use(model.session_id)
        self.store.models.touch(model_id)
        return self._inboxes.get(model_id) or await self._open(model_id)

    async def new_inbox(self, operation: Operation[Any], opened: Opened, user: User) -> Inbox:
        """The inbox of the model that a request makes; a repeat gives the first one's."""
        request = opened.read()
        if request.session_id is None:
            raise InvalidInputError("is needed where there is no model_id", path="session_id")
        await self.sessions.owned(user, request.session_id)
        model = await operation.new_model(request, user)
        known = await self.store.call(self.store.models.get, model.model_id)
        if known is None:
            async with self._quotas.one_more(user.user_id, "models"):
                await self.store.call(self.store.models.create, model)
        elif known.base_model != model.base_model:
            raise SeqConflictError(
                f"{model.model_seq_id} was used before for a model on {known.base_model!r}; "
                "every model of a session needs a new number.",
                path="model_seq_id",
            )
        return self._inboxes.get(model.model_id) or await self._open(model.model_id)

    async def unload(self, user: User, model_id: str) -> Promise:
        """Forget a model's state for good; its checkpoints stay."""
        inbox = await self.inbox(user, model_id)
        if not await inbox.lane.discard():
            raise ApiError(400, f"{model_id!r} still has requests under way; wait for them.")
        await self.store.call(self.store.models.mark, model_id, unloaded=True)
        self._inboxes.pop(model_id, None)
        promise = self.results.promise(f"{model_id}:unload", user.user_id, "unload_model")
        payload = orjson.dumps({"model_id": model_id, "type": "unload_model"})
        promise.settle(Outcome(payload=payload))
        return promise

    async def create_custom_loss(self, user: User, request: CreateCustomLossRequest) -> Promise:
        """Keep a traced loss; the same (session, custom_loss_seq_id) gives back the first."""
        inputs = [item.model_dump() for item in request.inputs]
        graph = request.graph.model_dump()
        await asyncio.to_thread(validation.check_graph, inputs, graph)
        seq_id = request.custom_loss_seq_id
        size = await asyncio.to_thread(lambda: len(orjson.dumps(inputs)) + len(orjson.dumps(graph)))
        loss = CustomLoss(
            loss_id=f"{request.session_id}:loss:{seq_id}",
            session_id=request.session_id,
            user_id=user.user_id,
            seq_id=seq_id,
            name=request.name,
            inputs=inputs,
            graph=graph,
            created_at=time.time(),
            size_bytes=size,
        )
        stored = await self.store.call(self.store.sampling.get_loss, loss.loss_id)
        if stored is None:  # a repeat stores nothing, and needs no room
            with self.shelf.disk_quota.admitted(loss.loss_id, user.user_id, size):
                stored = await self.store.call(self.store.sampling.create_loss, loss)
        if (stored.inputs, stored.graph) != (loss.inputs, loss.graph):
            raise InvalidInputError(
                f"{seq_id} was used before for another loss", path="custom_loss_seq_id"
            )
        promise = self.promises.add(_loss_promise(stored))
        self.promises.settled(promise)
        return promise

    async def _open(self, model_id: str) -> Inbox:
        """Bring a model into memory: its lane, with what the journal holds for it."""
        # Two requests may come at once, and a model must not have two lanes.
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            inbox = self._inboxes.get(model_id)
            if inbox is None:
                lane = await self._make_lane(model_id)
                await lane.open()
                unnumbered = await self.store.call(self.store.journal.unnumbered, model_id)
                inbox = self._inboxes[model_id] = Inbox(lane, self._deps, unnumbered)
        return inbox

    async def _make_lane(self, model_id: str) -> Lane:
        model = await self.store.call(self.store.models.get, model_id)
        if model is None:
            raise ApiError(404, f"No model {model_id!r}.")
        if model.unloaded:
            raise _unloaded(model_id)
        session = await self.store.call(self.store.sessions.get, model.session_id)
        base_model = self.catalog.resolve(model.base_model)
        state = ModelState(model, base_model, self.workers.pool, self._snapshots)
        project_id = session.project_id if session else None
        return Lane(model, project_id, state, self.operations, self._deps)

    # ------------------------------------------------------------------------ promises

    async def promise(self, user: User, request_id: str) -> Promise:
        """The promise of that id, from memory or from the journal.

        Raises:
            ApiError: 410 for a sample that a restart has lost; 404 for everything unknown.
        """
        promise = await self.results.find(request_id)
        if promise is None and ":loss:" in request_id:
            loss = await self.store.call(self.store.sampling.get_loss, request_id)
            promise = _loss_promise(loss) if loss is not None else None
        if promise is None:
            promise = await self.interpolations.find(request_id)
        if promise is None and ":sample:" in request_id:
            self.finished_logs.handed_out([request_id])
            raise ApiError(
                410, f"The sample {request_id!r} is no longer known here; submit it again."
            )
        if promise is None or promise.user_id != user.user_id:
            raise ApiError(404, f"No request {request_id!r} of yours.")
        return promise

    def fetched(self, promise: Promise) -> None:
        """A result was handed out."""
        if not self.promises.fetched(promise):
            return
        if promise.request_type == "Sample":
            self.finished_logs.handed_out([promise.request_id])
        else:
            self.results.fetched(promise.request_id)


def _loss_promise(loss: CustomLoss) -> Promise:
    payload = orjson.dumps({"loss_id": loss.loss_id, "type": "create_custom_loss"})
    promise = Promise(loss.loss_id, loss.user_id, "CreateCustomLoss")
    promise.settle(Outcome(payload=payload))
    return promise


def _unloaded(model_id: str) -> ApiError:
    return ApiError(
        400,
        f"{model_id!r} was unloaded, or unused for so long that its state was dropped "
        "(state_ttl_s); load a checkpoint into a new model.",
    )
