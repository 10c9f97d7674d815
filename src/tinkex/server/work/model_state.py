"""One model's state: in the worker's memory, and on disk where it can be rebuilt from.

State is a snapshot plus the journal since: `restore` loads the one into the worker and gives the
other to the lane, where it runs again in order, for its effect only. A snapshot bounds how much
there is to replay: it is made every so many state-changing requests or seconds of compute, and
always after a checkpoint was loaded, because that checkpoint may be deleted later. Parking is a
snapshot followed by letting go of the memory; coming back is the same restore.

Nobody waits for an ordinary snapshot: the lane posts the job and goes on, because the worker runs
the jobs of a model in the order they are posted. A task waits until the folder is on disk, makes it
the snapshot to start from and only then drops the bodies it replaces; dying before that costs a
longer replay. A model has one snapshot under way at a time, and whatever reads or removes snapshots
waits for it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.jobs import (
    AdapterResult,
    DropAdapterJob,
    LoadAdapterJob,
    Result,
    SaveAdapterJob,
)
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError, WrongBaseError
from tinkex.server.files.disk_quota import DiskQuota, OverQuotaError
from tinkex.server.files.folders import DataFolder
from tinkex.server.process import disk
from tinkex.server.work.operation import Operation
from tinkex.server.work.write_behind import RETRY_S, WriteBehind
from tinkex.server.workers.placement import Placement
from tinkex.server.workers.pool import Pool
from tinkex.store import JournalRow, Model, Snapshot, Store
from tinkex.types.fields.bounds import INT64

logger = logging.getLogger(__name__)
MAX_REPLAY_BYTES = 128_000_000
"""Bodies between two snapshots; a replay holds them all in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles:
    """Where the snapshots of all models are, and how often they are made."""

    store: Store
    ends: WriteBehind
    folders: DataFolder
    disk_quota: DiskQuota
    every_requests: int
    every_s: float

    def folder_of(self, model_id: str) -> Path:
        return self.folders.root / "state" / model_id.replace(":", "-")

    async def forget(self, model_id: str) -> None:
        """Remove what a model could be restored from: its snapshot and the bodies since."""
        models = self.store.models
        snapshot = await self.store.call(models.get_snapshot, model_id)
        await self.store.call(models.drop_snapshot, model_id)
        self.store.journal.release_bodies(model_id, INT64)
        ended = snapshot.folder if snapshot else ""
        await asyncio.to_thread(self.clear, self.folder_of(model_id), ended)

    def clear(self, folder: Path, ended: str, kept: Path | None = None) -> None:
        """Remove the snapshot that the database let go of; set aside what it does not know.

        The note of `ended` stays until the sweeper finds it gone. A crash leaves snapshots half
        adopted; an older database does not know those that were made after it.
        """
        if ended:
            self.folders.remove(ended)
        for other in folder.iterdir() if folder.is_dir() else ():
            if other != kept:
                self.folders.quarantine(other)
        with contextlib.suppress(OSError):
            folder.rmdir()  # it was the last


@dataclass(slots=True)
class _SinceSnapshot:
    """The length of a replay: the requests since the last snapshot."""

    num_requests: int = 0
    compute_s: float = 0.0
    size_bytes: int = 0


