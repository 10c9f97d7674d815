"""Bring a model's state back after its worker or the whole server died.

State is a snapshot plus the journal since: `restore` loads the one into the worker and queues the
other in the lane, where it runs again in order, for its effect only. `snapshot` bounds how much
there is to replay: it is made every so many state-changing requests or seconds of compute, and
always after a checkpoint was loaded, because that checkpoint may be deleted later. Parking is a
snapshot followed by letting go of the memory; coming back is the same restore.

Nobody waits for an ordinary snapshot: the lane posts the job and goes on, because the worker runs
the jobs of a model in the order they are posted. A task per model waits until the folder is on
disk, makes it the snapshot to start from and only then drops the bodies it replaces; dying before
that costs a longer replay. A model has one snapshot under way at a time, and whatever reads or
removes snapshots waits for it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tinkex.engine.jobs import (
    AdapterResult,
    DropAdapterJob,
    Job,
    LoadAdapterJob,
    Result,
    SaveAdapterJob,
)
from tinkex.errors import EngineError, InvalidInputError, WorkerLostError
from tinkex.server.decode import MAX_SEQ_ID
from tinkex.server.files import disk
from tinkex.server.files.folders import DataFolder
from tinkex.server.work.futures import Outcome
from tinkex.server.work.lanes import Lane, Op, never_created
from tinkex.server.work.operations import FORCES_SNAPSHOT, MUTATES
from tinkex.server.work.write_behind import RETRY_S, WriteBehind
from tinkex.store import Op as Row
from tinkex.store import Snapshot, Store

logger = logging.getLogger(__name__)
MAX_REPLAY_BYTES = 128_000_000
"""Bodies between two snapshots; a replay holds them all in memory."""


class StateKeeper:
    def __init__(
        self,
        store: Store,
        ends: WriteBehind,
        data_dir: Path,
        *,
        every_ops: int,
        every_s: float,
        revive: Callable[[Lane, Row], Op],
    ) -> None:
        self._store = store
        self._ends = ends
        self._folders = DataFolder(data_dir)
        self._root = self._folders.root / "state"
        self._every_ops = every_ops
        self._every_s = every_s
        self._revive = revive  # makes an accepted row that has no promise yet runnable again
        self._since: dict[str, tuple[int, float, int]] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    # ------------------------------------------------------------------------ restoring

    async def restore(self, lane: Lane) -> None:
        await self.snapshot_ended(lane)
        await self._ends_written(lane)
        snapshot = await self._store.call(self._store.models.get_snapshot, lane.model_id)
        start = snapshot.seq_id if snapshot else -1
        rows = await self._store.call(self._store.journal.since, lane.model_id, start)
        generation = lane.place.worker.generation
        try:
            await self._run(lane, self._drop_job(lane), generation)
            if snapshot is not None:
                await self._run(lane, self._load_job(lane, snapshot), generation)
        except WorkerLostError:
            raise
        except (InvalidInputError, EngineError) as exc:
            logger.exception("cannot restore %s", lane.model_id)
            error = f"The state of {lane.model_id} could not be restored: {exc}"
            lane.broken = Outcome(error=error, category="server")
            await self._store.call(self._store.models.mark, lane.model_id, corrupted=True)
        self._queue(lane, rows, start)
        lane.generation = generation
        self._since.pop(lane.model_id, None)
        replays = sum(1 for op in lane.ops.values() if op.mode == "replay")
        if replays:
            logger.info("%s: replaying %d requests after %d", lane.model_id, replays, start)

    async def _ends_written(self, lane: Lane) -> None:
        """Wait until the journal knows how every request ended, because a replay goes by that."""
        while True:
            self._ends.flush()
            try:
                await self._store.call(self._store.flush)
            except Exception as exc:
                if not disk.may_pass(exc):
                    raise
                lane.obstacle = disk.describe(exc)
            else:
                if not self._ends.is_behind:
                    return
                lane.obstacle = "the end of earlier requests cannot be written to the journal"
            logger.warning("%s waits to be restored: %s", lane.model_id, lane.obstacle)
            await asyncio.sleep(RETRY_S)

    async def open(self, lane: Lane) -> None:
        """Queue what the journal holds for a lane that was just made; runs nothing by itself.

        A lane whose requests all ended needs no worker yet: it restores when the next one comes.
        """
        snapshot = await self._store.call(self._store.models.get_snapshot, lane.model_id)
        start = snapshot.seq_id if snapshot else -1
        rows = await self._store.call(self._store.journal.since, lane.model_id, start)
        ended = [row.seq_id for row in rows if row.state in ("done", "failed")]
        lane.applied_seq = max([start, *ended])
        for row in rows:
            if row.seq_id == 0 and row.state == "failed":
                lane.broken = never_created(lane.model_id, row.error or "")
            if row.state == "accepted":
                lane.ops[row.seq_id] = self._revive(lane, row)
            elif row.state == "refused" and row.seq_id > lane.applied_seq:
                lane.ops[row.seq_id] = _skip(row.seq_id)
        lane.next_seq = min([lane.applied_seq + 1, *lane.ops])
        lane.last_seq = max([lane.applied_seq, *lane.ops])

    def _queue(self, lane: Lane, rows: Iterable[Row], start: int) -> None:
        """Put what followed the snapshot back into the lane, up to what was published."""
        waiting = {seq: op for seq, op in lane.ops.items() if op.mode == "run"}
        again = {row.seq_id: _replay(row) for row in rows if _is_replayed(row, lane.applied_seq)}
        lane.ops = {seq: op for seq, op in lane.ops.items() if seq > lane.applied_seq}
        lane.ops |= again | waiting
        # What lies between was refused, failed or never came: one op for each stretch of it, so
        # that a hole costs memory by what stands around it, not by how many numbers it has.
        at = start + 1
        for seq_id in sorted(seq for seq in lane.ops if seq <= lane.applied_seq):
            if at < seq_id:
                lane.ops[at] = _skip(at, seq_id - 1)
            at = seq_id + 1
        if at <= lane.applied_seq:
            lane.ops[at] = _skip(at, lane.applied_seq)
        lane.next_seq = start + 1

    # ------------------------------------------------------------------------ snapshots

    def note(self, lane: Lane, op: Op, compute_s: float) -> bool:
        if op.kind not in MUTATES:
            return False
        ops, seconds, size = self._since.get(lane.model_id, (0, 0.0, 0))
        ops, seconds, size = ops + 1, seconds + compute_s, size + len(op.body)
        self._since[lane.model_id] = (ops, seconds, size)
        if op.kind in FORCES_SNAPSHOT and op.mode == "run":
            return True
        share = max(ops / self._every_ops, seconds / self._every_s, size / MAX_REPLAY_BYTES)
        # After a step there are no gradients to save; wait for one, but not for ever.
        return share >= 2 or (share >= 1 and op.kind == "optim_step")

    async def snapshot(self, lane: Lane, seq_id: int) -> None:
        await self.begin_snapshot(lane, seq_id)
        if (task := self._under_way.get(lane.model_id)) is not None:
            await task

    async def begin_snapshot(self, lane: Lane, seq_id: int) -> None:
        await self.snapshot_ended(lane)
        name = f"{seq_id}-{secrets.token_hex(4)}"
        folder = self._root / lane.model_id.replace(":", "-") / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        job = SaveAdapterJob(
            job_id=f"snapshot-{secrets.token_hex(8)}",
            adapter_id=lane.model_id,
            folder=str(folder),
            with_optimizer=True,
            with_gradients=True,
        )
        self._since.pop(lane.model_id, None)
        saved = lane.place.worker.post(job, generation=lane.generation)
        task = asyncio.create_task(self._finish(lane.model_id, seq_id, folder, saved))
        task.add_done_callback(lambda done: self._note_end(lane.model_id, done))
        self._under_way[lane.model_id] = task

    async def snapshot_ended(self, lane: Lane) -> None:
        """Wait for the snapshot under way, however it ends."""
        if (task := self._under_way.get(lane.model_id)) is not None:
            await asyncio.wait({task})

    async def give_up_snapshot(self, lane: Lane) -> None:
        """End the one under way; the journal holds what it would have saved."""
        if (task := self._under_way.get(lane.model_id)) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _finish(
        self, model_id: str, seq_id: int, folder: Path, saved: asyncio.Future[Result]
    ) -> None:
        try:
            await saved
            await self._adopt(model_id, seq_id, folder)
        except WorkerLostError:
            raise
        except Exception:  # no room on the disk, or in the database
            logger.exception("%s: no snapshot; the journal is kept instead", model_id)

    async def _adopt(self, model_id: str, seq_id: int, folder: Path) -> None:
        snapshot = Snapshot(
            model_id=model_id,
            seq_id=seq_id,
            folder=self._folders.name(folder),
            created_at=time.time(),
        )
        if self._ends.is_behind:
            raise OSError("the journal does not know yet how earlier requests ended")
        self._ends.flush()  # a request before the snapshot must have its end in the journal
        before = await self._store.call(self._store.models.save_snapshot, snapshot)
        after = before.seq_id if before else -1
        self._store.journal.release_bodies(model_id, seq_id, after)
        await asyncio.to_thread(self._clear, folder.parent, before.folder if before else "", folder)

    def _note_end(self, model_id: str, task: asyncio.Task[None]) -> None:
        if self._under_way.get(model_id) is task:
            del self._under_way[model_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, WorkerLostError):
            logger.error("%s: no snapshot; the journal is kept instead", model_id, exc_info=error)

    async def park(self, lane: Lane) -> bool:
        """Save the state and free its memory. False when the lane is busy."""
        if lane.generation < 0:
            return True
        return await lane.run_alone(lambda: self._park(lane))

    async def _park(self, lane: Lane) -> None:
        await self.snapshot_ended(lane)
        generation = lane.generation
        if generation != lane.place.worker.generation or not lane.place.worker.is_ready:
            lane.generation = -1
            return
        try:
            if self._since.get(lane.model_id) and not lane.broken:
                await self.snapshot(lane, lane.next_seq - 1)
            await self._run(lane, self._drop_job(lane), generation)
        except WorkerLostError:
            pass
        lane.generation = -1
        logger.info("%s is parked", lane.model_id)

    async def discard(self, lane: Lane) -> None:
        """Forget a model's state for good, snapshot included."""
        await self.snapshot_ended(lane)
        if lane.generation == lane.place.worker.generation and lane.place.worker.is_ready:
            await self._run(lane, self._drop_job(lane), lane.generation)
        lane.generation = -1
        await self.forget(lane.model_id)

    async def forget(self, model_id: str) -> None:
        """Remove what a model without a lane could be restored from: its snapshot and bodies."""
        snapshot = await self._store.call(self._store.models.get_snapshot, model_id)
        await self._store.call(self._store.models.drop_snapshot, model_id)
        self._store.journal.release_bodies(model_id, MAX_SEQ_ID)
        folder = self._root / model_id.replace(":", "-")
        await asyncio.to_thread(self._clear, folder, snapshot.folder if snapshot else "")

    def _clear(self, folder: Path, ended: str, kept: Path | None = None) -> None:
        """Remove the snapshot that the database let go of; set aside what it does not know.

        The note of `ended` stays until the sweeper finds it gone. A crash leaves snapshots half
        adopted; an older database does not know those that were made after it.
        """
        if ended:
            self._folders.remove(ended)
        for other in folder.iterdir() if folder.is_dir() else ():
            if other != kept:
                self._folders.quarantine(other)
        with contextlib.suppress(OSError):
            folder.rmdir()  # it was the last

    def _drop_job(self, lane: Lane) -> DropAdapterJob:
        return DropAdapterJob(job_id=f"drop-{secrets.token_hex(8)}", adapter_id=lane.model_id)

    def _load_job(self, lane: Lane, snapshot: Snapshot) -> LoadAdapterJob:
        return LoadAdapterJob(
            job_id=f"restore-{secrets.token_hex(8)}",
            adapter_id=lane.model_id,
            base_model=lane.base_model,
            folder=str(self._folders.path(snapshot.folder)),
            with_optimizer=True,
        )

    async def _run(self, lane: Lane, job: Job, generation: int) -> None:
        result = await lane.place.worker.post(job, generation=generation)
        assert isinstance(result, AdapterResult)


def _replay(row: Row) -> Op:
    assert row.body is not None, f"{row.request_id} has no body and no snapshot covers it"
    return Op(
        seq_id=row.seq_id,
        kind=row.kind,
        request_id=row.request_id,
        body=row.body,
        mode="replay",
    )


def _is_replayed(row: Row, applied_seq: int) -> bool:
    return row.seq_id <= applied_seq and row.state == "done" and row.kind in MUTATES


def _skip(seq_id: int, through_seq: int = -1) -> Op:
    return Op(seq_id, "skip", "", b"", mode="skip", through_seq=through_seq)
