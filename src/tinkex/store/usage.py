"""Who used how much: tokens, checkpoints, stored bytes; a row for each hour, run and key.

Training counts are written with the result they belong to; sampling counts are gathered in memory
and written about once a second, so that a sample costs no commit of its own, unless a budget
depends on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Engine, case, func, select
from sqlalchemy.exc import OperationalError

from tinkex.store import schema
from tinkex.store.noun import StoredNoun
from tinkex.store.records import UsageCount, UsageKind, UsageRow
from tinkex.store.upsert import insert_or_add
from tinkex.store.writer import GroupWriter

_table = schema.usage
BUCKET_S = 3600
OPERATORS_KIND = "device_seconds"
"""Counted for who runs the server; users' bills know tokens."""
TOKEN_KINDS = ("training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample")
_BILLED = ("bucket_start", "user_id", "session_id", "model_id", "kind", "base_model", "project_id")
_KEYS = (*_BILLED, "key_id")
_Key = tuple[int, str, str, str, str, str, str, int]
UsedBy = Literal["user", "key", "run"]
_USERS: dict[UsedBy, tuple[str, ...]] = {
    "user": ("user_id",),
    "key": ("user_id", "key_id"),
    "run": ("user_id", "model_id"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The use of one user, key or run; the other of `key_id` and `model_id` says nothing."""

    user_id: str
    key_id: int = 0
    """0: not known, or no key was needed."""
    model_id: str = ""
    """Empty: base models."""
    counts: dict[str, float]
    """By kind; what is 0 is left out."""


class Usage(StoredNoun):
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        super().__init__(reader, writer)
        self._gathered: dict[_Key, float] = {}
        self._lock = threading.Lock()
        writer.defer(self._gathered_write)

    def add(self, counts: Iterable[UsageCount]) -> None:
        """Count. Returns at once; the rows follow within about a second."""
        with self._lock:
            _sum_up(self._gathered, counts)

    def add_kinds(
        self,
        counts: Mapping[UsageKind, float],
        *,
        user_id: str,
        session_id: str | None,
        model_id: str | None,
        base_model: str | None,
        key_id: int | None,
    ) -> None:
        """Count several kinds of one piece of work, now. For what happens often."""
        at, rest = _bucket(time.time()), (base_model or "", "", key_id or 0)
        who = (at, user_id, session_id or "", model_id or "")
        with self._lock:
            for kind, count in counts.items():
                key = (*who, kind, *rest)
                self._gathered[key] = self._gathered.get(key, 0.0) + count

    def flush(self) -> None:
        """Write what was counted so far. What a full disk does not take is kept, and follows."""
        with contextlib.suppress(OperationalError):
            self._writer.flush()

    @staticmethod
    def write(connection: Connection, counts: Iterable[UsageCount]) -> None:
        """Count inside a transaction that is under way."""
        sums: dict[_Key, float] = {}
        _sum_up(sums, counts)
        _add_rows(connection, sums)

    def events(self, user_id: str, start: float, end: float) -> list[UsageRow]:
        """Sums of the buckets that start in [start, end), everything counted so far included.

        The keys of a user are one here.
        """
        self._writer.flush()
        names = [_table.c[name] for name in _BILLED]
        query = (
            select(*names, func.sum(_table.c.count).label("count"))
            .where(_table.c.user_id == user_id, _table.c.kind != OPERATORS_KIND)
            .where(_table.c.bucket_start >= int(start), _table.c.bucket_start < int(end))
            .group_by(*names)
            .order_by(*names)
        )
        return [_usage_row(row._mapping) for row in self._rows(query)]

    def tokens(self, start: float) -> dict[str, float]:
        """The tokens of all users in the buckets that end after `start`, by kind."""
        query = (
            select(_table.c.kind, func.sum(_table.c.count))
            .where(_table.c.bucket_start > int(start) - BUCKET_S, _table.c.kind.in_(TOKEN_KINDS))
            .group_by(_table.c.kind)
        )
        return {row[0]: float(row[1]) for row in self._rows(query)}

    def used(self, by: UsedBy, start: float, limit: int) -> list[Used]:
        """The use of each user, key or run in the buckets that end after `start`.

        Most time of the device first; where that is equal, most of everything.
        """
        names = [_table.c[name] for name in _USERS[by]]
        kinds = (*TOKEN_KINDS, OPERATORS_KIND)
        sums = [_sum_of(kind).label(kind) for kind in kinds]
        query = (
            select(*names, *sums)
            .where(_table.c.bucket_start > int(start) - BUCKET_S, _table.c.kind.in_(kinds))
            .group_by(*names)
            .order_by(sums[-1].desc(), func.sum(_table.c.count).desc(), *names)
            .limit(limit)
        )
        return [
            Used(
                **{name: row[name] for name in _USERS[by]},
                counts={kind: row[kind] for kind in kinds if row[kind]},
            )
            for row in (one._mapping for one in self._rows(query))
        ]

    def _gathered_write(self) -> Callable[[Connection], None] | None:
        with self._lock:
            sums, self._gathered = self._gathered, {}
        return (lambda connection: _add_rows(connection, sums)) if sums else None


def _sum_of(kind: str) -> ColumnElement[float]:
    return func.sum(case((_table.c.kind == kind, _table.c.count), else_=0.0))


def _sum_up(sums: dict[_Key, float], counts: Iterable[UsageCount]) -> None:
    for c in counts:
        # Empty text for what is absent: all of it is the primary key, which holds no null.
        who = (_bucket(c.at or time.time()), c.user_id, c.session_id or "", c.model_id or "")
        key = (*who, c.kind, c.base_model or "", c.project_id or "", c.key_id or 0)
        sums[key] = sums.get(key, 0.0) + c.count


def _bucket(at: float) -> int:
    return int(at // BUCKET_S) * BUCKET_S


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
