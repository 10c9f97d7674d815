"""Which folders the database speaks of: those that rows point at, and those it says are deleted.

A folder's name is its path relative to the data folder, so that the data folder can be moved or
spelled otherwise. Deleting or replacing a row notes its folder in the same transaction; only what
is noted here is ever removed from disk.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, Engine, select

from tinkex.store import schema
from tinkex.store.upsert import insert_or_ignore
from tinkex.store.writer import GroupWriter

_deleted = schema.deleted_folders
_POINTING = (schema.checkpoints, schema.snapshots)


def note_deleted(connection: Connection, folder: str) -> None:
    """To be called in the transaction that takes the folder's row away."""
    row = {"folder": folder, "deleted_at": time.time()}
    connection.execute(insert_or_ignore(connection, _deleted), row)


class Folders:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def known(self) -> set[str]:
        """Every folder that a row points at."""
        samplers = schema.sampling_sessions
        own = select(samplers.c.folder).where(
            samplers.c.ephemeral.is_(True), samplers.c.folder.is_not(None)
        )
        with self._reader.connect() as connection:
            found = set(connection.execute(own).scalars())
            for table in _POINTING:
                found.update(connection.execute(select(table.c.folder)).scalars())
        return found

    def deleted(self) -> list[str]:
        """What may be removed from disk: noted as deleted, and no row points at it."""
        with self._reader.connect() as connection:
            noted = connection.execute(select(_deleted.c.folder)).scalars().all()
        if not noted:
            return []
        known = self.known()
        return [folder for folder in noted if folder not in known]

    def removed(self, folder: str) -> None:
        """It is gone from disk; the note may go too."""
        statement = _deleted.delete().where(_deleted.c.folder == folder)
        self._writer.run(lambda connection: connection.execute(statement))
