"""The journal: every accepted training request, and what became of it.

A promise is given only after `append` resolved. (model_id, seq_id) is unique: a repeat leaves the
first row as it is, another body under a used number is a `SeqConflictError`. Results live in the
same row until they were fetched (plus a grace) or their TTL ended; bodies live until a snapshot
makes them useless. What is left of a row then is small, keeps repeats idempotent and feeds the
trace export; `sweep` drops it after days. The store never looks into a body or a result.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from sqlalchemy import Column, Connection, Engine, bindparam, func, null, select, update

from tinkex.errors import InvalidInputError
from tinkex.store import schema
from tinkex.store.noun import StoredNoun
from tinkex.store.records import Ended, Fetched, JournalOutline, JournalRow, NewRow
from tinkex.store.stored_bytes import StoredKindName
from tinkex.store.upsert import insert_or_ignore
from tinkex.store.usage import Usage
from tinkex.store.writer import GroupWriter

_table = schema.journal
_OUTLINE = select(
    *(column for column in _table.c if column.name in JournalOutline.__slots__),
    func.length(_table.c.result).label("result_bytes"),
)
RESULT_TTL_S = 24 * 3600.0
"""How long a result that nobody fetched is kept."""
ROW_TTL_S = 7 * 24 * 3600.0
SWEEP_ROWS = 1000
TRACED_CHARACTERS = 200
"""Of an error, in a trace."""
UNNUMBERED = ":between"
"""Ends the id of a request that has no number of its client's; its row stays as long as its run."""


def result_name(request_id: str) -> str:
    """The name under which bytes are reserved for the result of a request."""
    return f"{request_id} result"


class SeqConflictError(InvalidInputError):
    """A seq_id was used before for another request."""

    code = "seq_conflict"


