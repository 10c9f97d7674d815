"""The server's living state: lanes, promises, sessions and samples, and how they start and stop.

Routes call this; it calls the store and the workers. A model's lane is made from the journal when
first needed and dropped when its session has been silent for long, so memory follows activity, not
history. After a restart the lanes with unfinished requests come back by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from tinkex.errors import InvalidInputError
from tinkex.server import decode, validation
from tinkex.server.catalog import Catalog
from tinkex.server.config import ServerConfig
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.disk import Room
from tinkex.server.problems import ApiError
from tinkex.server.work.futures import Outcome, Promise, PromiseTable
from tinkex.server.work.lanes import Lane, Op
from tinkex.server.work.operations import REQUEST_TYPES, ModelOperations
from tinkex.server.work.recovery import StateKeeper
from tinkex.server.work.samples import SampleLedger, Samples
from tinkex.server.work.sessions import Sessions
from tinkex.server.work.write_behind import WriteBehind
from tinkex.server.workers.placement import Placement
from tinkex.server.workers.processes import ProcessWorker
from tinkex.store import CustomLoss, Model, NewOp, SeqConflictError, Store, User
from tinkex.store import Op as Row
from tinkex.store.journal import body_hash

logger = logging.getLogger(__name__)
TICK_S = 5.0
LOOK_FOR_SILENT_S = 3600.0
MAX_KNOWN = 2048
"""Numbers of a lane whose request is remembered in memory; older ones are looked up."""
MAX_GAP = 10_000
"""How far beyond the highest number known a request may be. Chunks overtake each other by tens."""


@dataclass(slots=True)
class _Known:
    """A number of a lane that is taken."""

    identity: bytes
    admitted: asyncio.Future[str | Exception]
    """The request id, or why it was refused. Not the promise: that would keep its result."""


class Service:
    def __init__(
        self, config: ServerConfig, store: Store, shelf: Shelf, workers: Sequence[ProcessWorker]
    ) -> None:
        self.config = config
        self.store = store
        self.shelf = shelf
        self.workers = list(workers)
        self.stopping = asyncio.Event()
        self.room = Room(config.data_dir, config.min_free_bytes)
        self.placement = Placement(
            workers,
            max_training=config.max_running_training,
            max_sampling=config.max_running_samples,
        )
        self.catalog = Catalog(config, self.placement)
        self.sessions = Sessions(store)
        self.promises = PromiseTable(ttl_s=config.result_ttl_s, grace_s=config.result_grace_s)
        self.samples = Samples(
            store=store,
            shelf=shelf,
            catalog=self.catalog,
            placement=self.placement,
            promises=self.promises,
            ledger=SampleLedger(config.data_dir / "samples.log"),
            max_queued=config.max_queued_samples,
            on_use=self.sessions.touch,
        )
        self.ends = WriteBehind()
        self.keeper = StateKeeper(
            store,
            self.ends,
            config.data_dir,
            every_ops=config.snapshot_every_ops,
            every_s=config.snapshot_every_s,
            revive=self._revive,
        )
        self._lanes: dict[str, Lane] = {}
        self._known: dict[str, dict[int, _Known]] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._housekeeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------------ life

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for worker in self.workers:
            await worker.start()
        for model_id in await self.store.call(self.store.journal.unfinished_models):
            try:
                lane = await self._open_lane(model_id)
            except (ApiError, InvalidInputError) as exc:
                logger.warning("requests of %s cannot go on: %s", model_id, exc)
                continue
            logger.info("%s goes on with %d requests", model_id, lane.num_waiting)
            lane.kick()
        self._housekeeping = asyncio.create_task(self._keep_house(), name="housekeeping")

    def begin_stop(self) -> None:
        """Answer every waiting poll now; called as soon as the server is told to stop."""
        self.stopping.set()
        self.promises.wake_all()
        self.samples.wake_all()

    async def stop(self) -> None:
        self.begin_stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        for lane in list(self._lanes.values()):
            await lane.close()
        self.ends.flush()
        await self.catalog.close()
        await self.samples.close()
        for worker in self.workers:
            await worker.close()

    async def _keep_house(self) -> None:
        looked_at = -LOOK_FOR_SILENT_S
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if time.monotonic() - looked_at >= LOOK_FOR_SILENT_S:
                    looked_at = time.monotonic()
                    await self.drop_silent(time.time())
                self.promises.forget_expired()
                self.samples.forget()
                for session_id in self.sessions.fell_silent(self.config.park_after_s):
                    await self.park_session(session_id)
            except Exception:
                logger.exception("housekeeping failed; it goes on in %g s", TICK_S)

    async def park_session(self, session_id: str) -> None:
        """Save the models of a session and free their memory. Busy ones stay."""
        for lane in [lane for lane in self._lanes.values() if lane.session_id == session_id]:
            if lane.ops or not await self.keeper.park(lane):
                self.sessions.touch(session_id)  # look again after the next silence
                continue
            if lane.is_idle and not lane.ops:
                self._lanes.pop(lane.model_id, None)
                self._known.pop(lane.model_id, None)
        self.sessions.forget(session_id)

    async def drop_silent(self, now: float) -> None:
        """Drop the state of models that nobody used for `state_ttl_s`; their checkpoints stay."""
        limit = now - self.config.state_ttl_s
        for model_id in await self.store.call(self.store.models.silent_since, limit):
            async with self._opening.setdefault(model_id, asyncio.Lock()):
                if model_id not in self._lanes:
                    await self.store.call(self.store.models.mark, model_id, unloaded=True)
                    await self.keeper.forget(model_id)
                    logger.info("%s was silent for too long; its state is dropped", model_id)
            self._opening.pop(model_id, None)

    async def finish_session(self, session_id: str) -> None:
        """Its client said goodbye: give the memory back as soon as the running work allows."""
        self.sessions.forget(session_id)
        await self.park_session(session_id)

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    # ------------------------------------------------------------------------ models

    async def model(self, user: User, model_id: str) -> Model:
        lane = self._lanes.get(model_id)
        if lane is not None:
            operations = lane.operations
            assert isinstance(operations, ModelOperations)
            model: Model | None = operations.model
        else:
            model = await self.store.call(self.store.models.get, model_id)
        if model is None or model.user_id != user.user_id:
            raise ApiError(404, f"No model {model_id!r} of yours; create it first.")
        if model.unloaded:
            raise _unloaded(model_id)
        return model

    async def lane(self, user: User, model_id: str) -> Lane:
        """The lane of a model of the caller's own."""
        model = await self.model(user, model_id)
        self.sessions.touch(model.session_id)
        self.store.models.touch(model_id)
        return self._lanes.get(model_id) or await self._open_lane(model_id)

    async def create_model(self, model: Model, kind: str, body: bytes) -> Promise:
        """Make a run and queue its first request, number 0. A repeat gives the same promise."""
        known = await self.store.call(self.store.models.get, model.model_id)
        if known is None:
            await self.store.call(self.store.models.create, model)
        lane = self._lanes.get(model.model_id) or await self._open_lane(model.model_id)
        return await self.submit(lane, 0, kind, body)

    async def unload(self, user: User, model_id: str) -> Promise:
        """Forget a model's state for good; its checkpoints stay."""
        lane = await self.lane(user, model_id)
        if not await lane.run_alone(lambda: self.keeper.discard(lane)):
            raise ApiError(400, f"{model_id!r} still has requests under way; wait for them.")
        await self.store.call(self.store.models.mark, model_id, unloaded=True)
        self._lanes.pop(model_id, None)
        self._known.pop(model_id, None)
        promise = self._promise(f"{model_id}:unload", user.user_id, "UnloadModel")
        payload = orjson.dumps({"model_id": model_id, "type": "unload_model"})
        promise.settle(Outcome(payload=payload))
        return promise

    async def create_custom_loss(
        self, user: User, session_id: str, body: Mapping[str, Any]
    ) -> Promise:
        """Keep a traced loss; the same (session, custom_loss_seq_id) gives back the first."""
        inputs = validation.custom_loss_inputs(body)
        graph = decode.mapping(body, "graph") or {}
        await asyncio.to_thread(validation.check_graph, inputs, graph)
        seq_id = decode.integer(body, "custom_loss_seq_id")
        loss = CustomLoss(
            loss_id=f"{session_id}:loss:{seq_id}",
            session_id=session_id,
            user_id=user.user_id,
            seq_id=seq_id,
            name=decode.text(body, "name", default="loss"),
            inputs=inputs,
            graph=graph,
            created_at=time.time(),
        )
        made = await self.store.call(self.store.sampling.create_loss, loss)
        if (made.inputs, made.graph) != (loss.inputs, loss.graph):
            raise InvalidInputError(
                f"{seq_id} was used before for another loss", path="custom_loss_seq_id"
            )
        promise = self.promises.add(_loss_promise(made))
        self.promises.settled(promise)
        return promise

    async def _open_lane(self, model_id: str) -> Lane:
        lock = self._opening.setdefault(model_id, asyncio.Lock())
        async with lock:
            lane = self._lanes.get(model_id)
            if lane is None:
                lane = await self._make_lane(model_id)
                await self.keeper.open(lane)
                self._lanes[model_id] = lane
        self._opening.pop(model_id, None)
        return lane

    async def _make_lane(self, model_id: str) -> Lane:
        model = await self.store.call(self.store.models.get, model_id)
        if model is None:
            raise ApiError(404, f"No model {model_id!r}.")
        if model.unloaded:
            raise _unloaded(model_id)
        session = await self.store.call(self.store.sessions.get, model.session_id)
        base_model = self.catalog.resolve(model.base_model)
        operations = ModelOperations(
            model,
            base_model=base_model,
            store=self.store,
            shelf=self.shelf,
            ends=self.ends,
            on_durable=self._forget_soon,
            project_id=session.project_id if session else None,
        )
        return Lane(
            model_id=model_id,
            session_id=model.session_id,
            user_id=model.user_id,
            base_model=base_model,
            place=self.placement.of_model(model_id),
            operations=operations,
            recovery=self.keeper,
            gap_limit_s=self.config.gap_limit_s,
        )

    def _forget_soon(self, request_id: str) -> None:
        """A result is in the journal: polls that come now read it there. Any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.promises.drop, [request_id])

    def _revive(self, lane: Lane, row: Row) -> Op:
        """An accepted request from the journal, with a promise that can be polled again."""
        promise = self._promise(row.request_id, row.user_id, row.kind)
        op = Op(
            seq_id=row.seq_id,
            kind=row.kind,
            request_id=row.request_id,
            body=row.body or b"",
            promise=promise,
        )
        promise.reason = lambda: lane.reason(op)
        return op

    def _promise(self, request_id: str, user_id: str, kind: str) -> Promise:
        promise = Promise(request_id, user_id, REQUEST_TYPES.get(kind, kind))
        promise.on_settle = self.promises.settled
        return self.promises.add(promise)

    # ------------------------------------------------------------------------ requests

    async def submit(
        self,
        lane: Lane,
        seq_id: int | None,
        kind: str,
        body: bytes,
        *,
        check: Callable[[], Awaitable[Any]] | None = None,
        cost: float = 1.0,
        identity: bytes | None = None,
    ) -> Promise:
        """Journal a request and queue it; the promise is durable when this returns.

        Args:
            seq_id: Its number; None takes the next one, in order of arrival.
            check: Refuses the request by raising; the number is consumed all the same. What it
                returns is kept with the request, so that it need not be decoded again.
            identity: What a repeat must have in common with the first; None: the whole body.

        Raises:
            InvalidInputError: The request is refused, or its number was used for another one.
            DiskFullError: There is too little room; the number stays free.
        """
        known = self._known.setdefault(lane.model_id, {})
        newest = max([lane.next_seq - 1, lane.last_seq, *known])
        if seq_id is None:
            seq_id = newest + 1
        same = body_hash(kind, body if identity is None else identity)
        entry = known.get(seq_id)
        if entry is not None:
            return await self._again(entry, same, seq_id)
        if seq_id < lane.next_seq or seq_id <= lane.applied_seq or seq_id in lane.ops:
            return await self._from_journal(lane, seq_id, kind, body, same)
        _check_number(lane.model_id, seq_id, newest)
        self.room.require()
        admitted: asyncio.Future[str | Exception] = asyncio.get_running_loop().create_future()
        known[seq_id] = _Known(same, admitted)
        _trim(known)
        request_id = f"{lane.model_id}:{seq_id}"
        op = Op(seq_id, kind, request_id, body, cost=cost)
        try:
            promise = await self._admit(lane, op, check)
        except Exception as exc:
            admitted.set_result(exc)
            if not isinstance(exc, InvalidInputError):
                known.pop(seq_id, None)
            raise
        admitted.set_result(request_id)
        return promise

    async def _admit(
        self, lane: Lane, op: Op, check: Callable[[], Awaitable[Any]] | None
    ) -> Promise:
        refused: InvalidInputError | None = None
        try:
            if check is not None:
                op.decoded = await check()
        except InvalidInputError as exc:
            refused = exc
        row = NewOp(
            model_id=lane.model_id,
            seq_id=op.seq_id,
            kind=op.kind,
            request_id=op.request_id,
            user_id=lane.user_id,
            body=op.body,
            refused=None if refused is None else str(refused),
        )
        await asyncio.wrap_future(self.store.journal.append(row))
        if refused is not None:
            op.mode, op.body, op.decoded = "skip", b"", None
            lane.push(op)
            raise refused
        op.promise = self._promise(op.request_id, lane.user_id, op.kind)
        lane.push(op)
        return op.promise

    async def _again(self, entry: _Known, same: bytes, seq_id: int) -> Promise:
        """The number is known: the same request gets the same answer, another one is refused."""
        if entry.identity != same:
            raise _conflict(seq_id)
        answer = await asyncio.shield(entry.admitted)
        if isinstance(answer, Exception):
            raise answer
        found = self.promises.get(answer) or await self._from_store(answer)
        if found is None:
            raise ApiError(410, f"The result of seq_id {seq_id} was handed out and is gone.")
        return found

    async def _from_journal(
        self, lane: Lane, seq_id: int, kind: str, body: bytes, same: bytes
    ) -> Promise:
        """A number that was used before this process, or long ago."""
        found = await self.store.call(self.store.journal.find, lane.model_id, seq_id)
        if found is None:
            raise InvalidInputError(
                f"{seq_id} of {lane.model_id} arrived too late: later requests were given up or "
                "run without it. Send the request under a new number.",
                path="seq_id",
            )
        first = found.body_hash
        if first != body_hash(kind, body) and not _is_same_unnamed_save(found, kind, body):
            raise _conflict(seq_id)
        if found.state == "refused":
            raise InvalidInputError(found.error or "The request was refused.")
        return self.promises.get(found.request_id) or self._from_row(found)

    # ------------------------------------------------------------------------ promises

    async def promise(self, user: User, request_id: str) -> Promise:
        """The promise of that id, from memory or from the journal.

        Raises:
            ApiError: 410 for a sample that a restart has lost; 404 for everything unknown.
        """
        found = self.promises.get(request_id)
        if found is None:
            found = await self._from_store(request_id)
        if found is None and ":loss:" in request_id:
            loss = await self.store.call(self.store.sampling.get_loss, request_id)
            found = _loss_promise(loss) if loss is not None else None
        if found is None and ":sample:" in request_id:
            self.samples.handed_out([request_id])
            raise ApiError(
                410, f"The sample {request_id!r} is no longer known here; submit it again."
            )
        if found is None or found.user_id != user.user_id:
            raise ApiError(404, f"No request {request_id!r} of yours.")
        return found

    async def _from_store(self, request_id: str) -> Promise | None:
        row = await self.store.call(self.store.journal.get, request_id)
        if row is None:
            return None
        if row.state == "accepted":  # its lane has not been opened since the start
            (await self._open_lane(row.model_id)).kick()
            found = self.promises.get(request_id)
            if found is not None:
                return found
        return self._from_row(row)

    def _from_row(self, row: Row) -> Promise:
        promise = Promise(row.request_id, row.user_id, REQUEST_TYPES.get(row.kind, row.kind))
        if row.state in ("failed", "refused"):
            promise.outcome = Outcome(
                error=row.error or "failed", category=row.error_category or "server"
            )
        elif row.state == "done" and row.result is not None:
            promise.outcome = Outcome(
                kind=row.result_type or "json",  # type: ignore[arg-type]
                payload=row.result,
            )
        elif row.state == "done":
            promise.outcome = Outcome(
                error="The result was handed out before and is gone.", category="lost"
            )
        else:  # no lane has it any more: it ran, and a crash on a full disk lost its end
            promise.outcome = Outcome(
                error="The request ran, but its result was lost when the server died.",
                category="lost",
            )
        return promise

    def fetched(self, promise: Promise) -> None:
        """A result was handed out."""
        if not self.promises.fetched(promise):
            return
        if promise.request_type == "Sample":
            self.samples.handed_out([promise.request_id])
        else:
            self.ends.put(partial(self._mark_retrieved, promise.request_id))

    def _mark_retrieved(self, request_id: str) -> Future[None]:
        """The journal keeps the result for the grace, so the memory need not."""
        written = self.store.journal.retrieved(request_id, self.config.result_grace_s)
        if not self.ends.is_behind:  # else its end may not be in the journal yet
            written.add_done_callback(
                lambda done: None if done.exception() else self._forget_soon(request_id)
            )
        return written


def _loss_promise(loss: CustomLoss) -> Promise:
    payload = orjson.dumps({"loss_id": loss.loss_id, "type": "create_custom_loss"})
    promise = Promise(loss.loss_id, loss.user_id, "CreateCustomLoss")
    promise.settle(Outcome(payload=payload))
    return promise


def new_seed() -> int:
    """A seed for an adapter whose creator gave none; journaled, so that a replay uses it again."""
    return secrets.randbelow(2**31)


def canonical(body: Any) -> bytes:
    """JSON whose bytes depend on the content alone."""
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


def new_model(
    *,
    user: User,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    lora: dict[str, Any],
    optimizer_config: dict[str, Any],
    user_metadata: dict[str, Any] | None,
) -> Model:
    now = time.time()
    return Model(
        model_id=f"{session_id}:train:{model_seq_id}",
        session_id=session_id,
        user_id=user.user_id,
        model_seq_id=model_seq_id,
        base_model=base_model,
        lora=lora,
        optimizer_config=optimizer_config,
        user_metadata=user_metadata,
        created_at=now,
        last_request_time=now,
        corrupted=False,
        unloaded=False,
    )


def _is_same_unnamed_save(row: Row, kind: str, body: bytes) -> bool:
    """A retried unnamed save carries a new sampling_session_seq_id (contract 3.5)."""
    if kind != "save_weights_for_sampler" or row.kind != kind:
        return False
    if row.body is None:
        return True
    drop = ("sampling_session_seq_id", "sampling_session_id")
    first, again = (
        {k: v for k, v in orjson.loads(text).items() if k not in drop} for text in (row.body, body)
    )
    return bool(first == again and first.get("path") is None)


def _unloaded(model_id: str) -> ApiError:
    return ApiError(
        400,
        f"{model_id!r} was unloaded, or unused for so long that its state was dropped "
        "(state_ttl_s); load a checkpoint into a new model.",
    )


def _check_number(model_id: str, seq_id: int, newest: int) -> None:
    if seq_id > decode.MAX_SEQ_ID:
        raise InvalidInputError(
            f"{model_id} has used its last number, {decode.MAX_SEQ_ID}. Save its state and load it "
            "into a new model.",
            path="seq_id",
        )
    if seq_id > newest + MAX_GAP:
        raise InvalidInputError(
            f"{seq_id} is too far ahead: the highest number of {model_id} so far is {newest}, and "
            f"a request may come at most {MAX_GAP} before those between. Number requests one by "
            "one; this one was not run and its number stays free.",
            path="seq_id",
        )


def _conflict(seq_id: int) -> SeqConflictError:
    return SeqConflictError(
        f"seq_id {seq_id} was used before for another request. Every request needs a new number; "
        "only an exact repeat may reuse one.",
        path="seq_id",
    )


def _trim(known: dict[int, _Known]) -> None:
    while len(known) > MAX_KNOWN:
        oldest = next(iter(known))
        if not known[oldest].admitted.done():
            return
        del known[oldest]
