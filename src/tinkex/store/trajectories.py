"""The exact tokens of conversations: what a model was given, what it made, and in which order.

An answer names its parent, so the answers of a trajectory form trees; every leaf is one sequence.
Old answers go. How much a trajectory and a user may have is judged before answers are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select

from tinkex.store import schema
from tinkex.store.noun import StoredNoun, row_of
from tinkex.store.records import TrajectoryAnswer
from tinkex.store.stored_bytes import ANSWER_BYTES

_table = schema.trajectory_answers
_NUM_BYTES = func.coalesce(func.sum(ANSWER_BYTES), 0)
MAX_BYTES_PER_USER = 1_000_000_000
MAX_ANSWERS = 10_000
MAX_BYTES = 32_000_000
"""Most of one trajectory, which is read and handed out as a whole."""


class Trajectories(StoredNoun):
    def add(self, answers: Sequence[TrajectoryAnswer]) -> list[int]:
        """Keep answers; gives their numbers, in order."""
        rows = [row_of(answer) for answer in answers]
        for row in rows:
            del row["answer_id"]  # the database gives it

        def write(connection: Connection) -> list[int]:
            numbers = []
            for row, answer in zip(rows, answers, strict=True):
                statement = insert(_table).values(row).returning(_table.c.answer_id)
                numbers.append(int(connection.execute(statement).scalar_one()))
                self._stored.add(answer.user_id, "trajectories", answer.num_bytes)
            return numbers

        return self._writer.run(write)

    def of(self, user_id: str, trajectory_id: str) -> list[TrajectoryAnswer]:
        """Every answer of a trajectory, parents before children."""
        query = select(_table).where(_is_of(user_id, trajectory_id)).order_by(_table.c.answer_id)
        return self._all(TrajectoryAnswer, query)

    def remove(self, user_id: str, trajectory_id: str) -> int:
        """Forget a trajectory; gives how many answers it had."""
        return self._remove(_is_of(user_id, trajectory_id))

    def extent(self, user_id: str, trajectory_id: str) -> tuple[int, int]:
        """How many answers a trajectory has, and the bytes of their tokens and logprobs."""
        query = select(func.count(), _NUM_BYTES).where(_is_of(user_id, trajectory_id))
        [(num_answers, size)] = self._rows(query)
        return int(num_answers), int(size)

    def forget_before(self, created_before: float) -> int:
        return self._remove(_table.c.created_at < created_before)

    def _remove(self, condition: ColumnElement[bool]) -> int:
        def write(connection: Connection) -> int:
            self._stored.subtract(connection, "trajectories", condition)
            return connection.execute(delete(_table).where(condition)).rowcount

        return self._writer.run(write)


def _is_of(user_id: str, trajectory_id: str) -> ColumnElement[bool]:
    return and_(_table.c.user_id == user_id, _table.c.trajectory_id == trajectory_id)
