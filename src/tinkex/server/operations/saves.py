"""save_weights, save_weights_for_sampler and save_weights_external: a model's state on disk."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import orjson

from tinkex.engine.jobs import AdapterResult, Job, Result, SaveAdapterJob
from tinkex.errors import InvalidInputError
from tinkex.server.files.checkpoints import expiry_of, parse_path
from tinkex.server.files.encryption import check_recipients, encrypt_folder
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import (
    Conclusion,
    Operation,
    OperationRun,
    canonical,
    json_outcome,
)
from tinkex.store import Checkpoint, CheckpointKind, Model, SamplingSession, User
from tinkex.types import (
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkex.types.account.checkpoints import check_name
from tinkex.wire.requests import Opened

AnySave = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    path: str | None
    """Where it will be listed; None: in a sampling session of its own."""
    sampling_session_seq_id: int = 0
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class SaveWeights(Operation[Save]):
    """Weights and optimizer state under a name, for training to resume from."""

    name = "save_weights"
    kind: ClassVar[CheckpointKind] = "weights"
    with_optimizer: ClassVar[bool] = True
    for_sampling: ClassVar[bool] = False

    def identity(self, opened: Opened) -> bytes:
        names = ("path", "overwrite", "ttl_seconds", "user_metadata", "age_encryption_recipients")
        return canonical({name: opened.fields.get(name) for name in names})

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Save:
        request: AnySave = opened.read()
        if opened.fields.get("age_encryption_recipients") is not None:
            self._check_recipients(request)
        return Save(
            path=self._path(model, check_name(request.path or f"{seq_id:06d}")),
            overwrite=getattr(request, "overwrite", False),
            ttl_seconds=request.ttl_seconds,
            user_metadata=getattr(request, "user_metadata", None),
            age_encryption_recipients=getattr(request, "age_encryption_recipients", None),
        )

    def _path(self, model: Model, name: str) -> str:
        return f"tinker://{model.model_id}/{self.kind}/{name}"

    def _check_recipients(self, request: AnySave) -> None:
        raise InvalidInputError(
            "only exports are encrypted; use save_weights_external",
            path="age_encryption_recipients",
        )

    def pack(self, opened: Opened, asked: Save) -> bytes:
        return canonical(asdict(asked))

    def unpack(self, body: bytes, model: Model) -> Save:
        return Save(**orjson.loads(body))

    async def job(self, asked: Save, turn: OperationRun) -> SaveAdapterJob | Outcome:
        assert asked.path is not None
        path, shelf = parse_path(asked.path), self.deps.shelf
        done = await shelf.admit(path, overwrite=asked.overwrite, request_id=turn.request_id)
        if done is not None:  # before a crash
            return self._saved(asked.path, done.size_bytes)
        return self._job(shelf.new_folder(path), turn)

    def _job(self, folder: Path, turn: OperationRun, *, ephemeral: bool = False) -> SaveAdapterJob:
        return SaveAdapterJob(
            job_id=turn.job_id,
            adapter_id=turn.model.model_id,
            folder=str(folder),
            with_optimizer=self.with_optimizer,
            for_sampling=self.for_sampling,
            ephemeral=ephemeral,
        )

    async def conclude(
        self, asked: Save, turn: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        assert isinstance(job, SaveAdapterJob)
        assert isinstance(result, AdapterResult)
        assert asked.path is not None
        size_bytes = await self._finish(asked, Path(job.folder), result.size_bytes)
        await self.deps.shelf.register(self._checkpoint(asked, turn, job, size_bytes))
        return Conclusion(outcome=self._saved(asked.path, size_bytes))

    async def _finish(self, asked: Save, folder: Path, size_bytes: int) -> int:
        """What is left to do with a folder before it is listed; gives its size."""
        return size_bytes

    def _checkpoint(
        self, asked: Save, turn: OperationRun, job: SaveAdapterJob, size_bytes: int
    ) -> Checkpoint:
        assert asked.path is not None
        path, model = parse_path(asked.path), turn.model
        return Checkpoint(
            path=asked.path,
            model_id=model.model_id,
            user_id=model.user_id,
            kind=path.kind,
            name=path.name,
            folder=self.deps.shelf.folders.name(Path(job.folder)),
            size_bytes=size_bytes,
            base_model=model.base_model,
            lora=model.lora,
            optimizer_config=model.optimizer_config,
            has_optimizer=self.with_optimizer,
            project_id=turn.project_id,
            expires_at=expiry_of(asked.ttl_seconds),
            user_metadata=asked.user_metadata,
            request_id=turn.request_id,
        )

    def _saved(self, path: str, size_bytes: int) -> Outcome:
        return json_outcome({"path": path, "type": self.name})

    def cleanup(self, job: Job, *, ok: bool) -> None:
        assert isinstance(job, SaveAdapterJob)
        if ok:
            self.deps.shelf.abandon(Path(job.folder))  # listed by now
        else:
            self.deps.shelf.discard(Path(job.folder))


class SaveWeightsForSampler(SaveWeights):
    """Weights to sample from: under a name, or unnamed in a sampling session of their own.

    A retried unnamed save carries a new `sampling_session_seq_id` (contract 3.5); the number is no
    part of its identity, and the first one counts.
    """

    name = "save_weights_for_sampler"
    kind = "sampler_weights"
    with_optimizer = False
    for_sampling = True

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Save:
        asked = await super().check(opened, model, user, seq_id)
        request: SaveWeightsForSamplerRequest = opened.read()
        if request.path is not None or request.sampling_session_seq_id is None:
            return asked
        return Save(
            path=None,
            sampling_session_seq_id=request.sampling_session_seq_id,
            user_metadata=asked.user_metadata,
        )

    async def job(self, asked: Save, turn: OperationRun) -> SaveAdapterJob | Outcome:
        if asked.path is not None:
            return await super().job(asked, turn)
        folder = self.deps.shelf.new_ephemeral_folder(_session_id(asked, turn))
        return self._job(folder, turn, ephemeral=True)

    async def conclude(
        self, asked: Save, turn: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        if asked.path is not None:
            return await super().conclude(asked, turn, job, result)
        assert isinstance(job, SaveAdapterJob)
        model, store, folder = turn.model, self.deps.store, Path(job.folder)
        session = SamplingSession(
            sampling_session_id=_session_id(asked, turn),
            session_id=model.session_id,
            user_id=model.user_id,
            seq_id=asked.sampling_session_seq_id,
            base_model=model.base_model,
            model_path=None,
            folder=self.deps.shelf.folders.name(folder),
            ephemeral=True,
            created_at=time.time(),
            model_id=model.model_id,
        )
        made = await store.call(store.sampling.create, session)
        await self.deps.sampling_sessions.drop_superseded(model.model_id)
        step = self.deps.curves.num_steps(model.model_id)
        self.deps.rollouts.saved(made.sampling_session_id, model.model_id, step)
        answer = {"sampling_session_id": made.sampling_session_id, "type": self.name}
        return Conclusion(outcome=json_outcome(answer))


class SaveWeightsExternal(SaveWeights):
    """Weights to download, encrypted when recipients are given."""

    name = "save_weights_external"
    kind = "external_weights"
    with_optimizer = False

    def _check_recipients(self, request: AnySave) -> None:
        assert isinstance(request, SaveWeightsExternalRequest)
        check_recipients(request.age_encryption_recipients or [])

    async def _finish(self, asked: Save, folder: Path, size_bytes: int) -> int:
        if not asked.age_encryption_recipients:
            return size_bytes
        return await asyncio.to_thread(encrypt_folder, folder, asked.age_encryption_recipients)

    def _saved(self, path: str, size_bytes: int) -> Outcome:
        return json_outcome({"path": path, "type": self.name, "size_bytes": size_bytes})


def _session_id(asked: Save, turn: OperationRun) -> str:
    return f"{turn.model.session_id}:sample:{asked.sampling_session_seq_id}"
