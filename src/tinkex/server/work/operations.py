"""What each training request means: the job it becomes, and what is true once it has run.

One `ModelOperations` serves one model's lane. A body in the journal is either the request as it
arrived (training data) or a small JSON object that already holds every decision made on arrival,
such as the seed of a new adapter, so that running it again after a crash does the same.
Order, retries and recovery are the lane's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tinkex.engine.jobs import (
    AdamParams,
    AdapterResult,
    CreateAdapterJob,
    CustomLoss,
    Job,
    LoadAdapterJob,
    LoraSpec,
    MuonParams,
    OptimJob,
    OptimResult,
    Result,
    SaveAdapterJob,
    TrainJob,
    TrainResult,
)
from tinkex.errors import InvalidInputError
from tinkex.server import decode, encode, validation
from tinkex.server.files.checkpoints import Shelf, TinkerPath, expiry_of, parse_path
from tinkex.server.files.encryption import encrypt_folder
from tinkex.server.work.futures import Outcome
from tinkex.server.work.lanes import Op
from tinkex.server.work.write_behind import WriteBehind
from tinkex.store import Checkpoint, CheckpointKind, Model, SamplingSession, Store, UsageCount
from tinkex.wire import proto_requests

logger = logging.getLogger(__name__)

MUTATES = frozenset({"create_model", "load_weights", "forward_backward", "optim_step"})
"""Kinds that change a model's state, and are therefore replayed after a crash."""
FORCES_SNAPSHOT = frozenset({"load_weights"})
_COMPUTE = frozenset({"forward", "forward_backward", "optim_step"})
SAVES: dict[str, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
REQUEST_TYPES = {
    "create_model": "CreateModel",
    "load_weights": "LoadWeights",
    "forward": "Forward",
    "forward_backward": "ForwardBackward",
    "optim_step": "OptimStep",
    "save_weights": "SaveWeights",
    "save_weights_for_sampler": "SaveWeightsForSampler",
    "save_weights_external": "SaveWeightsExternal",
}
PROTO_BODY, JSON_BODY = b"P", b"J"
LARGE_RESULT_BYTES = 65_536
"""Results beyond this leave the memory once they are in the journal."""


def decode_train(kind: str, body: bytes) -> decode.TrainRequest:
    """Read back the body of a forward or forward_backward op."""
    if body[:1] == PROTO_BODY:
        return decode.train_from_proto(proto_requests.parse(body[1:]))
    return decode.train_from_json(decode.load_json(body[1:]), forward_only=kind == "forward")


class ModelOperations:
    def __init__(
        self,
        model: Model,
        *,
        base_model: str,
        store: Store,
        shelf: Shelf,
        ends: WriteBehind,
        on_durable: Callable[[str], None],
        project_id: str | None,
    ) -> None:
        self.model = model
        self._on_durable = on_durable
        self._ends = ends
        self._base_model = base_model  # the engine's name; the model's own may be an alias
        self._store = store
        self._shelf = shelf
        self._project_id = project_id

    def is_barrier(self, op: Op) -> bool:
        return op.kind not in _COMPUTE

    def changes_state(self, op: Op) -> bool:
        return op.kind in MUTATES

    # ------------------------------------------------------------------------ jobs

    async def prepare(self, op: Op, job_id: str) -> Job | Outcome:
        if op.spilled:
            await self._read_back(op)
        if op.kind in ("forward", "forward_backward"):
            return await self._train_job(op, job_id)
        body = orjson.loads(op.body)
        if op.kind == "optim_step":
            return OptimJob(
                job_id=job_id,
                adapter_id=self.model.model_id,
                params=_optimizer_params(body, self.model),
            )
        if op.kind == "create_model":
            return self._create_job(job_id)
        if op.kind == "load_weights":
            return await self._load_job(op, body, job_id)
        return await self._save_job(op, body, job_id)

    async def _read_back(self, op: Op) -> None:
        row = await self._store.call(self._store.journal.get, op.request_id)
        if row is None or row.body is None:
            raise InvalidInputError(f"the body of {op.request_id} is gone from the journal")
        op.body, op.spilled = row.body, False

    def _create_job(self, job_id: str) -> CreateAdapterJob:
        return CreateAdapterJob(
            job_id=job_id,
            adapter_id=self.model.model_id,
            base_model=self._base_model,
            lora=LoraSpec(**self.model.lora),
            optimizer="muon" if self.model.optimizer_config.get("type") == "muon" else "adamw",
        )

    async def _load_job(self, op: Op, body: Mapping[str, Any], job_id: str) -> LoadAdapterJob:
        found = await self._store.call(self._store.checkpoints.get, body["path"])
        if found is None:
            raise InvalidInputError(f"{body['path']} was deleted before it was loaded", path="path")
        op.decoded = found
        return LoadAdapterJob(
            job_id=job_id,
            adapter_id=self.model.model_id,
            base_model=self._base_model,
            folder=str(self._shelf.folder_of(found)),
            with_optimizer=body["optimizer"],
        )

    async def _train_job(self, op: Op, job_id: str) -> TrainJob:
        request = op.decoded
        if request is None:
            request = await asyncio.to_thread(decode_train, op.kind, op.body)
        return TrainJob(
            job_id=job_id,
            adapter_id=self.model.model_id,
            data=request.data,
            loss_fn=request.loss_fn,
            loss_fn_config=request.loss_fn_config,
            backward=op.kind == "forward_backward",
            custom_loss=await self._custom_loss(request),
        )

    async def _custom_loss(self, request: decode.TrainRequest) -> CustomLoss | None:
        if request.loss_fn != "custom":
            return None
        loss_id = str(request.loss_fn_config.get("loss_id"))
        loss = await self._store.call(self._store.sampling.get_loss, loss_id)
        if loss is None:
            raise InvalidInputError(
                f"no custom loss {loss_id!r}; create it first", path="loss_fn_config.loss_id"
            )
        inputs = tuple((str(item["name"]), int(item["rank"])) for item in loss.inputs)
        return CustomLoss(inputs=inputs, graph=loss.graph)

    async def _save_job(self, op: Op, body: Mapping[str, Any], job_id: str) -> Job | Outcome:
        if body.get("path") is None:
            folder = self._shelf.new_ephemeral_folder(body["sampling_session_id"])
        else:
            path = parse_path(body["path"])
            done = await self._shelf.admit(
                path, overwrite=bool(body.get("overwrite")), request_id=op.request_id
            )
            if done is not None:
                return _saved(op.kind, str(path), done.size_bytes)
            folder = self._shelf.new_folder(path)
        op.decoded = folder
        return SaveAdapterJob(
            job_id=job_id,
            adapter_id=self.model.model_id,
            folder=str(folder),
            with_optimizer=op.kind == "save_weights",
            for_sampling=op.kind == "save_weights_for_sampler",
        )

    # ------------------------------------------------------------------------ ends

    async def conclude(self, op: Op, result: Result) -> Outcome:
        if isinstance(result, TrainResult):
            kind = "training" if op.kind == "forward_backward" else "sampling_prefill"
            op.usage = (self._usage(kind, result.num_tokens),)
            return Outcome(kind="train", payload=encode.train_payload(result))
        if isinstance(result, OptimResult):
            return Outcome(kind="json", payload=encode.metrics_json(result.metrics))
        assert isinstance(result, AdapterResult)
        body = orjson.loads(op.body)
        if op.kind == "create_model":
            return _json({"model_id": self.model.model_id, "type": "create_model"})
        if op.kind == "load_weights":
            return await self._loaded(body, op.decoded)
        if op.kind == "save_weights_for_sampler" and body.get("path") is None:
            return await self._sampling_session(body, op.decoded)
        return await self._register(op, body, result.size_bytes)

    async def _loaded(self, body: Mapping[str, Any], loaded: Checkpoint) -> Outcome:
        """The run now has the shape of the checkpoint, whatever it was created with."""
        config = dict(self.model.optimizer_config)
        await self._store.call(
            self._store.models.set_lora, self.model.model_id, loaded.lora, config
        )
        self.model = replace(self.model, lora=loaded.lora)
        answer = {"path": body["path"], "model_id": self.model.model_id, "type": "load_weights"}
        return _json(answer)

    async def _sampling_session(self, body: Mapping[str, Any], folder: Path) -> Outcome:
        made = await self._store.call(
            self._store.sampling.create,
            SamplingSession(
                sampling_session_id=body["sampling_session_id"],
                session_id=self.model.session_id,
                user_id=self.model.user_id,
                seq_id=body["sampling_session_seq_id"],
                base_model=self.model.base_model,
                model_path=None,
                folder=self._shelf.folders.name(folder),
                ephemeral=True,
                created_at=time.time(),
            ),
        )
        self._shelf.abandon(folder)
        session_id = made.sampling_session_id
        return _json({"sampling_session_id": session_id, "type": "save_weights_for_sampler"})

    async def _register(self, op: Op, body: Mapping[str, Any], size_bytes: int) -> Outcome:
        folder: Path = op.decoded
        recipients = body.get("age_encryption_recipients") or []
        if recipients:
            size_bytes = await asyncio.to_thread(encrypt_folder, folder, recipients)
        path = parse_path(body["path"])
        await self._shelf.register(self._checkpoint(op, body, path, size_bytes))
        return _saved(op.kind, str(path), size_bytes)

    def _checkpoint(
        self, op: Op, body: Mapping[str, Any], path: TinkerPath, size_bytes: int
    ) -> Checkpoint:
        return Checkpoint(
            path=str(path),
            model_id=self.model.model_id,
            user_id=self.model.user_id,
            kind=path.kind,
            name=path.name,
            folder=self._shelf.folders.name(op.decoded),
            size_bytes=size_bytes,
            base_model=self.model.base_model,
            lora=self.model.lora,
            optimizer_config=self.model.optimizer_config,
            has_optimizer=op.kind == "save_weights",
            project_id=self._project_id,
            expires_at=expiry_of(body.get("ttl_seconds")),
            user_metadata=body.get("user_metadata"),
            request_id=op.request_id,
        )

    def record(self, op: Op, outcome: Outcome, then: Callable[[], None] | None = None) -> None:
        if op.kind in SAVES and isinstance(op.decoded, Path):
            if outcome.ok:
                self._shelf.abandon(op.decoded)  # listed by now
            else:
                self._shelf.discard(op.decoded)
        journal, started_at = self._store.journal, op.started_at or None
        if not outcome.ok:
            error, category = outcome.error, outcome.category
            fail = partial(journal.fail, op.request_id, error, category, started_at=started_at)
            self._ends.put(fail, then)
            return

        def finish() -> Future[None]:
            written = journal.finish(
                op.request_id,
                outcome.payload,
                result_type=outcome.kind,
                started_at=started_at,
                usage=op.usage,
            )
            if len(outcome.payload) > LARGE_RESULT_BYTES:
                written.add_done_callback(self._leave_memory(op.request_id))
            return written

        self._ends.put(finish, then)

    def _leave_memory(self, request_id: str) -> Callable[[Future[None]], None]:
        """Once a result is in the journal; one that found no room there stays."""
        return lambda done: None if done.exception() else self._on_durable(request_id)

    def _usage(self, kind: Any, count: int) -> UsageCount:
        return UsageCount(
            kind=kind,
            count=count,
            user_id=self.model.user_id,
            session_id=self.model.session_id,
            model_id=self.model.model_id,
            base_model=self.model.base_model,
            project_id=self._project_id,
        )


def _optimizer_params(body: Mapping[str, Any], model: Model) -> AdamParams | MuonParams:
    kind = str(model.optimizer_config.get("type", "adamw"))
    params = validation.optimizer_params(body, kind)
    params.pop("type", None)
    return MuonParams(**params) if kind == "muon" else AdamParams(**params)


def _saved(kind: str, path: str, size_bytes: int) -> Outcome:
    body: dict[str, Any] = {"path": path, "type": kind}
    if kind == "save_weights_external":
        body["size_bytes"] = size_bytes
    return _json(body)


def _json(body: Mapping[str, Any]) -> Outcome:
    return Outcome(kind="json", payload=orjson.dumps(body))