class Journal(StoredNoun):
    def __init__(
        self,
        reader: Engine,
        writer: GroupWriter,
        result_ttl_s: float = RESULT_TTL_S,
        row_ttl_s: float = ROW_TTL_S,
    ) -> None:
        super().__init__(reader, writer)
        self._result_ttl_s = result_ttl_s
        self._row_ttl_s = row_ttl_s

    def append(self, op: NewRow) -> Future[bool]:
        """Record a request; when the future is done the row is durable. Never blocks.

        False: the same request was there before.

        Raises:
            SeqConflictError: (In the future.) The seq_id was used for a different body or kind.
        """
        # Rows that arrive together are one statement and share one fsync.
        return self._writer.bulk(self._append_all, op)

    def note(self, notes: Sequence[Ended | Fetched]) -> Future[list[BaseException | None]]:
        """Record what became of requests, all in one transaction. Never blocks.

        The future says of each note what kept it from being written: None when nothing did.
        """
        return self._writer.batch(self._write_notes, notes)

    def get(self, request_id: str) -> JournalOutline | None:
        """A row without what is large in it: hundreds may ask for one at a time."""
        return self._first(JournalOutline, _OUTLINE.where(_table.c.request_id == request_id))

    def find(self, model_id: str, seq_id: int) -> JournalOutline | None:
        """As `get`, by its number."""
        same = (_table.c.model_id == model_id, _table.c.seq_id == seq_id)
        return self._first(JournalOutline, _OUTLINE.where(*same))

    def result(self, request_id: str) -> bytes | None:
        """The result of a request; None where there is none, or none any more."""
        return self._one(_table.c.result, request_id)

    def body(self, request_id: str) -> bytes | None:
        """The body of a request; None where there is none, or none any more."""
        return self._one(_table.c.body, request_id)

    def _one(self, column: Column[bytes], request_id: str) -> bytes | None:
        values = self._scalars(select(column).where(_table.c.request_id == request_id))
        return values[0] if values else None

    def since(self, model_id: str, after_seq_id: int) -> list[JournalRow]:
        """Everything after a snapshot, in order: what a recovery runs again or still has to run."""
        newer = (_table.c.model_id == model_id, _table.c.seq_id > after_seq_id)
        return self._all(JournalRow, select(_table).where(*newer).order_by(_table.c.seq_id))

    def unnumbered(self, model_id: str) -> list[int]:
        """The places of the requests of a model that have no number of their client's, in order."""
        of_model = (_table.c.model_id == model_id, _table.c.request_id.endswith(UNNUMBERED))
        return self._scalars(select(_table.c.seq_id).where(*of_model).order_by(_table.c.seq_id))

    def unfinished_models(self) -> list[str]:
        """Models with an accepted op that has no end yet."""
        query = select(_table.c.model_id).distinct().where(_table.c.finished_at.is_(None))
        return self._scalars(query)

    def timings(self, model_ids: Sequence[str], limit: int) -> list[JournalRow]:
        """The newest rows, without body and result and with the beginning of an error, for traces.

        A text of a caller's may be in an error, and tens of thousands of rows are in memory.
        """
        slim = [c for c in _table.c if c.name not in ("body", "result", "error")]
        left_out = (null().label("body"), null().label("result"))
        error = func.substr(_table.c.error, 1, TRACED_CHARACTERS).label("error")
        query = select(*slim, *left_out, error).where(_table.c.model_id.in_(model_ids))
        return self._all(JournalRow, query.order_by(_table.c.accepted_at.desc()).limit(limit))

    def release_bodies(
        self, model_id: str, through_seq_id: int, after_seq_id: int = -1
    ) -> Future[None]:
        """Drop bodies up to a snapshot that is durable. Never blocks.

        Args:
            after_seq_id: The snapshot before; rows up to it were released then.
        """
        covered = (
            _table.c.model_id == model_id,
            _table.c.seq_id <= through_seq_id,
            _table.c.seq_id > after_seq_id,  # else it reads every row of a long run
            _table.c.body.is_not(None),
        )

        def write(connection: Connection) -> None:
            self._stored.subtract(connection, "requests", *covered)
            connection.execute(update(_table).where(*covered).values(body=None))

        return self._writer.submit(write)

    def replace_body(self, request_id: str, body: bytes) -> Future[None]:
        """Keep another body of a request, which says what it said and more. Never blocks."""
        row = (_table.c.request_id == request_id, _table.c.body.is_not(None))

        def write(connection: Connection) -> None:
            sizes = select(_table.c.user_id, func.length(_table.c.body)).where(*row)
            for user_id, before in connection.execute(sizes):
                self._stored.add(user_id, "requests", len(body) - int(before or 0))
            connection.execute(update(_table).where(*row).values(body=body))

        return self._writer.submit(write)

    def body_bytes(self, model_id: str, through_seq_id: int) -> int:
        """Bytes that `release_bodies` would drop."""
        covered = (_table.c.model_id == model_id, _table.c.seq_id <= through_seq_id)
        query = select(func.sum(func.length(_table.c.body)))
        return int(self._scalars(query.where(*covered, _table.c.body.is_not(None)))[0] or 0)

    def drop_results(self, model_id: str) -> None:
        """Drop the results of a run, fetched or not. Blocks."""
        kept = (_table.c.model_id == model_id, _table.c.result.is_not(None))
        self._sweep(_some(*kept), update(_table).values(result=None, drop_result_at=None))

    def drop_run(self, model_id: str) -> None:
        """Drop all rows of a run, which nobody can train on any more. Blocks.

        In small transactions, as `sweep`: on a full disk there is no room for a large one.
        """
        self._sweep(
            _some(_table.c.model_id == model_id),
            _table.delete(),
            dropped=("requests", "results"),
        )

    def sweep(self, now: float | None = None) -> None:
        """Drop results and rows whose time has come. Call it every minute or so; it blocks.

        Works in small transactions, so that requests never wait for more than one of them.
        """
        now = time.time() if now is None else now
        # Results first: a row without one is small, and is kept for days so that repeats find it.
        ripe = _some(_table.c.drop_result_at < now)
        self._sweep(ripe, update(_table).values(result=None, drop_result_at=None))
        # A row that has its body is one that no snapshot covers: a replay needs it, however old.
        old = _some(
            _table.c.finished_at < now - self._row_ttl_s,
            _table.c.body.is_(None),
            # By their places the numbers of all later requests are understood.
            ~_table.c.request_id.endswith(UNNUMBERED),
        )
        self._sweep(old, _table.delete())

    def _sweep(
        self,
        chosen: Any,
        statement: Any,
        dropped: Sequence[StoredKindName] = ("results",),
    ) -> None:
        """Run a statement that drops bytes on the rows of a query, until it finds no more."""

        def write(connection: Connection) -> int:
            ids = list(connection.execute(chosen).scalars())
            of_them = _table.c.request_id.in_(ids)
            for kind in dropped:
                self._stored.subtract(connection, kind, of_them)
            connection.execute(statement.where(of_them))
            return len(ids)

        while self._writer.run(write) == SWEEP_ROWS:
            pass

    def _write_notes(self, connection: Connection, notes: Sequence[Ended | Fetched]) -> None:
        ends = [note for note in notes if isinstance(note, Ended)]
        drops = {n.request_id: n.drop_result_at for n in notes if isinstance(n, Fetched)}
        if ends:
            # Most results are fetched before their end is written: then one statement says both.
            ttl_s = self._result_ttl_s
            rows = [_end_row(e, drops.get(e.request_id, e.finished_at + ttl_s)) for e in ends]
            self._count_results(connection, ends)
            connection.execute(_END, rows)
            for end in ends:
                drops.pop(end.request_id, None)
        if counts := [count for end in ends for count in end.usage]:
            # In the transaction of the ends: a crash must not keep the one without the other.
            Usage.write(connection, counts)
        if drops:
            connection.execute(_FETCHED, [{"id": name, "at": at} for name, at in drops.items()])

    def _count_results(self, connection: Connection, ends: Sequence[Ended]) -> None:
        """Count results that are about to be written, instead of those that they replace."""
        sizes = {end.request_id: len(end.result or b"") for end in ends}
        rows = connection.execute(_RESULT_SIZES, {"ids": list(sizes)})
        before = {request_id: (user_id, size or 0) for request_id, user_id, size in rows}
        for request_id, size in sizes.items():
            # The row of a run that was deleted is gone; what was reserved for it ends all the same.
            user_id, old = before.get(request_id, ("", size))
            name = result_name(request_id)
            self._stored.add(user_id, "results", size - old, name=name)

    def _append_all(self, connection: Connection, ops: Sequence[NewRow]) -> list[bool | Exception]:
        rows = [_row(op) for op in ops]
        # Nearly always all are new, and one statement says so; only else is each looked up.
        new = _insert(connection, rows)
        sizes = {row["request_id"]: len(row["body"] or b"") for row in rows}
        owners = {op.request_id: op.user_id for op in ops}
        for request_id in new:
            self._stored.add(owners[request_id], "requests", sizes[request_id], name=request_id)
        return [
            True if op.request_id in new else _appended(connection, op, row)
            for op, row in zip(ops, rows, strict=True)
        ]


