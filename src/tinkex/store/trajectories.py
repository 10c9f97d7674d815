"""The exact tokens of conversations: what a model was given, what it made, and in which order.

An answer names its parent, so the answers of a trajectory form trees; every leaf is one sequence.
Bounded twice: by age, and by bytes of one user, where the oldest go first.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, insert, select

from tinkex.store import schema
from tinkex.store.records import TrajectoryAnswer
from tinkex.store.writer import GroupWriter

_table = schema.trajectory_answers
MAX_BYTES_PER_USER = 1_000_000_000
MAX_ANSWERS = 10_000
MAX_BYTES = 32_000_000
"""Most of one trajectory, which is read and handed out as a whole."""


class Trajectories:
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        self._reader = reader
        self._writer = writer

    def add(self, answers: Sequence[TrajectoryAnswer]) -> list[int]:
        """Keep answers; gives their numbers, in order."""
        rows = [
            {name: getattr(a, name) for name in TrajectoryAnswer.__slots__ if name != "answer_id"}
            for a in answers
        ]

        def write(connection: Connection) -> list[int]:
            made = []
            for row in rows:
                statement = insert(_table).values(row).returning(_table.c.answer_id)
                made.append(int(connection.execute(statement).scalar_one()))
            return made

        return self._writer.run(write)

    def of(self, user_id: str, trajectory_id: str) -> list[TrajectoryAnswer]:
        """Every answer of a trajectory, parents before children."""
        query = (
            select(_table)
            .where(_table.c.user_id == user_id, _table.c.trajectory_id == trajectory_id)
            .order_by(_table.c.answer_id)
        )
        with self._reader.connect() as connection:
            return [TrajectoryAnswer(**row) for row in connection.execute(query).mappings()]

    def remove(self, user_id: str, trajectory_id: str) -> int:
        """Forget a trajectory; gives how many answers it had."""
        statement = delete(_table).where(
            _table.c.user_id == user_id, _table.c.trajectory_id == trajectory_id
        )
        return self._writer.run(lambda connection: connection.execute(statement).rowcount)

    def extent(self, user_id: str, trajectory_id: str) -> tuple[int, int]:
        """How many answers a trajectory has, and the bytes of their tokens and logprobs."""
        query = select(func.count(), _num_bytes()).where(
            _table.c.user_id == user_id, _table.c.trajectory_id == trajectory_id
        )
        with self._reader.connect() as connection:
            num_answers, size = connection.execute(query).one()
        return int(num_answers), int(size)

    def size_of_user(self, user_id: str) -> int:
        """Bytes of tokens and logprobs that a user has stored."""
        with self._reader.connect() as connection:
            query = select(_num_bytes()).where(_table.c.user_id == user_id)
            return int(connection.execute(query).scalar_one())

    def forget_before(self, created_before: float) -> int:
        statement = delete(_table).where(_table.c.created_at < created_before)
        return self._writer.run(lambda connection: connection.execute(statement).rowcount)


def _num_bytes() -> ColumnElement[int]:
    first, *others = (
        func.coalesce(func.sum(func.length(column)), 0)
        for column in (_table.c.prompt_tokens, _table.c.tokens, _table.c.logprobs)
    )
    return sum(others, start=first)
