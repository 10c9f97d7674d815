"""Client sessions: who opened them, whether they still live, how they ended.

Heartbeats are gathered in memory and written about once a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, and_, func, insert, or_, select, update

from tinkex.store import schema
from tinkex.store.noun import LatestMoments, StoredNoun, row_of
from tinkex.store.records import Session
from tinkex.store.writer import GroupWriter

ACTIVE = {"type": "active"}
_table = schema.sessions
_NEWEST = (_table.c.created_at.desc(), _table.c.session_id.desc())
FORGET_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery:
    """The conditions of a search; all that are given must hold, but either of id and name."""

    user_ids: Sequence[str] | None = None
    """None: every user."""
    session_id: str | None = None
    display_name: str | None = None
    """Words that must all occur, in any case."""
    project_ids: Sequence[str] | None = None
    status_types: Sequence[str] | None = None
    before: tuple[float, str] | None = None
    """(created_at, session_id) of the last row of the previous page."""


class Sessions(StoredNoun):
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        super().__init__(reader, writer)
        self._beats = LatestMoments(writer, _table.c.session_id, _table.c.last_heartbeat)

    def create(self, session: Session) -> None:
        row = row_of(session) | {"status_type": session.status["type"]}
        # A search cursor travels with microseconds and must find this very row again.
        row["created_at"] = round(session.created_at, 6)
        self._write(insert(_table).values(row))

    def count_alive(self, user_ids: Sequence[str], since: float) -> dict[str, int]:
        """Sessions of each user that are not over and gave a sign of life since a moment."""
        query = select(_table.c.user_id, func.count()).where(_table.c.user_id.in_(user_ids))
        query = query.where(_table.c.status_type == "active", _table.c.last_heartbeat >= since)
        return {row[0]: row[1] for row in self._rows(query.group_by(_table.c.user_id))}

    def get(self, session_id: str) -> Session | None:
        return self._first(Session, select(_table).where(_table.c.session_id == session_id))

    def heartbeat(self, session_id: str, at: float | None = None) -> None:
        """Note a sign of life. Returns at once; the row follows within about a second."""
        self._beats.note(session_id, at)

    def finish(self, session_id: str, status: dict[str, Any]) -> bool:
        """End an active session. The first reason wins: False when it had ended before."""
        active = (_table.c.session_id == session_id, _table.c.status_type == "active")
        ended = update(_table).where(*active).values(status=status, status_type=status["type"])
        return self._write(ended) > 0

    def set_project(self, session_id: str, project_id: str) -> None:
        """Move a session, with the checkpoints of its runs, to a project."""
        runs = select(schema.models.c.model_id).where(schema.models.c.session_id == session_id)
        marks = schema.checkpoints

        def write(connection: Connection) -> None:
            chosen = update(_table).where(_table.c.session_id == session_id)
            connection.execute(chosen.values(project_id=project_id))
            moved = update(marks).where(marks.c.model_id.in_(runs))
            connection.execute(moved.values(project_id=project_id))

        self._writer.run(write)

    def list_ids(self, user_id: str | None, limit: int, offset: int) -> list[str]:
        """Newest first; every user's with None."""
        query = select(_table.c.session_id)
        if user_id is not None:
            query = query.where(_table.c.user_id == user_id)
        return self._scalars(query.order_by(*_NEWEST).limit(limit).offset(offset))

    def forget(self, before: float) -> int:
        """Drop sessions without a run that were last seen before a moment, so many at a time.

        Their samplers go with them, except those whose weights are still on disk.
        """
        samplers, losses = schema.sampling_sessions, schema.custom_losses
        runs = select(schema.models.c.session_id)
        kept = select(samplers.c.session_id).where(
            samplers.c.ephemeral.is_(True), samplers.c.folder.is_not(None)
        )
        old = select(_table.c.session_id).where(_table.c.last_heartbeat < before)
        old = old.where(_table.c.session_id.not_in(runs), _table.c.session_id.not_in(kept))

        def write(connection: Connection) -> int:
            chosen = list(connection.execute(old.limit(FORGET_AT_ONCE)).scalars())
            self._stored.subtract(connection, "losses", losses.c.session_id.in_(chosen))
            for table in (samplers, losses, _table):
                connection.execute(table.delete().where(table.c.session_id.in_(chosen)))
            return len(chosen)

        return self._writer.run(write)

    def search(self, query: SessionQuery, limit: int) -> list[Session]:
        """Newest first. Conditions on metadata and finish reasons are the caller's to filter."""
        newest = select(_table).where(*_conditions(query)).order_by(*_NEWEST).limit(limit)
        return self._all(Session, newest)

    def by_id(self, session_ids: Collection[str]) -> dict[str, Session]:
        query = select(_table).where(_table.c.session_id.in_(session_ids))
        return {session.session_id: session for session in self._all(Session, query)}


def _conditions(query: SessionQuery) -> list[Any]:
    wanted: list[Any] = []
    if query.user_ids is not None:
        wanted.append(_table.c.user_id.in_(query.user_ids))
    named: list[Any] = []
    if query.session_id is not None:
        named.append(_table.c.session_id == query.session_id)
    if query.display_name is not None:
        name = func.lower(_table.c.display_name)
        words = query.display_name.lower().split()
        named.append(and_(*(name.contains(word, autoescape=True) for word in words)))
    if named:
        wanted.append(or_(*named))
    if query.project_ids is not None:
        wanted.append(_table.c.project_id.in_(query.project_ids))
    if query.status_types is not None:
        wanted.append(_table.c.status_type.in_(query.status_types))
    if query.before is not None:
        at, session_id = query.before
        same = and_(_table.c.created_at == at, _table.c.session_id < session_id)
        wanted.append(or_(_table.c.created_at < at, same))
    return wanted
