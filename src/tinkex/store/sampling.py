"""Sampling sessions and custom losses: small things a client session owns.

Both are numbered by the client; making one again under the same number gives back the first.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, and_, or_, select, update

from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.records import CustomLoss, SamplingSession
from tinkex.store.upsert import insert_or_ignore
from tinkex.store.writer import GroupWriter

_table = schema.sampling_sessions
_losses = schema.custom_losses


class Sampling:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def create(self, session: SamplingSession) -> SamplingSession:
        """Insert it, or give back the one that has its (session_id, seq_id)."""
        row = {name: getattr(session, name) for name in SamplingSession.__slots__}
        row["num_clients"] = 1  # The client that made it is number 0.
        same = (_table.c.session_id == session.session_id, _table.c.seq_id == session.seq_id)

        def write(connection: Connection) -> SamplingSession:
            connection.execute(insert_or_ignore(connection, _table), row)
            return _sampling(connection.execute(select(_table).where(*same)).mappings().one())

        return self._writer.run(write)

    def get(self, sampling_session_id: str) -> SamplingSession | None:
        query = select(_table).where(_table.c.sampling_session_id == sampling_session_id)
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return _sampling(row) if row else None

    def join(self, sampling_session_id: str) -> int:
        """The number of one more client of the sampling session: 1, 2, ..."""
        one = _table.c.sampling_session_id == sampling_session_id

        def write(connection: Connection) -> int:
            statement = update(_table).where(one).values(num_clients=_table.c.num_clients + 1)
            row = connection.execute(statement.returning(_table.c.num_clients)).one()
            return int(row.num_clients) - 1

        return self._writer.run(write)

    def of_session(self, session_id: str) -> list[SamplingSession]:
        query = select(_table).where(_table.c.session_id == session_id).order_by(_table.c.seq_id)
        with self._reader.connect() as connection:
            return [_sampling(row) for row in connection.execute(query).mappings()]

    def ephemeral_of_ended(
        self, ended_before: float, silent_before: float
    ) -> list[SamplingSession]:
        """Those with a folder of their own whose session is over, or silent for very long."""
        sessions = schema.sessions
        query = (
            select(_table)
            .join(sessions, sessions.c.session_id == _table.c.session_id)
            .where(_table.c.ephemeral.is_(True), _table.c.folder.is_not(None))
            .where(
                or_(
                    and_(
                        sessions.c.status_type != "active",
                        sessions.c.last_heartbeat < ended_before,
                    ),
                    sessions.c.last_heartbeat < silent_before,
                )
            )
        )
        with self._reader.connect() as connection:
            return [_sampling(row) for row in connection.execute(query).mappings()]

    def unnamed_of(self, model_id: str) -> list[SamplingSession]:
        """Those of a run that have a folder of their own, oldest first."""
        query = (
            select(_table)
            .where(_table.c.model_id == model_id, _table.c.folder.is_not(None))
            .order_by(_table.c.created_at)
        )
        with self._reader.connect() as connection:
            return [_sampling(row) for row in connection.execute(query).mappings()]

    def forget_folder(self, sampling_session_id: str) -> None:
        """Let an ephemeral folder be removed; sampling from it can only say so."""
        one = _table.c.sampling_session_id == sampling_session_id

        def write(connection: Connection) -> None:
            folder = connection.execute(select(_table.c.folder).where(one)).scalar()
            connection.execute(update(_table).where(one).values(folder=None, ephemeral=True))
            if folder is not None:
                note_deleted(connection, folder)

        self._writer.run(write)

    def create_loss(self, loss: CustomLoss) -> CustomLoss:
        """Insert it, or give back the one that has its (session_id, seq_id)."""
        row = {name: getattr(loss, name) for name in CustomLoss.__slots__}
        same = (_losses.c.session_id == loss.session_id, _losses.c.seq_id == loss.seq_id)

        def write(connection: Connection) -> CustomLoss:
            connection.execute(insert_or_ignore(connection, _losses), row)
            return CustomLoss(**connection.execute(select(_losses).where(*same)).mappings().one())

        return self._writer.run(write)

    def get_loss(self, loss_id: str) -> CustomLoss | None:
        query = select(_losses).where(_losses.c.loss_id == loss_id)
        with self._reader.connect() as connection:
            row = connection.execute(query).mappings().first()
        return CustomLoss(**row) if row else None


def _sampling(row: Any) -> SamplingSession:
    return SamplingSession(**{name: row[name] for name in SamplingSession.__slots__})