class ModelState:
    def __init__(self, model: Model, base_model: str, worker: Pool, files: SnapshotFiles) -> None:
        self.placement: Placement | None = None
        """Where the state is in memory; None: nowhere, or it is not trusted."""
        self.is_restoring = False
        self.obstacle = ""
        """What keeps the state from being restored, for a person."""
        self.loss = ""
        """Why it cannot be restored at all."""
        self._model_id = model.model_id
        self._user_id = model.user_id
        self._base_model = base_model
        self._worker = worker
        self._files = files
        self._store = files.store
        self._since = _SinceSnapshot()
        self._under_way: asyncio.Task[str] | None = None

    @property
    def is_here(self) -> bool:
        return self.placement is not None and not self.placement.is_lost

    def distrust(self) -> None:
        """Something failed in the middle: what the worker holds must not be used again."""
        self.placement = None

    # ------------------------------------------------------------------------ restoring

    async def journaled(self) -> tuple[int, list[JournalRow]]:
        """The number of the snapshot to start from (-1: none), and the requests after it."""
        snapshot = await self._store.call(self._store.models.get_snapshot, self._model_id)
        start = snapshot.seq_id if snapshot else -1
        return start, await self._store.call(self._store.journal.since, self._model_id, start)

    async def restore(self) -> tuple[int, list[JournalRow]]:
        """Bring the worker's memory to the last snapshot; gives `journaled`.

        Raises:
            WorkerLostError: The worker died meanwhile.
        """
        await self._worker.wait_ready()
        self.is_restoring = True
        try:
            # A snapshot under way may still become the one to start from, and what the journal does
            # not know as ended would be left out of the replay: both first, then the rows.
            await self.snapshot_ended()
            await self._ends_written()
            start, rows = await self.journaled()
            # Read before the load: a worker that dies under it has another one afterwards.
            placement = self._worker.place(self._model_id)
            await self._load(placement)
            self.placement = placement
            self._since = _SinceSnapshot()
            return start, rows
        finally:
            self.is_restoring, self.obstacle = False, ""

    async def _load(self, placement: Placement) -> None:
        snapshot = await self._store.call(self._store.models.get_snapshot, self._model_id)
        try:
            # A half changed adapter may be left in the memory; what is loaded or replayed now must
            # not meet it.
            await placement.post(self._drop_job())
            if snapshot is not None:
                await placement.post(self._load_job(snapshot))
        except WorkerLostError:
            raise
        except (InvalidInputError, EngineError) as exc:
            logger.exception("cannot restore %s", self._model_id)
            self.loss = str(exc)
            if isinstance(exc, WrongBaseError):
                return  # nothing is lost: with its own base served again, the run goes on
            await self._store.call(self._store.models.mark, self._model_id, corrupted=True)

    async def _ends_written(self) -> None:
        """Wait until the journal knows how every request ended, because a replay goes by that."""
        while True:
            self._files.ends.flush()
            try:
                await self._store.call(self._store.flush)
            except Exception as exc:
                if not disk.may_pass(exc):
                    raise
                self.obstacle = disk.describe(exc)
            else:
                if not self._files.ends.is_behind:
                    return
                self.obstacle = "the end of earlier requests cannot be written to the journal"
            logger.warning("%s waits to be restored: %s", self._model_id, self.obstacle)
            await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------------------ snapshots

    def note(self, operation: Operation[Any], compute_s: float, size_bytes: int) -> bool:
        """Count a request that ended well; True when a snapshot is due."""
        if not operation.changes_state:
            return False
        since = self._since
        since.num_requests += 1
        since.compute_s += compute_s
        since.size_bytes += size_bytes
        share = max(
            since.num_requests / self._files.every_requests,
            since.compute_s / self._files.every_s,
            since.size_bytes / self._files.disk_quota.replay_bytes(self._user_id, MAX_REPLAY_BYTES),
        )
        # After a step there are no gradients to save; wait for one, but not for ever.
        return share >= 2 or (share >= 1 and operation.clears_gradients)

    async def snapshot(self, seq_id: int) -> str:
        """Save the state, which is the one after `seq_id`, and wait until that is durable.

        Gives why its user has no room for it; empty when they have.
        """
        await self.begin_snapshot(seq_id)
        return await self._under_way if self._under_way is not None else ""

    async def begin_snapshot(self, seq_id: int) -> None:
        """Have it saved while the lane goes on. Called with no request under way."""
        await self.snapshot_ended()
        folder = self._files.folder_of(self._model_id) / f"{seq_id}-{secrets.token_hex(4)}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        job = SaveAdapterJob(
            job_id=f"snapshot-{secrets.token_hex(8)}",
            adapter_id=self._model_id,
            folder=str(folder),
            with_optimizer=True,
            with_gradients=True,
        )
        # Counted from here on, whether it succeeds or not: on a full disk the next try comes after
        # as many requests again, not with each one.
        self._since = _SinceSnapshot()
        assert self.placement is not None, "only what is in memory can be saved"
        saved = self.placement.post(job)
        self._under_way = asyncio.create_task(self._finish(seq_id, folder, saved))
        self._under_way.add_done_callback(self._note_end)

    async def snapshot_ended(self) -> None:
        """Wait for the snapshot under way, however it ends."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way})

    async def give_up_snapshot(self) -> None:
        """End the one under way; the journal holds what it would have saved."""
        if self._under_way is not None:
            self._under_way.cancel()
            await self.snapshot_ended()

    async def _finish(self, seq_id: int, folder: Path, saved: asyncio.Future[Result]) -> str:
        """Adopt a snapshot once it is written; gives why its user has no room for it."""
        try:
            result = await saved
            assert isinstance(result, AdapterResult)
            await self._admit(seq_id, folder, result.size_bytes)
            await self._adopt(seq_id, folder, result.size_bytes)
        except WorkerLostError:
            raise
        except OverQuotaError as exc:
            logger.warning("%s: no snapshot; the journal is kept instead: %s", self._model_id, exc)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return str(exc)
        except Exception:  # no room on the disk, or in the database
            logger.exception("%s: no snapshot; the journal is kept instead", self._model_id)
        finally:
            self._files.disk_quota.release(self._files.folders.name(folder))
        return ""

    async def _admit(self, seq_id: int, folder: Path, size_bytes: int) -> None:
        store, name = self._store, self._files.folders.name(folder)
        before = await store.call(store.models.get_snapshot, self._model_id)
        # The requests that it covers go with the snapshot before.
        freed = await store.call(store.journal.body_bytes, self._model_id, seq_id)
        freed += before.size_bytes if before else 0
        self._files.disk_quota.admit(name, self._user_id, size_bytes, freed=freed)

    async def _adopt(self, seq_id: int, folder: Path, size_bytes: int) -> None:
        # Without its body a request cannot run again, so its end must be known to the journal.
        if self._files.ends.is_behind:
            raise OSError("the journal does not know yet how earlier requests ended")
        self._files.ends.flush()  # a request before the snapshot must have its end in the journal
        snapshot = Snapshot(
            model_id=self._model_id,
            seq_id=seq_id,
            folder=self._files.folders.name(folder),
            created_at=time.time(),
            size_bytes=size_bytes,
        )
        before = await self._store.call(self._store.models.save_snapshot, snapshot)
        # Only now: until this row is durable a restart replays from the snapshot before.
        self._store.journal.release_bodies(self._model_id, seq_id, before.seq_id if before else -1)
        # Last: until now a crash would have started from the older one.
        ended = before.folder if before else ""
        await asyncio.to_thread(self._files.clear, folder.parent, ended, folder)

    def _note_end(self, task: asyncio.Task[str]) -> None:
        if self._under_way is task:
            self._under_way = None
        if not task.cancelled():
            task.exception()  # only a loss gets here, and the lane sees that by itself

    # ------------------------------------------------------------------------ letting go

    async def park(self, seq_id: int, *, keep: bool) -> None:
        """Free the memory, the state saved first when there is something new to `keep`."""
        await self.snapshot_ended()
        if self.placement is not None and self.is_here:
            with contextlib.suppress(WorkerLostError):  # the memory is free then; a replay pays
                if self._since.num_requests and keep:
                    await self.snapshot(seq_id)
                await self.placement.post(self._drop_job())
            logger.info("%s is parked", self._model_id)
        self.placement = None
        self._worker.let_go(self._model_id)

    async def discard(self) -> None:
        """Forget the state for good, snapshot included."""
        await self.snapshot_ended()
        if self.placement is not None and self.is_here:
            await self.placement.post(self._drop_job())
        self.placement = None
        self._worker.let_go(self._model_id)
        await self._files.forget(self._model_id)

    def _drop_job(self) -> DropAdapterJob:
        return DropAdapterJob(job_id=f"drop-{secrets.token_hex(8)}", adapter_id=self._model_id)

    def _load_job(self, snapshot: Snapshot) -> LoadAdapterJob:
        return LoadAdapterJob(
            job_id=f"restore-{secrets.token_hex(8)}",
            adapter_id=self._model_id,
            base_model=self._base_model,
            folder=str(self._files.folders.path(snapshot.folder)),
            with_optimizer=True,
        )
