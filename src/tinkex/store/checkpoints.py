"""Checkpoints by their tinker path, the short names users give them, and the audit log.

A row is written only after its folder is complete, so whatever is listed also loads. Rows point at
folders by their name in the data folder; the folder of a row that was deleted or replaced is noted
in the same transaction, and removing it is the caller's work (see `folders`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update

from tinkex.errors import InvalidInputError
from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.noun import StoredNoun, record, row_of
from tinkex.store.records import AuditEntry, Checkpoint, CheckpointName
from tinkex.store.upsert import insert_or_ignore, insert_or_replace

_table = schema.checkpoints
_names = schema.checkpoint_names
_audit = schema.audit
_idempotency = schema.idempotency
_NEWEST = (_table.c.created_at.desc(), _table.c.path.desc())
MAX_NAMES = 10_000
"""Of one user."""
MAX_OF_RUN, MAX_OF_USER = 10_000, 100_000
"""Most checkpoints that a run and a user may have; small ones fill no quota of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """The conditions of a search of one user's checkpoints; all that are given must hold."""

    user_id: str
    project_ids: Sequence[str] | None = None
    kind: str | None = None
    base_models: Sequence[str] | None = None
    before: tuple[float, str] | None = None
    """(created_at, path) of the last row of the previous page."""


