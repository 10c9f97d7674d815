"""Measured rates of base models, as one small text that the server reads at its start."""

from __future__ import annotations

from sqlalchemy import Connection, select

from tinkex.store import schema
from tinkex.store.noun import StoredNoun
from tinkex.store.upsert import insert_or_replace

_table, _NAME = schema.meta, "rates"


class StoredRates(StoredNoun):
    def read(self) -> str | None:
        texts = self._scalars(select(_table.c.value).where(_table.c.name == _NAME))
        return texts[0] if texts else None

    def write(self, text: str) -> None:
        def write(connection: Connection) -> None:
            row = {"name": _NAME, "value": text}
            connection.execute(insert_or_replace(connection, _table), row)

        self._writer.run(write)
