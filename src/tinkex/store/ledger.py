"""Who used how much: token counts, saved checkpoints and stored bytes, one row per hour and run.

Training counts are written with the result they belong to; sampling counts are gathered in memory
and written about once a second, so that a sample costs no commit of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, func, select

from tinkex.store import schema
from tinkex.store.records import UsageCount, UsageRow
from tinkex.store.upsert import insert_or_add
from tinkex.store.writer import GroupWriter

_table = schema.usage
BUCKET_S = 3600
OPERATORS_KIND = "device_seconds"
"""Counted for who runs the server; users' bills know tokens."""
_KEYS = ("bucket_start", "user_id", "session_id", "model_id", "kind", "base_model", "project_id")
_Key = tuple[int, str, str, str, str, str, str]


class Ledger:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._gathered: dict[_Key, float] = {}
        self._lock = threading.Lock()
        writer.defer(self._gathered_write)

    def add(self, counts: Iterable[UsageCount]) -> None:
        """Count. Returns at once; the rows follow within about a second."""
        with self._lock:
            _sum_up(self._gathered, counts)

    @staticmethod
    def write(connection: Connection, counts: Iterable[UsageCount]) -> None:
        """Count inside a transaction that is under way."""
        sums: dict[_Key, float] = {}
        _sum_up(sums, counts)
        _add_rows(connection, sums)

    def events(self, user_id: str, start: float, end: float) -> list[UsageRow]:
        """Rows of the buckets that start in [start, end), everything counted so far included."""
        self._writer.flush()
        query = (
            select(_table)
            .where(_table.c.user_id == user_id, _table.c.kind != OPERATORS_KIND)
            .where(_table.c.bucket_start >= int(start), _table.c.bucket_start < int(end))
            .order_by(*(_table.c[name] for name in _KEYS))
        )
        with self._reader.connect() as connection:
            return [_usage_row(row) for row in connection.execute(query).mappings()]

    def totals(self, start: float, limit: int = 5000) -> list[UsageRow]:
        """Sums over the buckets that end after `start`, of every user, run and kind."""
        keys = [_table.c[name] for name in ("user_id", "model_id", "kind")]
        amount = func.sum(_table.c.count)
        query = (
            select(*keys, amount.label("count"))
            .where(_table.c.bucket_start > int(start) - BUCKET_S)
            .group_by(*keys)
            .order_by(amount.desc())
            .limit(limit)
        )
        rest = {"bucket_start": 0, "session_id": "", "base_model": "", "project_id": ""}
        with self._reader.connect() as connection:
            return [_usage_row({**rest, **row}) for row in connection.execute(query).mappings()]

    def _gathered_write(self) -> Callable[[Connection], None] | None:
        with self._lock:
            sums, self._gathered = self._gathered, {}
        return (lambda connection: _add_rows(connection, sums)) if sums else None


def _sum_up(sums: dict[_Key, float], counts: Iterable[UsageCount]) -> None:
    for c in counts:
        bucket = int((c.at or time.time()) // BUCKET_S) * BUCKET_S
        texts = (c.session_id, c.model_id, c.kind, c.base_model, c.project_id)
        key: Any = (bucket, c.user_id, *(text or "" for text in texts))
        sums[key] = sums.get(key, 0.0) + c.count


def _add_rows(connection: Connection, sums: dict[_Key, float]) -> None:
    rows: Sequence[dict[str, Any]] = [
        dict(zip(_KEYS, key, strict=True)) | {"count": count} for key, count in sums.items()
    ]
    connection.execute(insert_or_add(connection, _table, "count"), rows)


def _usage_row(row: Any) -> UsageRow:
    optional = {
        name: row[name] or None for name in ("session_id", "model_id", "base_model", "project_id")
    }
    return UsageRow(
        bucket_start=row["bucket_start"],
        kind=row["kind"],
        count=row["count"],
        user_id=row["user_id"],
        **optional,
    )
