"""Which folders the database speaks of: those that rows point at, and those it says are deleted.

A folder's name is its path relative to the data folder, so that the data folder can be moved or
spelled otherwise. Deleting or replacing a row notes its folder in the same transaction; only what
is noted here is ever removed from disk.
"""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, Table, and_, select, union, update

from tinkex.store import schema
from tinkex.store.noun import StoredNoun
from tinkex.store.upsert import insert_or_ignore

_deleted = schema.deleted_folders
_MEASURED = (schema.snapshots, schema.sampling_sessions)


def note_deleted(connection: Connection, folder: str) -> None:
    """To be called in the transaction that takes the folder's row away."""
    row = {"folder": folder, "deleted_at": time.time()}
    connection.execute(insert_or_ignore(connection, _deleted), row)


def _is_unmeasured(table: Table) -> ColumnElement[bool]:
    is_empty = and_(table.c.folder.is_not(None), table.c.size_bytes == 0)
    # Sampling sessions of checkpoints name folders that are not theirs.
    return and_(is_empty, table.c.ephemeral.is_(True)) if "ephemeral" in table.c else is_empty


class Folders(StoredNoun):
    def known(self) -> set[str]:
        """Every folder that a row points at."""
        samplers = schema.sampling_sessions
        own = select(samplers.c.folder).where(
            samplers.c.ephemeral.is_(True), samplers.c.folder.is_not(None)
        )
        listed = (select(table.c.folder) for table in (schema.checkpoints, schema.snapshots))
        return set(self._scalars(union(own, *listed)))

    def deleted(self) -> list[str]:
        """Folders to remove from disk: noted as deleted, and no row points at them."""
        noted = self._scalars(select(_deleted.c.folder))
        known = self.known() if noted else set()
        return [folder for folder in noted if folder not in known]

    def unmeasured(self) -> list[str]:
        """Folders of snapshots and unnamed weights whose size no row says."""
        rows = (select(t.c.folder).where(_is_unmeasured(t)) for t in _MEASURED)
        return self._scalars(union(*rows))

    def set_size(self, folder: str, size_bytes: int) -> None:
        """Note the size of a folder, before the bytes of users are counted."""
        for table in _MEASURED:
            same = (table.c.folder == folder, _is_unmeasured(table))
            self._write(update(table).where(*same).values(size_bytes=size_bytes))

    def removed(self, folder: str) -> None:
        """Forget a folder that is gone from disk."""
        self._write(_deleted.delete().where(_deleted.c.folder == folder))
