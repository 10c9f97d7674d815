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
from tinkex.server.files.disk_quota import OverQuotaError
from tinkex.server.files.encryption import check_recipients, encrypt_folder
from tinkex.server.runs.rates import SAMPLER_BYTES, STATE_BYTES
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
    inflight: bool = False
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
        names = ["path", "overwrite", "ttl_seconds", "user_metadata", "age_encryption_recipients"]
        names += ["kind"] if opened.fields.get("kind") == "inflight" else []
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

    def pack(self, opened: Opened, checked: Save) -> bytes:
        return canonical(asdict(checked))

    def unpack(self, body: bytes, model: Model) -> Save:
        return Save(**orjson.loads(body))

    async def job(self, checked: Save, run: OperationRun) -> SaveAdapterJob | Outcome:
        assert checked.path is not None
        path, shelf = parse_path(checked.path), self.deps.shelf
        done = await shelf.admit(path, overwrite=checked.overwrite, request_id=run.request_id)
        if done is not None:  # before a crash, which lost the end of the request
            return self._saved(checked.path, done.size_bytes)
        user_id, store = run.model.user_id, self.deps.store
        # Judged again now: those before it in the queue may have filled the quota.
        same = await store.call(store.checkpoints.last_of_runs, [run.model.model_id], self.kind)
        size = max((checkpoint.size_bytes for checkpoint in same.values()), default=0)
        replaced = await store.call(store.checkpoints.get, checked.path)
        freed = replaced.size_bytes if replaced else 0
        return self._job(shelf.reserve(shelf.new_folder(path), user_id, size, freed=freed), run)

    def _job(self, folder: Path, run: OperationRun, *, ephemeral: bool = False) -> SaveAdapterJob:
        return SaveAdapterJob(
            job_id=run.job_id,
            adapter_id=run.model.model_id,
            folder=str(folder),
            with_optimizer=self.with_optimizer,
            for_sampling=self.for_sampling,
            ephemeral=ephemeral,
        )

    async def conclude(
        self, checked: Save, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        assert isinstance(job, SaveAdapterJob)
        assert isinstance(result, AdapterResult)
        assert checked.path is not None
        size_bytes = await self._finish(checked, Path(job.folder), result.size_bytes)
        num_steps = await self.deps.curves.count_steps(run.model.model_id)
        checkpoint = self._checkpoint(checked, run, job, size_bytes, num_steps)
        await self.deps.shelf.register(checkpoint)
        base_model = self.deps.catalog.engine_name(run.model.base_model)
        work = STATE_BYTES if self.with_optimizer else SAMPLER_BYTES
        self.deps.rates.note(base_model, work, float(run.model.lora["rank"]), size_bytes)
        return Conclusion(outcome=self._saved(checked.path, size_bytes))

    async def _finish(self, checked: Save, folder: Path, size_bytes: int) -> int:
        """Finish a folder before it is listed; gives its size."""
        return size_bytes

    def _checkpoint(
        self,
        checked: Save,
        run: OperationRun,
        job: SaveAdapterJob,
        size_bytes: int,
        num_steps: int,
    ) -> Checkpoint:
        assert checked.path is not None
        path, model = parse_path(checked.path), run.model
        return Checkpoint(
            path=checked.path,
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
            project_id=run.project_id,
            expires_at=expiry_of(checked.ttl_seconds),
            user_metadata=checked.user_metadata,
            request_id=run.request_id,
            num_steps=num_steps,
        )

    def _saved(self, path: str, size_bytes: int) -> Outcome:
        return json_outcome({"path": path, "type": self.name})

    def cleanup(self, job: Job, *, ok: bool) -> None:
        assert isinstance(job, SaveAdapterJob)
        if ok:
            self.deps.shelf.end_writing(Path(job.folder))
        else:
            self.deps.shelf.remove_failed(Path(job.folder))


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
        checked = await super().check(opened, model, user, seq_id)
        request: SaveWeightsForSamplerRequest = opened.read()
        inflight = request.kind == "inflight"
        if request.path is not None or request.sampling_session_seq_id is None:
            if inflight:
                raise InvalidInputError(
                    "only an unnamed save can be 'inflight': leave `path` out and give a "
                    "sampling_session_seq_id (save_weights_and_get_sampling_client does)",
                    path="kind",
                )
            return checked
        return Save(
            path=None,
            sampling_session_seq_id=request.sampling_session_seq_id,
            inflight=inflight,
            user_metadata=checked.user_metadata,
        )

    async def job(self, checked: Save, run: OperationRun) -> SaveAdapterJob | Outcome:
        if checked.path is not None:
            return await super().job(checked, run)
        return self._job(await self._unnamed_folder(checked, run), run, ephemeral=True)

    async def _unnamed_folder(self, checked: Save, run: OperationRun) -> Path:
        """A folder for weights as large as the last; older ones go where there is no room."""
        shelf, sessions, model = self.deps.shelf, self.deps.sampling_sessions, run.model
        size = await sessions.last_unnamed_bytes(model.model_id)
        try:
            self.deps.disk_quota.require(model.user_id, max(size, 1))
        except OverQuotaError:
            await sessions.drop_superseded(model.model_id, keep=1)
            await shelf.remove_deleted()
        folder = shelf.new_ephemeral_folder(_session_id(checked, run))
        return shelf.reserve(folder, model.user_id, size)

    async def conclude(
        self, checked: Save, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        if checked.path is not None:
            return await super().conclude(checked, run, job, result)
        assert isinstance(job, SaveAdapterJob)
        assert isinstance(result, AdapterResult)
        model, store, folder = run.model, self.deps.store, Path(job.folder)
        session = SamplingSession(
            sampling_session_id=_session_id(checked, run),
            session_id=model.session_id,
            user_id=model.user_id,
            seq_id=checked.sampling_session_seq_id,
            base_model=model.base_model,
            model_path=None,
            folder=self.deps.shelf.folders.name(folder),
            ephemeral=True,
            created_at=time.time(),
            model_id=model.model_id,
            size_bytes=result.size_bytes,
            inflight=checked.inflight,
        )
        name, size = self.deps.shelf.folders.name(folder), result.size_bytes
        with self.deps.disk_quota.admitted(name, model.user_id, size):
            stored = await store.call(store.sampling.create, session)  # a repeat gives the first
        self.deps.sampling_sessions.follow(stored)
        # After the new row, which is among those that stay.
        await self.deps.sampling_sessions.drop_superseded(model.model_id)
        step = self.deps.curves.num_steps(model.model_id)
        self.deps.rollouts.saved(stored.sampling_session_id, model.model_id, step)
        answer = {"sampling_session_id": stored.sampling_session_id, "type": self.name}
        return Conclusion(outcome=json_outcome(answer))


class SaveWeightsExternal(SaveWeights):
    """Weights to download, encrypted when recipients are given."""

    name = "save_weights_external"
    kind = "external_weights"
    with_optimizer = False

    def _check_recipients(self, request: AnySave) -> None:
        assert isinstance(request, SaveWeightsExternalRequest)
        check_recipients(request.age_encryption_recipients or [])

    async def _finish(self, checked: Save, folder: Path, size_bytes: int) -> int:
        if not checked.age_encryption_recipients:
            return size_bytes
        return await asyncio.to_thread(encrypt_folder, folder, checked.age_encryption_recipients)

    def _saved(self, path: str, size_bytes: int) -> Outcome:
        return json_outcome({"path": path, "type": self.name, "size_bytes": size_bytes})


def _session_id(checked: Save, run: OperationRun) -> str:
    return f"{run.model.session_id}:sample:{checked.sampling_session_seq_id}"