def _some(*conditions: Any) -> Any:
    return select(_table.c.request_id).where(*conditions).limit(SWEEP_ROWS)


def body_hash(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + b"\0" + body, digest_size=16).digest()


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> set[str]:
    """Insert what is not there yet; gives the request ids that are new."""
    statement = insert_or_ignore(connection, _table)
    if connection.dialect.name == "postgresql":
        # With RETURNING many rows travel in one statement: three times as fast as one by one.
        return set(connection.execute(statement.returning(_table.c.request_id), rows).scalars())
    # As plain text: `begin_nested` takes four times as long as the insert of a row.
    connection.exec_driver_sql("SAVEPOINT rows")
    are_new = connection.execute(statement, rows).rowcount == len(rows)
    connection.exec_driver_sql("RELEASE rows" if are_new else "ROLLBACK TO rows")
    if are_new:
        return {row["request_id"] for row in rows}
    # Some were there: one by one says which.
    # As lists of one: of a single row SQLAlchemy does not keep the count.
    return {row["request_id"] for row in rows if connection.execute(statement, [row]).rowcount}


def _appended(connection: Connection, op: NewRow, row: dict[str, Any]) -> bool | Exception:
    """Some rows of a group were there before: look each of them up."""
    columns = (_table.c.request_id, _table.c.body_hash)
    same = (_table.c.model_id == op.model_id, _table.c.seq_id == op.seq_id)
    first = connection.execute(select(*columns).where(*same)).first()
    # Given, not raised: the other rows of the group are new, and their clients wait.
    if first is None:
        return SeqConflictError(f"Request id {op.request_id!r} is in use for another seq_id.")
    if bytes(first.body_hash) != row["body_hash"]:
        return SeqConflictError(
            f"seq_id {op.seq_id} of {op.model_id!r} was used before for another request. "
            "Every request needs a new number; only an exact repeat may reuse one."
        )
    return bool(first.request_id == op.request_id)


def _row(op: NewRow) -> dict[str, Any]:
    at = op.accepted_at or time.time()
    refused = op.refused is not None
    return {
        "model_id": op.model_id,
        "seq_id": op.seq_id,
        "kind": op.kind,
        "request_id": op.request_id,
        "user_id": op.user_id,
        # A refused request is never run again, but has used its number (contract 5.1): the hash
        # stays, so that a repeat is told from another request.
        "body": None if refused else op.body,
        "body_hash": op.body_hash or body_hash(op.kind, op.body),
        "state": "refused" if refused else "accepted",
        "accepted_at": at,
        "finished_at": at if refused else None,
        "error": op.refused,
        "error_category": "user" if refused else None,
        "key_id": op.key_id,
    }


_END = (
    update(_table)
    .where(_table.c.request_id == bindparam("id"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in (
                "state",
                "started_at",
                "finished_at",
                "result",
                "result_type",
                "error",
                "error_category",
                "drop_result_at",
            )
        }
    )
)


def _end_row(end: Ended, drop_result_at: float) -> dict[str, Any]:
    return {
        "id": end.request_id,
        "new_state": "done" if end.error is None else "failed",
        "new_started_at": end.started_at,
        "new_finished_at": end.finished_at,
        "new_result": end.result,
        "new_result_type": end.result_type,
        "new_error": end.error,
        "new_error_category": end.error_category,
        "new_drop_result_at": drop_result_at,
    }


_RESULT_SIZES = select(_table.c.request_id, _table.c.user_id, func.length(_table.c.result)).where(
    _table.c.request_id.in_(bindparam("ids", expanding=True))
)
_FETCHED = (
    update(_table)
    .where(_table.c.request_id == bindparam("id"))
    .values(drop_result_at=bindparam("at"))
)