class Checkpoints(StoredNoun):
    def put(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Insert or replace by path; gives the replaced row, whose folder may now go.

        Raises:
            InvalidInputError: Its run or its user has too many.
        """
        # A search cursor travels with microseconds and must find this very row again.
        row = row_of(checkpoint) | {"created_at": round(checkpoint.created_at or time.time(), 6)}

        def write(connection: Connection) -> Checkpoint | None:
            before = _find(connection, checkpoint.path)
            if before is None:
                _check_number(connection, checkpoint)
            connection.execute(insert_or_replace(connection, _table), row)
            if before and before.folder != checkpoint.folder:
                note_deleted(connection, before.folder)
            if before:
                self._stored.add(before.user_id, "checkpoints", -before.size_bytes)
            size, name = checkpoint.size_bytes, checkpoint.folder
            self._stored.add(checkpoint.user_id, "checkpoints", size, name=name)
            return before

        return self._writer.run(write)

    def get(self, path: str, now: float | None = None) -> Checkpoint | None:
        """A checkpoint that has not expired."""
        return self._first(Checkpoint, select(_table).where(_table.c.path == path, _alive(now)))

    def delete(self, path: str) -> Checkpoint | None:
        """Remove the row; gives it back, None when there was none."""

        def write(connection: Connection) -> Checkpoint | None:
            before = _find(connection, path)
            connection.execute(_table.delete().where(_table.c.path == path))
            if before:
                note_deleted(connection, before.folder)
                self._stored.add(before.user_id, "checkpoints", -before.size_bytes)
            return before

        return self._writer.run(write)

    def set_public(self, path: str, public: bool) -> None:
        self._write(update(_table).where(_table.c.path == path).values(public=public))

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """None: it stays for ever."""
        self._write(update(_table).where(_table.c.path == path).values(expires_at=expires_at))

    def of_run(self, model_id: str, now: float | None = None) -> list[Checkpoint]:
        """Newest first."""
        query = select(_table).where(_table.c.model_id == model_id, _alive(now))
        return self._all(Checkpoint, query.order_by(*_NEWEST))

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
        return {found.model_id: found for found in self._all(Checkpoint, query)}

    def page(self, user_id: str, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """A user's checkpoints, newest first, and how many there are in all."""
        where = (_table.c.user_id == user_id, _alive(None))
        return self._page(Checkpoint, _table, where, _NEWEST, limit, offset)

    def search(self, query: CheckpointQuery, limit: int) -> list[Checkpoint]:
        """Newest first. Conditions on metadata are the caller's to filter."""
        newest = select(_table).where(*_conditions(query)).order_by(*_NEWEST).limit(limit)
        return self._all(Checkpoint, newest)

    def projects_of(self, user_id: str, among: Sequence[str]) -> set[str]:
        """Keep the projects in which a user has a session or a checkpoint."""
        projects: set[str] = set()
        for table in (schema.sessions, _table):
            mine = (table.c.user_id == user_id, table.c.project_id.in_(among))
            projects.update(self._scalars(select(table.c.project_id).where(*mine).distinct()))
        return projects

    def totals_of_sessions(self, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """(number, bytes) of the checkpoints of each session."""
        models = schema.models
        query = (
            select(models.c.session_id, func.count(), func.sum(_table.c.size_bytes))
            .join(models, models.c.model_id == _table.c.model_id)
            .where(models.c.session_id.in_(session_ids), _alive(None))
            .group_by(models.c.session_id)
        )
        return {row[0]: (int(row[1]), int(row[2])) for row in self._rows(query)}

    def storage_by_project(self, user_id: str) -> dict[str | None, tuple[int, int]]:
        """(number, bytes) of a user's checkpoints in each project."""
        query = (
            select(_table.c.project_id, func.count(), func.sum(_table.c.size_bytes))
            .where(_table.c.user_id == user_id, _alive(None))
            .group_by(_table.c.project_id)
        )
        return {row[0]: (int(row[1]), int(row[2])) for row in self._rows(query)}

    def storage_by_user(self) -> list[tuple[str, str | None, int]]:
        """(user_id, project_id, bytes), to be counted as use."""
        query = select(_table.c.user_id, _table.c.project_id, func.sum(_table.c.size_bytes))
        query = query.group_by(_table.c.user_id, _table.c.project_id)
        return [(row[0], row[1], int(row[2])) for row in self._rows(query)]

    def expired(self, now: float | None = None) -> list[Checkpoint]:
        """The checkpoints whose time is over, for the sweeper to delete."""
        now = time.time() if now is None else now
        return self._all(Checkpoint, select(_table).where(_table.c.expires_at <= now))

    def remember(self, user_id: str, key: str, value: str) -> str:
        """Bind an idempotency key to a value; gives the value that was bound first."""
        table = _idempotency
        row = {"user_id": user_id, "key": key, "value": value, "created_at": time.time()}
        same = (table.c.user_id == user_id, table.c.key == key)

        def write(connection: Connection) -> str:
            connection.execute(insert_or_ignore(connection, table), row)
            return str(connection.execute(select(table.c.value).where(*same)).scalar_one())

        return self._writer.run(write)

    def forget_keys(self, before: float) -> None:
        """Drop idempotency keys bound before a moment."""
        self._write(_idempotency.delete().where(_idempotency.c.created_at < before))


class CheckpointNames(StoredNoun):
    """Short names that users give to their checkpoints."""

    def put(self, user_id: str, name: str, path: str) -> CheckpointName:
        """Give a name, or move it to another checkpoint."""
        named = CheckpointName(user_id=user_id, name=name, path=path, created_at=time.time())
        mine = select(func.count()).select_from(_names).where(_names.c.user_id == user_id)

        def write(connection: Connection) -> None:
            if connection.execute(mine).scalar_one() >= MAX_NAMES:
                raise InvalidInputError(f"you have {MAX_NAMES} names already; remove some.")
            connection.execute(insert_or_replace(connection, _names), row_of(named))

        self._writer.run(write)
        return named

    def get(self, user_id: str, name: str) -> CheckpointName | None:
        query = select(_names).where(_names.c.user_id == user_id, _names.c.name == name)
        return self._first(CheckpointName, query)

    def of_user(self, user_id: str) -> list[CheckpointName]:
        query = select(_names).where(_names.c.user_id == user_id).order_by(_names.c.name)
        return self._all(CheckpointName, query)

    def remove(self, user_id: str, name: str) -> bool:
        """Take a name back; the checkpoint stays. False when there was none."""
        mine = (_names.c.user_id == user_id, _names.c.name == name)
        return self._write(delete(_names).where(*mine)) > 0


class Audit(StoredNoun):
    """The audit log: what users did, and what was done to them, as `<resource>_<action>` events."""

    def record(self, user_id: str, event: str, details: dict[str, Any]) -> None:
        """Write an entry. Does not wait for the commit; `entries` and `page` do."""
        row = {"user_id": user_id, "timestamp": time.time(), "event": event, "details": details}
        self._writer.submit(lambda connection: connection.execute(insert(_audit), row))

    def _wait_written(self) -> None:
        """Wait for what was recorded: who looks right after an act must find it."""
        self._writer.run(lambda connection: None)

    def forget(self, before: float) -> None:
        """Drop entries written before a moment."""
        self._write(_audit.delete().where(_audit.c.timestamp < before))

    def entries(
        self, user_id: str, *, prefixes: Sequence[str] | None, start: float, end: float
    ) -> list[AuditEntry]:
        """Entries with start <= timestamp < end whose event starts with one of the prefixes."""
        self._wait_written()
        query = select(_audit).where(_audit.c.user_id == user_id)
        query = query.where(_audit.c.timestamp >= start, _audit.c.timestamp < end)
        if prefixes is not None:
            query = query.where(or_(*(_audit.c.event.startswith(p) for p in prefixes)))
        return self._all(AuditEntry, query.order_by(_audit.c.entry_id))

    def page(
        self,
        limit: int,
        offset: int,
        *,
        user_id: str | None = None,
        prefix: str | None = None,
        start: float | None = None,
    ) -> list[AuditEntry]:
        """Entries of every user, or of one, since a moment, newest first."""
        self._wait_written()
        query = select(_audit)
        if start is not None:
            query = query.where(_audit.c.timestamp >= start)
        if user_id is not None:
            query = query.where(_audit.c.user_id == user_id)
        if prefix is not None:
            query = query.where(_audit.c.event.startswith(prefix, autoescape=True))
        newest = (_audit.c.timestamp.desc(), _audit.c.entry_id.desc())
        return self._all(AuditEntry, query.order_by(*newest).limit(limit).offset(offset))

    def newest_of_users(self, event: str, limit: int, *, start: float) -> list[AuditEntry]:
        """The newest entries of an event since `start`, so many of each user."""
        newest_first = func.row_number().over(
            partition_by=_audit.c.user_id, order_by=_audit.c.timestamp.desc()
        )
        where = (_audit.c.event == event, _audit.c.timestamp >= start)
        ranked = select(_audit, newest_first.label("place")).where(*where).subquery()
        return self._all(AuditEntry, select(ranked).where(ranked.c.place <= limit))


def _conditions(query: CheckpointQuery) -> list[Any]:
    wanted: list[Any] = [_table.c.user_id == query.user_id, _alive(None)]
    if query.project_ids is not None:
        wanted.append(_table.c.project_id.in_(query.project_ids))
    if query.kind is not None:
        wanted.append(_table.c.kind == query.kind)
    if query.base_models is not None:
        wanted.append(_table.c.base_model.in_(query.base_models))
    if query.before is not None:
        at, path = query.before
        same = and_(_table.c.created_at == at, _table.c.path < path)
        # By its path as well: rows of before have times finer than a cursor tells.
        wanted += [or_(_table.c.created_at < at, same), _table.c.path != path]
    return wanted


def _check_number(connection: Connection, new: Checkpoint) -> None:
    owners = (
        ("run", _table.c.model_id == new.model_id, MAX_OF_RUN),
        ("user", _table.c.user_id == new.user_id, MAX_OF_USER),
    )
    for owner, is_of, most in owners:
        count = connection.execute(select(func.count()).select_from(_table).where(is_of))
        if count.scalar_one() >= most:
            raise InvalidInputError(
                f"{new.path} would be one of over {most} checkpoints of a {owner}; delete some, "
                "give them a time to live, or save with overwrite=True."
            )


def _find(connection: Connection, path: str) -> Checkpoint | None:
    """Expired or not."""
    row = connection.execute(select(_table).where(_table.c.path == path)).mappings().first()
    return record(Checkpoint, row) if row else None


def _alive(now: float | None) -> Any:
    moment = time.time() if now is None else now
    return or_(_table.c.expires_at.is_(None), _table.c.expires_at > moment)
