"""Short names that users give to their checkpoints."""

from __future__ import annotations

import time

from sqlalchemy import Connection, Engine, delete, func, select

from tinkex.errors import InvalidInputError
from tinkex.store import schema
from tinkex.store.records import CheckpointName
from tinkex.store.upsert import insert_or_replace
from tinkex.store.writer import GroupWriter

_table = schema.checkpoint_names
MAX_PER_USER = 10_000


class CheckpointNames:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def put(self, user_id: str, name: str, path: str) -> CheckpointName:
        """Give a name, or move it to another checkpoint."""
        record = CheckpointName(user_id=user_id, name=name, path=path, created_at=time.time())
        row = {field: getattr(record, field) for field in CheckpointName.__slots__}
        mine = select(func.count()).select_from(_table).where(_table.c.user_id == user_id)

        def write(connection: Connection) -> None:
            if connection.execute(mine).scalar_one() >= MAX_PER_USER:
                raise InvalidInputError(f"you have {MAX_PER_USER} names already; remove some.")
            connection.execute(insert_or_replace(connection, _table), row)

        self._writer.run(write)
        return record

    def get(self, user_id: str, name: str) -> CheckpointName | None:
        query = select(_table).where(_table.c.user_id == user_id, _table.c.name == name)
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return CheckpointName(**row) if row else None

    def of_user(self, user_id: str) -> list[CheckpointName]:
        query = select(_table).where(_table.c.user_id == user_id).order_by(_table.c.name)
        with self._reader.connect() as connection:
            return [CheckpointName(**row) for row in connection.execute(query).mappings()]

    def remove(self, user_id: str, name: str) -> bool:
        """Take a name back; the checkpoint stays. False when there was none."""
        statement = delete(_table).where(_table.c.user_id == user_id, _table.c.name == name)
        return self._writer.run(lambda connection: connection.execute(statement).rowcount > 0)
