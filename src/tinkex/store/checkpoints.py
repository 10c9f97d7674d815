"""Checkpoints by their tinker path, and the audit log of what happened to them.

A row is written only after its folder is complete, so whatever is listed also loads. Rows point at
folders by their name in the data folder; the folder of a row that was deleted or replaced is noted
in the same transaction, and removing it is the caller's work (see `folders`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, and_, func, insert, or_, select, update

from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.records import AuditEntry, Checkpoint
from tinkex.store.upsert import insert_or_ignore, insert_or_replace
from tinkex.store.writer import GroupWriter

_table = schema.checkpoints
_audit = schema.audit
_FIELDS = tuple(Checkpoint.__slots__)


class Checkpoints:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def put(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Insert or replace by path; gives the replaced row, whose folder may now go."""
        row = {name: getattr(checkpoint, name) for name in _FIELDS}
        row["created_at"] = checkpoint.created_at or time.time()

        def write(connection: Connection) -> Checkpoint | None:
            query = select(_table).where(_table.c.path == checkpoint.path)
            before = connection.execute(query).mappings().first()
            connection.execute(insert_or_replace(connection, _table), row)
            if before and before["folder"] != checkpoint.folder:
                note_deleted(connection, before["folder"])
            return _checkpoint(before) if before else None

        return self._writer.run(write)

    def get(self, path: str, now: float | None = None) -> Checkpoint | None:
        """A checkpoint that has not expired."""
        found = self._all(select(_table).where(_table.c.path == path, _alive(now)))
        return found[0] if found else None

    def delete(self, path: str) -> Checkpoint | None:
        """Remove the row; gives it back, None when there was none."""

        def write(connection: Connection) -> Checkpoint | None:
            query = select(_table).where(_table.c.path == path)
            before = connection.execute(query).mappings().first()
            connection.execute(_table.delete().where(_table.c.path == path))
            if before:
                note_deleted(connection, before["folder"])
            return _checkpoint(before) if before else None

        return self._writer.run(write)

    def set_public(self, path: str, public: bool) -> None:
        self._set(path, {"public": public})

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """None: it stays for ever."""
        self._set(path, {"expires_at": expires_at})

    def of_run(self, model_id: str, now: float | None = None) -> list[Checkpoint]:
        """Newest first."""
        query = select(_table).where(_table.c.model_id == model_id, _alive(now))
        return self._all(query.order_by(*_NEWEST))

    def last_of_runs(self, model_ids: Sequence[str], kind: str) -> dict[str, Checkpoint]:
        """The newest checkpoint of a kind for each run that has one."""
        where = and_(_table.c.model_id.in_(model_ids), _table.c.kind == kind, _alive(None))
        newest = (
            select(_table.c.model_id, func.max(_table.c.created_at).label("at"))
            .where(where)
            .group_by(_table.c.model_id)
            .subquery()
        )
        same = and_(_table.c.model_id == newest.c.model_id, _table.c.created_at == newest.c.at)
        query = select(_table).join(newest, same).where(_table.c.kind == kind)
        return {found.model_id: found for found in self._all(query)}

    def page(self, user_id: str, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """A user's checkpoints, newest first, and how many there are in all."""
        where = (_table.c.user_id == user_id, _alive(None))
        query = select(_table).where(*where).order_by(*_NEWEST).limit(limit).offset(offset)
        with self._reader.connect() as connection:
            total = connection.execute(select(func.count()).select_from(_table).where(*where))
            return self._all(query), int(total.scalar_one())

    def totals_of_sessions(self, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """(number, bytes) of the checkpoints of each session."""
        models = schema.models
        query = (
            select(models.c.session_id, func.count(), func.sum(_table.c.size_bytes))
            .join(models, models.c.model_id == _table.c.model_id)
            .where(models.c.session_id.in_(session_ids), _alive(None))
            .group_by(models.c.session_id)
        )
        with self._reader.connect() as connection:
            return {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(query)}

    def storage_by_project(self, user_id: str) -> dict[str | None, tuple[int, int]]:
        """(number, bytes) of a user's checkpoints in each project."""
        query = (
            select(_table.c.project_id, func.count(), func.sum(_table.c.size_bytes))
            .where(_table.c.user_id == user_id, _alive(None))
            .group_by(_table.c.project_id)
        )
        with self._reader.connect() as connection:
            return {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(query)}

    def bytes_of(self, user_ids: Sequence[str]) -> dict[str, int]:
        """What the checkpoints of each user weigh."""
        query = (
            select(_table.c.user_id, func.sum(_table.c.size_bytes))
            .where(_table.c.user_id.in_(user_ids), _alive(None))
            .group_by(_table.c.user_id)
        )
        with self._reader.connect() as connection:
            return {row[0]: int(row[1]) for row in connection.execute(query)}

    def storage_by_user(self) -> list[tuple[str, str | None, int]]:
        """(user_id, project_id, bytes), to be counted as use."""
        query = select(_table.c.user_id, _table.c.project_id, func.sum(_table.c.size_bytes))
        query = query.group_by(_table.c.user_id, _table.c.project_id)
        with self._reader.connect() as connection:
            return [(row[0], row[1], int(row[2])) for row in connection.execute(query)]

    def expired(self, now: float | None = None) -> list[Checkpoint]:
        """What the sweeper should delete, folders first listed, rows still present."""
        now = time.time() if now is None else now
        return self._all(select(_table).where(_table.c.expires_at <= now))

    def remember(self, user_id: str, key: str, value: str) -> str:
        """Bind an idempotency key to a value; gives the value that was bound first."""
        table = schema.idempotency
        row = {"user_id": user_id, "key": key, "value": value, "created_at": time.time()}
        same = (table.c.user_id == user_id, table.c.key == key)

        def write(connection: Connection) -> str:
            connection.execute(insert_or_ignore(connection, table), row)
            return str(connection.execute(select(table.c.value).where(*same)).scalar_one())

        return self._writer.run(write)

    def forget_keys(self, before: float) -> None:
        """Drop idempotency keys bound before a moment."""
        statement = schema.idempotency.delete().where(schema.idempotency.c.created_at < before)
        self._writer.run(lambda connection: connection.execute(statement))

    def _set(self, path: str, values: dict[str, Any]) -> None:
        statement = update(_table).where(_table.c.path == path).values(**values)
        self._writer.run(lambda connection: connection.execute(statement))

    def _all(self, query: Any) -> list[Checkpoint]:
        with self._reader.connect() as connection:
            return [_checkpoint(row) for row in connection.execute(query).mappings()]


class Audit:
    """What users did, and what was done to them, as `<resource>_<action>` events."""

    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def record(self, user_id: str, event: str, details: dict[str, Any]) -> None:
        """Write an entry. Does not wait for the commit."""
        row = {"user_id": user_id, "timestamp": time.time(), "event": event, "details": details}
        self._writer.submit(lambda connection: connection.execute(insert(_audit), row))

    def forget(self, before: float) -> None:
        """Drop entries written before a moment."""
        statement = _audit.delete().where(_audit.c.timestamp < before)
        self._writer.run(lambda connection: connection.execute(statement))

    def entries(
        self, user_id: str, *, prefixes: Sequence[str] | None, start: float, end: float
    ) -> list[AuditEntry]:
        """Entries with start <= timestamp < end whose event starts with one of the prefixes."""
        query = select(*_AUDIT_FIELDS).where(_audit.c.user_id == user_id)
        query = query.where(_audit.c.timestamp >= start, _audit.c.timestamp < end)
        if prefixes is not None:
            query = query.where(or_(*(_audit.c.event.startswith(p) for p in prefixes)))
        with self._reader.connect() as connection:
            rows = connection.execute(query.order_by(_audit.c.entry_id)).mappings()
            return [AuditEntry(**row) for row in rows]

    def page(
        self, limit: int, offset: int, *, user_id: str | None = None, prefix: str | None = None
    ) -> list[AuditEntry]:
        """Entries of every user, or of one, newest first."""
        query = select(*_AUDIT_FIELDS)
        if user_id is not None:
            query = query.where(_audit.c.user_id == user_id)
        if prefix is not None:
            query = query.where(_audit.c.event.startswith(prefix, autoescape=True))
        newest = (_audit.c.timestamp.desc(), _audit.c.entry_id.desc())
        with self._reader.connect() as connection:
            rows = connection.execute(query.order_by(*newest).limit(limit).offset(offset))
            return [AuditEntry(**row) for row in rows.mappings()]


_AUDIT_FIELDS = (_audit.c.timestamp, _audit.c.user_id, _audit.c.event, _audit.c.details)
_NEWEST = (_table.c.created_at.desc(), _table.c.path.desc())


def _alive(now: float | None) -> Any:
    moment = time.time() if now is None else now
    return or_(_table.c.expires_at.is_(None), _table.c.expires_at > moment)


def _checkpoint(row: Any) -> Checkpoint:
    return Checkpoint(**{name: row[name] for name in _FIELDS})
