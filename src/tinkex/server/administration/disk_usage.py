"""What lies in a data folder, run by run, and how what nobody needs is cleared away.

`disk_usage` only reads and may run beside a server. `clear` needs the folder for itself: it drops
the recovery state of runs, unnamed sampling weights, what was deleted or set aside, and never a
checkpoint that has a name, unless a whole run is asked for. Needs SQLite, as every private server
has it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.server.files.backup import connect, database_of
from tinkex.server.files.folders import DataFolder, folder_size
from tinkex.store import Store
from tinkex.types.fields.bounds import INT64

_RUNS = """
SELECT m.model_id, m.base_model, m.last_request_time, m.unloaded, s.status_type, s.display_name
FROM models m LEFT JOIN sessions s ON s.session_id = m.session_id
"""
_FOLDERS = """
SELECT model_id, 'checkpoints', folder FROM checkpoints
UNION ALL SELECT model_id, 'state', folder FROM snapshots
UNION ALL SELECT session_id, 'samplers', folder FROM sampling_sessions
  WHERE ephemeral AND folder IS NOT NULL
"""
_BODIES = "SELECT model_id, SUM(LENGTH(body)) FROM journal WHERE body IS NOT NULL GROUP BY model_id"
KINDS = ("checkpoints", "state", "samplers", "journal")
"""Named checkpoints; what a run would be restored from; unnamed sampling weights; requests."""


@dataclass(slots=True)
class RunDiskUsage:
    """Bytes on disk of one run, by kind."""

    run_id: str
    base_model: str = ""
    name: str = ""
    used_at: float = 0.0
    is_open: bool = False
    """Its client has not closed it."""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


@dataclass(slots=True)
class DiskUsage:
    runs: list[RunDiskUsage]
    """Largest first."""
    database: int
    other: int
    """Set aside, deleted and not yet removed, half fetched."""

    @property
    def total(self) -> int:
        # Requests are in the database.
        folders = sum(run.total - run.sizes["journal"] for run in self.runs)
        return folders + self.database + self.other


def disk_usage(data_dir: Path) -> DiskUsage:
    """Measure what lies in a data folder. Changes nothing."""
    database, folders = database_of(data_dir), DataFolder(data_dir)
    runs: dict[str, RunDiskUsage] = {}
    with connect(database) as connection:
        for run_id, base, used_at, unloaded, status, name in connection.execute(_RUNS):
            is_open = not unloaded and status == "active"
            runs[run_id] = RunDiskUsage(run_id, base, name or "", used_at, is_open)
        for owner, kind, folder in connection.execute(_FOLDERS):
            _of(runs, str(owner)).sizes[kind] += folder_size(folders.path(folder))
        for run_id, size in connection.execute(_BODIES):
            _of(runs, run_id).sizes["journal"] += size
    kept = sum(run.total - run.sizes["journal"] for run in runs.values())
    files = sum(file.stat().st_size for file in data_dir.glob("tinkex.db*"))
    found = sorted((run for run in runs.values() if run.total), key=lambda run: -run.total)
    return DiskUsage(found, files, max(folder_size(data_dir) - kept - files, 0))


def checkpoint_paths(data_dir: Path, *, limit: int) -> list[tuple[str, str]]:
    """Path and kind of the newest checkpoints. Changes nothing."""
    order = "SELECT path, kind FROM checkpoints ORDER BY created_at DESC LIMIT ?"
    with connect(database_of(data_dir)) as connection:
        return [(str(path), str(kind)) for path, kind in connection.execute(order, (limit,))]


def _of(runs: dict[str, RunDiskUsage], owner: str) -> RunDiskUsage:
    """The run of a row. Of unnamed weights only the session is known; its first run has them."""
    if owner in runs:
        return runs[owner]
    first = next((run for run in runs.values() if run.run_id.startswith(f"{owner}:")), None)
    return first or runs.setdefault(owner, RunDiskUsage(owner))


@dataclass(frozen=True, slots=True)
class Cleared:
    num_runs: int
    num_bytes: int


def clear(data_dir: Path, *, older_than_s: float, run_id: str = "", wait_s: float = 1.0) -> Cleared:
    """Remove what nobody needs of runs unused for `older_than_s`; of `run_id` all, checkpoints too.

    A server that uses the folder is waited for, `wait_s` at most.

    Raises:
        InUseError: A server uses the folder.
    """
    before = disk_usage(data_dir)
    store = Store.in_folder(data_dir)
    try:
        store.claim(wait_s, data_dir=data_dir)
        chosen = list(_chosen(before, time.time() - older_than_s, run_id))
        for run in chosen:
            _drop(store, run.run_id, with_checkpoints=bool(run_id))
        store.flush()
        _remove(store, DataFolder(data_dir), with_quarantine=not run_id)
    finally:
        store.close()
    after = disk_usage(data_dir)
    return Cleared(len(chosen), max(before.total - after.total, 0))


def _chosen(found: DiskUsage, before: float, run_id: str) -> Iterator[RunDiskUsage]:
    for run in found.runs:
        if run_id:
            if run.run_id == run_id:
                yield run
        elif run.used_at < before and run.total > run.sizes["checkpoints"]:
            yield run


def _drop(store: Store, run_id: str, *, with_checkpoints: bool) -> None:
    store.models.mark(run_id, unloaded=True)
    store.models.drop_snapshot(run_id)
    store.journal.release_bodies(run_id, INT64)
    session_id = run_id.partition(":")[0]
    for sampler in store.sampling.ephemeral_of_ended(INT64, INT64):
        if sampler.session_id == session_id:
            store.sampling.forget_folder(sampler.sampling_session_id)
    for checkpoint in store.checkpoints.of_run(run_id) if with_checkpoints else ():
        store.checkpoints.delete(checkpoint.path)


def _remove(store: Store, folders: DataFolder, *, with_quarantine: bool) -> None:
    for name in store.folders.deleted():
        if folders.remove(name):
            store.folders.removed(name)
    if with_quarantine:
        shutil.rmtree(folders.quarantine_root, ignore_errors=True)
