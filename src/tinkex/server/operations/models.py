"""create_model and load_weights: where a model's state comes from."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tinkex.engine.jobs import (
    AdapterResult,
    CreateAdapterJob,
    Job,
    LoadAdapterJob,
    LoraSpec,
    Result,
)
from tinkex.errors import InvalidInputError
from tinkex.server.jobs import validation
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.descriptions import given_name
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.operation import (
    Conclusion,
    Operation,
    OperationAddress,
    OperationRun,
    canonical,
    json_outcome,
)
from tinkex.store import Checkpoint, Model, User
from tinkex.types import CreateModelRequest, LoadWeightsRequest
from tinkex.wire.requests import Opened

CREATION = 0
"""The number of the request that makes a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The adapter and optimizer of a new model, its seed drawn: a replay gives the same adapter."""

    lora: dict[str, Any]
    optimizer_config: dict[str, Any]


class CreateModel(Operation[Shape]):
    """Start a training run with a fresh adapter."""

    name = "create_model"

    def peek(self, opened: Opened) -> OperationAddress:
        # First in the new model's own order, whatever its client has sent before.
        return OperationAddress(None, CREATION)

    def identity(self, opened: Opened) -> bytes:
        return canonical(opened.fields)

    async def new_model(self, request: CreateModelRequest, user: User) -> Model:
        shape = _shape(request, secrets.randbelow(2**31))
        self.deps.catalog.resolve(request.base_model)
        await self.deps.catalog.check_context(request.base_model)
        return _new_model(request, user, request.base_model, shape.lora, shape.optimizer_config)

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Shape:
        # The seed drawn for the row of the model: a repeat would draw another one.
        return _shape(opened.read(), int(model.lora["seed"]))

    def pack(self, opened: Opened, checked: Shape) -> bytes:
        return canonical({"lora": checked.lora, "optimizer_config": checked.optimizer_config})

    def unpack(self, body: bytes, model: Model) -> Shape:
        return Shape(**orjson.loads(body))

    async def job(self, checked: Shape, run: OperationRun) -> CreateAdapterJob:
        return CreateAdapterJob(
            job_id=run.job_id,
            adapter_id=run.model.model_id,
            base_model=self.deps.catalog.resolve(run.model.base_model),
            lora=LoraSpec(**checked.lora),
            optimizer=str(checked.optimizer_config.get("type", "adamw")),
            base_fingerprint=run.model.base_fingerprint or "",
        )

    async def conclude(
        self, checked: Shape, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        model = replace(run.model, lora=checked.lora, optimizer_config=checked.optimizer_config)
        if model != run.model:  # a crash came between the rows of an earlier request like this
            await _set_shape(self.deps, model)
        assert isinstance(result, AdapterResult)
        if result.base_fingerprint:
            store = self.deps.store
            await store.call(store.models.set_base, model.model_id, result.base_fingerprint)
            model = replace(model, base_fingerprint=result.base_fingerprint)
        answer = {"model_id": model.model_id, "type": self.name}
        return Conclusion(outcome=json_outcome(answer), model=model)


@dataclass(slots=True)
class Loading:
    path: str
    optimizer: bool
    version: str = ""
    """The folder that the path meant when the request was accepted."""
    reader: str = ""
    """The owner of an access token that came with it; empty without one."""
    checkpoint: Checkpoint | None = None
    """As it is listed when the turn of the request has come; not in the journal."""


class LoadWeights(Operation[Loading]):
    """Load a checkpoint into a model, or into one made for it (0.24 and later)."""

    name = "load_weights"
    is_snapshot_forced = True  # its owner may delete the checkpoint as soon as the result is out

    def peek(self, opened: Opened) -> OperationAddress:
        if opened.fields.get("model_id") is None:
            return OperationAddress(None, CREATION)
        return super().peek(opened)

    def identity(self, opened: Opened) -> bytes:
        optimizer = opened.fields.get("optimizer") is True
        return canonical({"path": opened.fields.get("path"), "optimizer": optimizer})

    async def new_model(self, request: LoadWeightsRequest, user: User) -> Model:
        checkpoint = await self._readable(request, user)
        base_model = request.base_model or checkpoint.base_model
        await self.deps.catalog.check_context(base_model)
        config = checkpoint.optimizer_config
        if request.optimizer_config is not None:
            config = validation.optimizer_config(request.optimizer_config)
        model = _new_model(request, user, base_model, checkpoint.lora, dict(config))
        return replace(model, made_from=checkpoint.path)

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Loading:
        request: LoadWeightsRequest = opened.read()
        checkpoint = await self._readable(request, user)
        self._check_fit(checkpoint, model.base_model, request.optimizer)
        store = self.deps.store
        before = await store.call(store.models.get_snapshot, model.model_id)
        # Its state is saved right after; how large it is then, the checkpoint says roughly.
        freed = before.size_bytes if before else 0
        self.deps.disk_quota.require(model.user_id, checkpoint.size_bytes, freed=freed)
        token = request.weights_access_token
        reader = (await self.deps.auth.user_of(token)).user_id if token else ""
        return Loading(request.path, request.optimizer, checkpoint.folder, reader)

    async def _readable(self, request: LoadWeightsRequest, user: User) -> Checkpoint:
        token = request.weights_access_token
        deps = self.deps
        try:
            owner = await deps.auth.reader_of(token, deps.failed_logins, user) if token else None
            checkpoint = await deps.shelf.readable(request.path, user, token_user=owner)
        except ApiError as exc:
            if exc.status == 429:
                raise
            raise InvalidInputError(str(exc), path="path") from exc
        await self.deps.shelf.check_plain(checkpoint, path="path")
        return checkpoint

    def _check_fit(self, checkpoint: Checkpoint, base_model: str, optimizer: bool) -> None:
        resolve = self.deps.catalog.resolve
        if resolve(checkpoint.base_model) != resolve(base_model):
            raise InvalidInputError(
                f"{checkpoint.path} was trained on {checkpoint.base_model!r}, "
                f"the model is {base_model!r}",
                path="path",
            )
        if optimizer and not checkpoint.has_optimizer:
            raise InvalidInputError(
                f"{checkpoint.path} holds no optimizer state; load it without, "
                "or save with save_state.",
                path="optimizer",
            )

    def pack(self, opened: Opened, checked: Loading) -> bytes:
        names = ("path", "optimizer", "version", "reader")
        return canonical({name: getattr(checked, name) for name in names})

    def unpack(self, body: bytes, model: Model) -> Loading:
        return Loading(**orjson.loads(body))

    async def job(self, checked: Loading, run: OperationRun) -> LoadAdapterJob:
        store, shelf = self.deps.store, self.deps.shelf
        checkpoint = await store.call(store.checkpoints.get, checked.path)
        if checkpoint is None:
            raise InvalidInputError(f"{checked.path} was deleted before it was loaded", path="path")
        self._check_access(checked, checkpoint, run.model.user_id)
        checked.checkpoint = checkpoint
        return LoadAdapterJob(
            job_id=run.job_id,
            adapter_id=run.model.model_id,
            base_model=self.deps.catalog.resolve(run.model.base_model),
            folder=str(await shelf.at_hand(checkpoint.folder)),
            with_optimizer=checked.optimizer,
        )

    def _check_access(self, checked: Loading, checkpoint: Checkpoint, user_id: str) -> None:
        """Refuse a checkpoint that may no longer be read when the turn of its request comes.

        One's own path means what it holds now: the save before may have replaced it.
        """
        if checkpoint.user_id == user_id:
            return
        if not (checkpoint.public or checkpoint.user_id == checked.reader):
            raise InvalidInputError(f"{checked.path} is no longer shared with you", path="path")
        if checked.version and checkpoint.folder != checked.version:
            raise InvalidInputError(
                f"{checked.path} was replaced before it was loaded; load it again", path="path"
            )

    async def conclude(
        self, checked: Loading, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        """The run now has the shape of the checkpoint, whatever it was created with."""
        assert checked.checkpoint is not None
        model = replace(run.model, lora=checked.checkpoint.lora)
        await _set_shape(self.deps, model)
        answer = {"path": checked.path, "model_id": model.model_id, "type": self.name}
        return Conclusion(outcome=json_outcome(answer), model=model)


async def _set_shape(deps: Dependencies, model: Model) -> None:
    models = deps.store.models
    config = dict(model.optimizer_config)
    await deps.store.call(models.set_lora, model.model_id, model.lora, config)


def _shape(request: CreateModelRequest, seed: int) -> Shape:
    """As asked for, with `seed` for an adapter whose creator gave none."""
    return Shape(
        lora=validation.lora_spec(request.lora_config, seed),
        optimizer_config=validation.optimizer_config(request.optimizer_config),
    )


def _new_model(
    request: CreateModelRequest | LoadWeightsRequest,
    user: User,
    base_model: str,
    lora: dict[str, Any],
    optimizer_config: dict[str, Any],
) -> Model:
    now = time.time()
    session_id, number = str(request.session_id), request.model_seq_id or 0
    return Model(
        model_id=f"{session_id}:train:{number}",
        session_id=session_id,
        user_id=user.user_id,
        model_seq_id=number,
        base_model=base_model,
        lora=lora,
        optimizer_config=optimizer_config,
        user_metadata=request.user_metadata,
        created_at=now,
        last_request_time=now,
        corrupted=False,
        unloaded=False,
        name=given_name(request.user_metadata),
    )
