"""Sampling sessions and custom losses: small things a client session owns.

Both are numbered by the client; making one again under the same number gives back the first.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, func, or_, select, update

from tinkex.errors import InvalidInputError
from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.noun import R, StoredNoun, record, row_of
from tinkex.store.records import CustomLoss, SamplingSession
from tinkex.store.stored_bytes import StoredKindName
from tinkex.store.upsert import insert_or_ignore

_table = schema.sampling_sessions
_losses = schema.custom_losses
MAX_LOSSES = 1000
MAX_LOSS_BYTES = 64_000_000
"""Most traced losses that one user may have, and most bytes of them together."""


class Sampling(StoredNoun):
    def create(self, session: SamplingSession) -> SamplingSession:
        """Insert it, or give back the one that has its (session_id, seq_id)."""
        # The client that made it is number 0.
        row = row_of(session) | {"num_clients": 1}
        name = session.folder if session.ephemeral else None
        return self._make(SamplingSession, _table, row, "samplers", name or "")

    def create_loss(self, loss: CustomLoss) -> CustomLoss:
        """Insert it, or give back the one that has its (session_id, seq_id).

        Raises:
            InvalidInputError: Its user has too many, or too large ones.
        """
        return self._make(CustomLoss, _losses, row_of(loss), "losses", loss.loss_id)

    def forget_losses(
        self, ended_before: float, silent_before: float, *, session_id: str = ""
    ) -> int:
        """Drop losses whose session is over, or silent for very long, with no model to replay.

        With `session_id` those of one session only.
        """
        models = schema.models
        replayed = select(models.c.session_id).where(models.c.unloaded.is_(False))
        over = select(schema.sessions.c.session_id).where(_is_over(ended_before, silent_before))
        gone: list[ColumnElement[bool]]
        gone = [_losses.c.session_id.in_(over), _losses.c.session_id.not_in(replayed)]
        if session_id:
            gone.append(_losses.c.session_id == session_id)

        def write(connection: Connection) -> int:
            self._stored.subtract(connection, "losses", *gone)
            return connection.execute(_losses.delete().where(*gone)).rowcount

        return self._writer.run(write)

    def _make(
        self, kind: type[R], table: Table, row: dict[str, Any], stored: StoredKindName, name: str
    ) -> R:
        """`name`: the thing whose bytes the row counts; empty where it counts none."""
        same = (table.c.session_id == row["session_id"], table.c.seq_id == row["seq_id"])

        def write(connection: Connection) -> R:
            if connection.execute(select(table.c.seq_id).where(*same)).first() is None:
                if table is _losses:
                    _check_losses(connection, row)
                connection.execute(insert_or_ignore(connection, table), row)
                if name:
                    self._stored.add(row["user_id"], stored, row["size_bytes"], name=name)
            return record(kind, connection.execute(select(table).where(*same)).mappings().one())

        return self._writer.run(write)

    def get(self, sampling_session_id: str) -> SamplingSession | None:
        query = select(_table).where(_table.c.sampling_session_id == sampling_session_id)
        return self._first(SamplingSession, query)

    def join(self, sampling_session_id: str) -> int:
        """The number of one more client of the sampling session: 1, 2, ..."""
        same = _table.c.sampling_session_id == sampling_session_id

        def write(connection: Connection) -> int:
            statement = update(_table).where(same).values(num_clients=_table.c.num_clients + 1)
            row = connection.execute(statement.returning(_table.c.num_clients)).one()
            return int(row.num_clients) - 1

        return self._writer.run(write)

    def of_session(self, session_id: str) -> list[SamplingSession]:
        query = select(_table).where(_table.c.session_id == session_id).order_by(_table.c.seq_id)
        return self._all(SamplingSession, query)

    def ephemeral_of_ended(
        self, ended_before: float, silent_before: float
    ) -> list[SamplingSession]:
        """Samplers with their own folder whose session is over, or silent for very long."""
        sessions = schema.sessions
        query = (
            select(_table)
            .join(sessions, sessions.c.session_id == _table.c.session_id)
            .where(_table.c.ephemeral.is_(True), _table.c.folder.is_not(None))
            .where(_is_over(ended_before, silent_before))
        )
        return self._all(SamplingSession, query)

    def unnamed_of(self, model_id: str) -> list[SamplingSession]:
        """Samplers of a run that have a folder of their own, oldest first."""
        own = (_table.c.model_id == model_id, _table.c.folder.is_not(None))
        return self._all(SamplingSession, select(_table).where(*own).order_by(_table.c.created_at))

    def newest_inflight(self, model_id: str) -> SamplingSession | None:
        """The last weights that a run saved for those who follow it."""
        own = (_table.c.model_id == model_id, _table.c.folder.is_not(None))
        query = select(_table).where(*own, _table.c.inflight.is_(True))
        return self._first(SamplingSession, query.order_by(_table.c.created_at.desc()).limit(1))

    def forget_folder(self, sampling_session_id: str) -> None:
        """Let an ephemeral folder be removed; sampling from it can only say so."""
        same = _table.c.sampling_session_id == sampling_session_id

        def write(connection: Connection) -> None:
            row = connection.execute(select(_table).where(same)).mappings().first()
            gone = {"folder": None, "ephemeral": True, "size_bytes": 0}
            connection.execute(update(_table).where(same).values(gone))
            if row is not None and row["folder"] is not None:
                note_deleted(connection, row["folder"])
                if row["ephemeral"]:
                    self._stored.add(row["user_id"], "samplers", -row["size_bytes"])

        self._writer.run(write)

    def get_loss(self, loss_id: str) -> CustomLoss | None:
        return self._first(CustomLoss, select(_losses).where(_losses.c.loss_id == loss_id))


def _is_over(ended_before: float, silent_before: float) -> ColumnElement[bool]:
    """Sessions that ended before a moment, or gave no sign of life since another."""
    sessions = schema.sessions
    seen_at = sessions.c.last_heartbeat
    is_ended = and_(sessions.c.status_type != "active", seen_at < ended_before)
    return or_(is_ended, seen_at < silent_before)


def _check_losses(connection: Connection, row: dict[str, Any]) -> None:
    """Refuse one more traced loss of a user who has enough, in the transaction that adds it."""
    held = select(func.count(), func.coalesce(func.sum(_losses.c.size_bytes), 0))
    count, size = connection.execute(held.where(_losses.c.user_id == row["user_id"])).one()
    if count >= MAX_LOSSES or size + row["size_bytes"] > MAX_LOSS_BYTES:
        raise InvalidInputError(
            f"you have {count} traced losses with {size} bytes; {MAX_LOSSES} with {MAX_LOSS_BYTES} "
            "bytes are the most. They go with their session: end sessions that are done and unload "
            "their models, or pass the function itself to forward_backward_custom."
        )
