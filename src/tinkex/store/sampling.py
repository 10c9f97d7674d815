"""Sampling sessions and custom losses: small things a client session owns.

Both are numbered by the client; making one again under the same number gives back the first.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, and_, or_, select, update

from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.noun import R, StoredNoun, record, row_of
from tinkex.store.records import CustomLoss, SamplingSession
from tinkex.store.upsert import insert_or_ignore

_table = schema.sampling_sessions
_losses = schema.custom_losses


class Sampling(StoredNoun):
    def create(self, session: SamplingSession) -> SamplingSession:
        """Insert it, or give back the one that has its (session_id, seq_id)."""
        # The client that made it is number 0.
        return self._make(SamplingSession, _table, row_of(session) | {"num_clients": 1})

    def create_loss(self, loss: CustomLoss) -> CustomLoss:
        """Insert it, or give back the one that has its (session_id, seq_id)."""
        return self._make(CustomLoss, _losses, row_of(loss))

    def _make(self, kind: type[R], table: Table, row: dict[str, Any]) -> R:
        same = (table.c.session_id == row["session_id"], table.c.seq_id == row["seq_id"])

        def write(connection: Connection) -> R:
            connection.execute(insert_or_ignore(connection, table), row)
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
        seen_at = sessions.c.last_heartbeat
        is_over = and_(sessions.c.status_type != "active", seen_at < ended_before)
        query = (
            select(_table)
            .join(sessions, sessions.c.session_id == _table.c.session_id)
            .where(_table.c.ephemeral.is_(True), _table.c.folder.is_not(None))
            .where(or_(is_over, seen_at < silent_before))
        )
        return self._all(SamplingSession, query)

    def unnamed_of(self, model_id: str) -> list[SamplingSession]:
        """Samplers of a run that have a folder of their own, oldest first."""
        own = (_table.c.model_id == model_id, _table.c.folder.is_not(None))
        return self._all(SamplingSession, select(_table).where(*own).order_by(_table.c.created_at))

    def forget_folder(self, sampling_session_id: str) -> None:
        """Let an ephemeral folder be removed; sampling from it can only say so."""
        same = _table.c.sampling_session_id == sampling_session_id

        def write(connection: Connection) -> None:
            folder = connection.execute(select(_table.c.folder).where(same)).scalar()
            connection.execute(update(_table).where(same).values(folder=None, ephemeral=True))
            if folder is not None:
                note_deleted(connection, folder)

        self._writer.run(write)

    def get_loss(self, loss_id: str) -> CustomLoss | None:
        return self._first(CustomLoss, select(_losses).where(_losses.c.loss_id == loss_id))
