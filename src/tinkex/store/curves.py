"""The curves of training runs: each one row, its points packed by whoever draws them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, select

from tinkex.store import schema
from tinkex.store.noun import StoredNoun, row_of
from tinkex.store.records import StoredCurve
from tinkex.store.upsert import insert_or_replace

_table = schema.curves


class Curves(StoredNoun):
    def save(self, curves: Iterable[StoredCurve]) -> None:
        """Write curves as they are now."""
        now = time.time()
        rows = [row_of(curve) | {"updated_at": now} for curve in curves]

        def write(connection: Connection) -> None:
            connection.execute(insert_or_replace(connection, _table), rows)

        if rows:
            self._writer.run(write)

    def of_run(self, model_id: str) -> list[StoredCurve]:
        return self._all(StoredCurve, select(_table).where(_table.c.model_id == model_id))

    def of_runs(self, model_ids: Sequence[str], names: Sequence[str]) -> list[StoredCurve]:
        """Some curves of many runs, for a list of them."""
        query = select(_table).where(_table.c.model_id.in_(model_ids), _table.c.name.in_(names))
        return self._all(StoredCurve, query)

    def drop(self, model_id: str) -> None:
        self._write(delete(_table).where(_table.c.model_id == model_id))

    def drop_unloaded(self, before: float) -> None:
        """Remove the curves of runs that were unloaded and had no new point since."""
        gone = select(schema.models.c.model_id).where(schema.models.c.unloaded.is_(True))
        self._write(delete(_table).where(_table.c.updated_at < before, _table.c.model_id.in_(gone)))
