"""What lies in a data folder, run by run, and how what nobody needs is cleared away.

Sizes are those that the quota `disk_bytes` counts, from the same rows (`store.stored_bytes`).
`disk_usage` only reads and may run beside a server. `clear` needs the folder for itself: it drops
the recovery state of runs, unnamed sampling weights, what was deleted or set aside, and never a
checkpoint that has a name, unless a whole run is asked for. Needs SQLite, as every private server
has it.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.dialects import sqlite

from tinkex.server.files.backup import connect, database_of
from tinkex.server.files.folders import DataFolder, folder_size
from tinkex.server.process.disk import RESERVES
from tinkex.store import Store
from tinkex.store.stored_bytes import KINDS, StoredKind, StoredKindName
from tinkex.types.fields.bounds import INT64

_RUNS = """
SELECT m.model_id, m.base_model, m.last_request_time, m.unloaded, s.status_type,
  coalesce(m.name, s.display_name), coalesce(m.continued_by, m.model_id)
FROM models m LEFT JOIN sessions s ON s.session_id = m.session_id
"""
# As a server left it that was stopped before its database had names and segments.
_EARLIER = _RUNS.replace("coalesce(m.name, s.display_name)", "s.display_name").replace(
    "coalesce(m.continued_by, m.model_id)", "m.model_id"
)
# A database that no server of this release has opened yet: its rows do not say how large they are.
_OLD_FOLDERS = """
SELECT model_id, 'checkpoints', folder FROM checkpoints
UNION ALL SELECT model_id, 'state', folder FROM snapshots
UNION ALL SELECT session_id, 'samplers', folder FROM sampling_sessions
  WHERE ephemeral AND folder IS NOT NULL
"""
_OLD_BODIES = (
    "SELECT model_id, 'requests', SUM(LENGTH(body)) FROM journal WHERE body IS NOT NULL "
    "GROUP BY model_id"
)


@dataclass(slots=True)
class RunDiskUsage:
    """Bytes on disk of one run, by kind."""

    run_id: str
    base_model: str = ""
    name: str = ""
    used_at: float = 0.0
    is_open: bool = False
    """Its client has not closed it."""
    segment_ids: list[str] = field(default_factory=list)
    """Of a run that was resumed, all models that trained it; their sizes are in `sizes`."""
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """By the kinds that a user's quota counts, and with its numbers."""

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def spare(self) -> int:
        """Bytes that `clear` removes: what a run could be restored from, and unnamed weights."""
        return sum(self.sizes[kind] for kind in ("state", "requests", "samplers"))

    @property
    def folder_bytes(self) -> int:
        return sum(size for kind, size in self.sizes.items() if not _kind(kind).in_database)


@dataclass(slots=True)
class DiskUsage:
    runs: list[RunDiskUsage]
    """Largest first."""
    database: int
    """With the reserve that the server gives up on a full disk."""
    other: int
    """Set aside, deleted and not yet removed, half fetched."""

    @property
    def total(self) -> int:
        folders = sum(run.folder_bytes for run in self.runs)
        return folders + self.database + self.other


def disk_usage(data_dir: Path) -> DiskUsage:
    """Measure what lies in a data folder. Changes nothing."""
    database, folders = database_of(data_dir), DataFolder(data_dir)
    runs: dict[str, RunDiskUsage] = {}
    with connect(database) as connection:
        last_of: dict[str, str] = {}
        columns = {row[1] for row in connection.execute("PRAGMA table_info(models)")}
        query = _RUNS if "continued_by" in columns else _EARLIER
        for run_id, base, used_at, unloaded, status, name, last in connection.execute(query):
            is_open = not unloaded and status == "active"
            runs[run_id] = RunDiskUsage(run_id, base, name or "", used_at, is_open)
            last_of[run_id] = last
        for owner, kind, size in _sizes(connection, folders):
            _of(runs, owner).sizes[kind] += size
    for run_id, last in last_of.items():
        if last != run_id and last in runs:
            _join(runs[last], runs.pop(run_id))
    kept = sum(run.folder_bytes for run in runs.values())
    files = sum(file.stat().st_size for file in data_dir.glob("tinkex.db*"))
    found = sorted((run for run in runs.values() if run.total), key=lambda run: -run.total)
    reserves = [data_dir / name for name in RESERVES]
    files += sum(reserve.stat().st_size for reserve in reserves if reserve.exists())
    return DiskUsage(found, files, max(folder_size(data_dir) - kept - files, 0))


