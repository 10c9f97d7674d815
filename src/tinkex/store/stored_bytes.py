"""How many bytes each user has stored, by kind: counted while they are written, never measured.

Each kind is declared once, in `KINDS`, with the rows that say how large it is. The count of a user
is their sum, `recount` asks the database for it, and `tinkex disk` shows the same rows by run.

A write that stores or drops bytes says so inside its own transaction (`add`), and the writer makes
it count when the transaction is committed. So the counts, which live in memory, are those of the
database at any moment; `load` takes them from there once, when a server starts.

Bytes that are about to be written are reserved under the name of the thing they belong to (a
request id, a folder), and the commit of that thing ends the reservation: between the two nothing
is counted twice, and nothing is missed.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Select, func, literal_column, select

from tinkex.store import schema

StoredKindName = Literal[
    "checkpoints", "state", "samplers", "requests", "results", "losses", "trajectories"
]


@dataclass(frozen=True, slots=True)
class StoredKind:
    """Bytes of one kind: what they are in words, how to have fewer, and the rows that count."""

    name: StoredKindName
    says: str
    way_out: str
    rows: Select[Any]
    """user_id, run_id, num_bytes: of each thing of this kind, whose it is and its size."""
    in_database: bool = True
    """Whether the bytes lie in the database; else in folders beside it."""


def _rows(user_id: Any, run_id: Any, num_bytes: Any) -> Select[Any]:
    columns = (user_id.label("user_id"), run_id.label("run_id"), num_bytes.label("num_bytes"))
    return select(*columns)


_marks, _states, _samplers = schema.checkpoints, schema.snapshots, schema.sampling_sessions
_journal, _losses, _answers = schema.journal, schema.custom_losses, schema.trajectory_answers
ANSWER_BYTES = (
    func.length(_answers.c.prompt_tokens)
    + func.length(_answers.c.tokens)
    + func.length(_answers.c.logprobs)
)
"""As `TrajectoryAnswer.num_bytes` counts them."""

_DECLARED = (
    StoredKind(
        "checkpoints",
        "checkpoints",
        "delete some (`tinkex checkpoint delete`), or give them a time to live",
        _rows(_marks.c.user_id, _marks.c.model_id, _marks.c.size_bytes),
        in_database=False,
    ),
    StoredKind(
        "state",
        "state of models that can train on",
        "unload models that are done (unload_model)",
        _rows(schema.models.c.user_id, _states.c.model_id, _states.c.size_bytes).join(
            schema.models, schema.models.c.model_id == _states.c.model_id
        ),
        in_database=False,
    ),
    StoredKind(
        "samplers",
        "unnamed weights to sample from",
        "unload their models, or end the sessions that made them",
        _rows(
            _samplers.c.user_id,
            func.coalesce(_samplers.c.model_id, _samplers.c.session_id),
            _samplers.c.size_bytes,
        ).where(_samplers.c.ephemeral.is_(True), _samplers.c.folder.is_not(None)),
        in_database=False,
    ),
    StoredKind(
        "requests",
        "requests of models since their state was last saved",
        "unload models that are done",
        _rows(_journal.c.user_id, _journal.c.model_id, func.length(_journal.c.body)).where(
            _journal.c.body.is_not(None)
        ),
    ),
    StoredKind(
        "results",
        "results of training requests",
        "fetch them: they go a minute later",
        _rows(_journal.c.user_id, _journal.c.model_id, func.length(_journal.c.result)).where(
            _journal.c.result.is_not(None)
        ),
    ),
    StoredKind(
        "losses",
        "traced losses",
        "end the sessions that made them, and unload their models",
        _rows(_losses.c.user_id, _losses.c.session_id, _losses.c.size_bytes),
    ),
    StoredKind(
        "trajectories",
        "recorded conversations",
        "delete some (DELETE /api/v1/trajectories/ID)",
        _rows(_answers.c.user_id, literal_column("'trajectories'"), ANSWER_BYTES),
    ),
)
KINDS: Mapping[StoredKindName, StoredKind] = {kind.name: kind for kind in _DECLARED}
Counts = dict[str, Counter[StoredKindName]]
"""Bytes by user and kind."""


@dataclass(frozen=True, slots=True)
class _Change:
    user_id: str
    kind: StoredKindName
    num_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class _Reservation:
    user_id: str
    num_bytes: int


class StoredBytes:
    """The counts of one database. `add`, `load` and the two ends are the writer's thread's."""

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._loading: Counts | None = None
        self._is_loaded = False
        self._changes: list[_Change] = []  # of the transaction that is open
        self._reserved: dict[str, _Reservation] = {}
        self._reserved_by_user: Counter[str] = Counter()
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------ asked by anybody

    def of(self, user_id: str) -> Counter[StoredKindName]:
        """Bytes of a user by kind, without what is reserved."""
        with self._lock:
            return Counter(self._counts.get(user_id, ()))

    def total(self, user_id: str, *, besides: str = "") -> int:
        """Bytes of a user, what is reserved included, but not for the thing named `besides`."""
        with self._lock:
            stored = self._counts.get(user_id)
            reserved = self._reserved_by_user.get(user_id, 0)
            own = self._reserved.get(besides)
            return (stored.total() if stored else 0) + reserved - (own.num_bytes if own else 0)

    def reserve(self, name: str, user_id: str, num_bytes: int) -> None:
        """Count bytes that will be written for `name`, until that is committed or `release`d."""
        with self._lock:
            self._release(name)
            self._reserved[name] = _Reservation(user_id, num_bytes)
            self._reserved_by_user[user_id] += num_bytes

    def release(self, name: str) -> None:
        """End a reservation, if it has not ended by itself."""
        with self._lock:
            self._release(name)

    def _release(self, name: str) -> None:
        ended = self._reserved.pop(name, None)
        if ended is not None:
            self._reserved_by_user[ended.user_id] -= ended.num_bytes
            if not self._reserved_by_user[ended.user_id]:
                del self._reserved_by_user[ended.user_id]

    # ------------------------------------------------------------------------ by the writer

    def add(
        self, user_id: str, kind: StoredKindName, num_bytes: int | None, *, name: str = ""
    ) -> None:
        """Say in a transaction that a user has so many bytes more; fewer when it is negative.

        Args:
            name: The thing that was written, whose reservation ends.
        """
        if num_bytes or name:
            self._changes.append(_Change(user_id, kind, num_bytes or 0, name))

    def subtract(self, connection: Connection, kind: StoredKindName, *where: Any) -> None:
        """Say in a transaction that the rows of a kind that fit are about to go."""
        for user_id, num_bytes in connection.execute(_sums(KINDS[kind].rows.where(*where))):
            self.add(user_id, kind, -int(num_bytes or 0))

    def load(self, connection: Connection) -> None:
        """Take the counts from the database. To be run by the writer."""
        # What this transaction did before is in the rows already; what follows is added later.
        self._loading, self._changes = recount(connection), []

    def committed(self) -> None:
        if not self._changes and self._loading is None:
            return
        changes, self._changes = self._changes, []
        with self._lock:
            if self._loading is not None:
                self._counts, self._loading, self._is_loaded = self._loading, None, True
            for change in changes:
                self._release(change.name)
                if self._is_loaded:
                    self._count(change)

    def rolled_back(self) -> None:
        self._changes, self._loading = [], None

    def _count(self, change: _Change) -> None:
        counts = self._counts.setdefault(change.user_id, Counter())
        counts[change.kind] += change.num_bytes
        if not counts[change.kind]:
            del counts[change.kind]
        if not counts:
            del self._counts[change.user_id]


def recount(connection: Connection) -> Counts:
    """The bytes of all users, as the database says: what the counts must be equal to."""
    counts: Counts = defaultdict(Counter)
    for kind in KINDS.values():
        for user_id, num_bytes in connection.execute(_sums(kind.rows)):
            if num_bytes:
                counts[user_id][kind.name] = int(num_bytes)
    return dict(counts)


def _sums(rows: Select[Any]) -> Select[Any]:
    """The bytes of each user in rows of a kind."""
    listed = rows.subquery()
    return select(listed.c.user_id, func.sum(listed.c.num_bytes)).group_by(listed.c.user_id)
