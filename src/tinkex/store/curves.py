"""The curves of training runs: each one row, its points packed by whoever draws them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, Engine, delete, select

from tinkex.store import schema
from tinkex.store.records import StoredCurve
from tinkex.store.upsert import insert_or_replace
from tinkex.store.writer import GroupWriter

_table = schema.curves


class Curves:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def save(self, curves: Iterable[StoredCurve]) -> None:
        """Write curves as they are now."""
        now = time.time()
        rows = [
            {
                "model_id": curve.model_id,
                "name": curve.name,
                "stride": curve.stride,
                "points": curve.points,
                "updated_at": now,
            }
            for curve in curves
        ]

        def write(connection: Connection) -> None:
            connection.execute(insert_or_replace(connection, _table), rows)

        if rows:
            self._writer.run(write)

    def of_run(self, model_id: str) -> list[StoredCurve]:
        return self._read(select(_table).where(_table.c.model_id == model_id))

    def of_runs(self, model_ids: Sequence[str], names: Sequence[str]) -> list[StoredCurve]:
        """Some curves of many runs, for a list of them."""
        query = select(_table).where(_table.c.model_id.in_(model_ids), _table.c.name.in_(names))
        return self._read(query)

    def drop(self, model_id: str) -> None:
        statement = delete(_table).where(_table.c.model_id == model_id)
        self._writer.run(lambda connection: connection.execute(statement))

    def drop_unloaded(self, before: float) -> None:
        """Remove the curves of runs that were unloaded and had no new point since."""
        gone = select(schema.models.c.model_id).where(schema.models.c.unloaded.is_(True))
        statement = delete(_table).where(_table.c.updated_at < before, _table.c.model_id.in_(gone))
        self._writer.run(lambda connection: connection.execute(statement))

    def _read(self, query: object) -> list[StoredCurve]:
        with self._reader.connect() as connection:
            rows = connection.execute(query).mappings()  # type: ignore[call-overload]
            return [
                StoredCurve(
                    model_id=row["model_id"],
                    name=row["name"],
                    stride=row["stride"],
                    points=row["points"],
                )
                for row in rows
            ]