def _sizes(connection: sqlite3.Connection, folders: DataFolder) -> Iterator[tuple[str, str, int]]:
    """The owner (a run, a session), the kind and the bytes of everything that is stored."""
    if not any(
        row[1] == "size_bytes" for row in connection.execute("PRAGMA table_info(snapshots)")
    ):
        for owner, kind, folder in connection.execute(_OLD_FOLDERS):
            yield str(owner), kind, folder_size(folders.path(folder))
        yield from connection.execute(_OLD_BODIES)
        return
    for kind in KINDS.values():
        rows = kind.rows.subquery()
        sums = select(rows.c.run_id, func.sum(rows.c.num_bytes)).group_by(rows.c.run_id)
        for owner, size in connection.execute(str(sums.compile(dialect=sqlite.dialect()))):
            yield str(owner), kind.name, int(size or 0)


def _kind(name: str) -> StoredKind:
    return KINDS[cast(StoredKindName, name)]


def _join(last: RunDiskUsage, earlier: RunDiskUsage) -> None:
    """A run that was resumed is one: what its earlier segments hold is its own."""
    last.segment_ids.append(earlier.run_id)
    for kind, size in earlier.sizes.items():
        last.sizes[kind] += size


def checkpoint_paths(data_dir: Path, *, limit: int) -> list[tuple[str, str]]:
    """Path and kind of the newest checkpoints. Changes nothing."""
    order = "SELECT path, kind FROM checkpoints ORDER BY created_at DESC LIMIT ?"
    with connect(database_of(data_dir)) as connection:
        return [(str(path), str(kind)) for path, kind in connection.execute(order, (limit,))]


def _of(runs: dict[str, RunDiskUsage], owner: str) -> RunDiskUsage:
    """The run of a row. Of some only the session is known; its first run has them."""
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
            for segment_id in (run.run_id, *run.segment_ids):
                _drop(store, segment_id, is_whole=bool(run_id))
        store.flush()
        _remove(store, DataFolder(data_dir), with_quarantine=not run_id)
    finally:
        store.close()
    after = disk_usage(data_dir)
    return Cleared(len(chosen), max(before.total - after.total, 0))


def _chosen(found: DiskUsage, before: float, run_id: str) -> Iterator[RunDiskUsage]:
    for run in found.runs:
        if run_id:
            if run_id in (run.run_id, *run.segment_ids):
                yield run
        elif run.used_at < before and run.spare:
            yield run


def _drop(store: Store, run_id: str, *, is_whole: bool) -> None:
    store.models.mark(run_id, unloaded=True)
    store.models.drop_snapshot(run_id)
    store.journal.release_bodies(run_id, INT64)
    session_id = run_id.partition(":")[0]
    for sampler in store.sampling.ephemeral_of_ended(INT64, INT64):
        if run_id == sampler.model_id or (
            not sampler.model_id and session_id == sampler.session_id
        ):
            store.sampling.forget_folder(sampler.sampling_session_id)
    if is_whole:
        for checkpoint in store.checkpoints.of_run(run_id):
            store.checkpoints.delete(checkpoint.path)
        store.journal.drop_results(run_id)
        store.sampling.forget_losses(INT64, INT64, session_id=session_id)


def _remove(store: Store, folders: DataFolder, *, with_quarantine: bool) -> None:
    for name in store.folders.deleted():
        if folders.remove(name):
            store.folders.removed(name)
    if with_quarantine:
        shutil.rmtree(folders.quarantine_root, ignore_errors=True)
