"""What the nouns of the store have in common: how records are read, written and gathered.

A record is a row and nothing else, so its fields name the columns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine, Table, bindparam, func, select, update

from tinkex.store.writer import GroupWriter

R = TypeVar("R")


def record(kind: type[R], row: Any) -> R:
    """A record of a row, which may have more columns; what is no column keeps its default."""
    names: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    return kind(**{name: row[name] for name in names if name in row})


def row_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


class StoredNoun:
    """Reads and writes block, a write until it is committed."""

    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stored = writer.stored

    def _all(self, kind: type[R], query: Any) -> list[R]:
        with self._reader.connect() as connection:
            return [record(kind, row) for row in connection.execute(query).mappings()]

    def _first(self, kind: type[R], query: Any) -> R | None:
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return record(kind, row) if row else None

    def _page(
        self, kind: type[R], table: Table, where: Any, order: Any, limit: int, offset: int = 0
    ) -> tuple[list[R], int]:
        """Some of the rows that fit, in their order, and how many fit in all."""
        query = select(table).where(*where).order_by(*order).limit(limit).offset(offset)
        [total] = self._scalars(select(func.count()).select_from(table).where(*where))
        return self._all(kind, query), int(total)

    def _rows(self, query: Any) -> list[Any]:
        """The rows of a query as tuples, for queries whose rows are no record."""
        with self._reader.connect() as connection:
            return list(connection.execute(query))

    def _scalars(self, query: Any) -> list[Any]:
        with self._reader.connect() as connection:
            return list(connection.execute(query).scalars())

    def _write(self, statement: Any) -> int:
        """Run one statement; gives how many rows it changed."""
        return self._writer.run(lambda connection: connection.execute(statement).rowcount)


class LatestMoments:
    """When rows were last used: gathered in memory, and written about once a second."""

    def __init__(self, writer: GroupWriter, key: Column[str], column: Column[float]) -> None:
        self._at: dict[str, float] = {}
        self._lock = threading.Lock()
        same = key == bindparam("id")
        self._statement = update(key.table).where(same).values({column.name: bindparam("at")})
        writer.defer(self._gathered)

    def note(self, key: str, at: float | None) -> None:
        """Returns at once. None: now."""
        with self._lock:
            self._at[key] = time.time() if at is None else at

    def _gathered(self) -> Callable[[Connection], None] | None:
        with self._lock:
            taken, self._at = self._at, {}
        if not taken:
            return None
        rows = [{"id": key, "at": at} for key, at in taken.items()]
        return lambda connection: (connection.execute(self._statement, rows), None)[1]
