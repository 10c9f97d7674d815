"""Whole runs, over all tables: the rows that go when a run is deleted, or come from elsewhere.

A run is one model, or the segments of one that was resumed. Use and audit lines name runs and
neither go nor come with them: a bill stays a bill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, delete, insert, select, update

from tinkex.errors import InvalidInputError
from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.models import segments_of
from tinkex.store.noun import StoredNoun, record, row_of
from tinkex.store.records import Checkpoint, CheckpointName, Model, Session, StoredCurve
from tinkex.store.upsert import insert_or_ignore

_models, _marks = schema.models, schema.checkpoints
_samplers, _budgets = schema.sampling_sessions, schema.budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """The size of what was deleted with a run."""

    model_ids: tuple[str, ...]
    num_checkpoints: int
    freed_bytes: int
    """Of its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A run with all that can be moved to another store: no state, no requests, no use."""

    segments: list[Model]
    """The first one first; the last one stands for the run."""
    sessions: list[Session]
    checkpoints: list[Checkpoint]
    curves: list[StoredCurve]
    names: list[CheckpointName]
    """Short names of its checkpoints."""

    @property
    def model_id(self) -> str:
        return self.segments[-1].model_id

    @property
    def user_id(self) -> str:
        return self.segments[-1].user_id

    @property
    def name(self) -> str | None:
        """The name that its user gave it, else that of its session."""
        last = self.segments[-1]
        shown = [s.display_name for s in self.sessions if s.session_id == last.session_id]
        return last.name or next(iter(shown), None)

    def given_to(self, owner: str, checkpoints: list[Checkpoint]) -> WholeRun:
        """The same run, unloaded, with these folders; of `owner`, where that is not empty."""
        return WholeRun(
            segments=[replace(s, unloaded=True, user_id=owner or s.user_id) for s in self.segments],
            sessions=[replace(s, user_id=owner or s.user_id) for s in self.sessions],
            checkpoints=[replace(c, public=False, user_id=owner or c.user_id) for c in checkpoints],
            curves=self.curves,
            names=[replace(n, user_id=owner or n.user_id) for n in self.names],
        )


class Runs(StoredNoun):
    def all(self) -> Iterator[WholeRun]:
        """Every run, oldest first, read when its turn comes."""
        oldest = _models.c.created_at, _models.c.model_id
        last = select(_models).where(_models.c.continued_by.is_(None)).order_by(*oldest)
        for model in self._all(Model, last):
            yield self._whole(model)

    def _whole(self, model: Model) -> WholeRun:
        with self._reader.connect() as connection:
            segments = _segments(connection, model)
        ids = [segment.model_id for segment in segments]
        sessions, curves, names = schema.sessions, schema.curves, schema.checkpoint_names
        of_run = _marks.c.model_id.in_(ids)
        own = sessions.c.session_id.in_({segment.session_id for segment in segments})
        paths = select(_marks.c.path).where(of_run)
        return WholeRun(
            segments=segments,
            sessions=self._all(Session, select(sessions).where(own)),
            checkpoints=self._all(Checkpoint, select(_marks).where(of_run)),
            curves=self._all(StoredCurve, select(curves).where(curves.c.model_id.in_(ids))),
            names=self._all(CheckpointName, select(names).where(names.c.path.in_(paths))),
        )

    def add(self, run: WholeRun) -> list[str]:
        """Write the rows of a run, all at once; gives names of checkpoints that are in use here.

        Raises:
            IntegrityError: A segment or a checkpoint of it is here.
        """

        def write(connection: Connection) -> list[str]:
            for user_id in {run.user_id, *(named.user_id for named in run.names)}:
                user = {"user_id": user_id, "name": user_id, "email": "", "created_at": time.time()}
                connection.execute(insert_or_ignore(connection, schema.users), user)
            for session in run.sessions:  # several runs may be of one
                row = row_of(session) | {"status_type": session.status["type"]}
                connection.execute(insert_or_ignore(connection, schema.sessions), row)
            connection.execute(insert(_models), list(map(row_of, run.segments)))
            for checkpoint in run.checkpoints:
                connection.execute(insert(_marks), row_of(checkpoint))
                self._stored.add(checkpoint.user_id, "checkpoints", checkpoint.size_bytes)
            for curve in run.curves:
                row = row_of(curve) | {"updated_at": time.time()}
                connection.execute(insert(schema.curves), row)
            return [named.name for named in run.names if not _is_added(connection, named)]

        return self._writer.run(write)

    def check_deletable(self, model: Model) -> list[Model]:
        """The segments of the run that a model belongs to, if it may be deleted.

        Raises:
            InvalidInputError: It has a published checkpoint.
        """
        with self._reader.connect() as connection:
            return self._checked(connection, model)

    def delete(self, model: Model, segments: Sequence[Model]) -> DeletedRun:
        """Remove the rows of a run, all at once, and note its folders as deleted.

        The journal of its segments is dropped before, in small transactions (`Journal.drop_run`).

        Raises:
            InvalidInputError: It may no longer be deleted, or has other segments by now.
        """
        expected = {segment.model_id for segment in segments}

        def write(connection: Connection) -> DeletedRun:
            known = {segment.model_id for segment in self._checked(connection, model)}
            if known != expected:
                raise InvalidInputError("the run was resumed or deleted meanwhile; look again")
            ids = tuple(expected)
            checkpoints = self._drop_checkpoints(connection, ids)
            self._drop_samplers(connection, ids)
            connection.execute(delete(schema.curves).where(schema.curves.c.model_id.in_(ids)))
            of_run = (_budgets.c.scope == "run", _budgets.c.subject.in_(ids))
            connection.execute(delete(_budgets).where(*of_run))
            connection.execute(delete(_models).where(_models.c.model_id.in_(ids)))
            return DeletedRun(
                model_ids=tuple(segment.model_id for segment in segments),
                num_checkpoints=len(checkpoints),
                freed_bytes=sum(checkpoint.size_bytes for checkpoint in checkpoints),
            )

        return self._writer.run(write)

    def _checked(self, connection: Connection, model: Model) -> list[Model]:
        segments = _segments(connection, model)
        ids = [segment.model_id for segment in segments]
        public = select(_marks.c.path).where(_marks.c.model_id.in_(ids), _marks.c.public.is_(True))
        if (path := connection.execute(public.limit(1)).scalar_one_or_none()) is not None:
            raise InvalidInputError(
                f"{path} is published, and others may use it: take it back first with "
                f"`tinkex checkpoint unpublish {path}`, then delete the run"
            )
        return segments

    def _drop_checkpoints(self, connection: Connection, ids: Sequence[str]) -> list[Checkpoint]:
        of_run = _marks.c.model_id.in_(ids)
        rows = connection.execute(select(_marks).where(of_run)).mappings()
        checkpoints = [record(Checkpoint, row) for row in rows]
        for gone in checkpoints:
            note_deleted(connection, gone.folder)
            self._stored.add(gone.user_id, "checkpoints", -gone.size_bytes)
        # A name must not stand for nothing, nor for another run's checkpoint of the same path.
        named = schema.checkpoint_names.c.path.in_(select(_marks.c.path).where(of_run))
        connection.execute(delete(schema.checkpoint_names).where(named))
        connection.execute(delete(_marks).where(of_run))
        return checkpoints

    def _drop_samplers(self, connection: Connection, ids: Sequence[str]) -> None:
        """Let go of unnamed weights; the rows stay, and say that the weights are gone."""
        own = (_samplers.c.model_id.in_(ids), _samplers.c.folder.is_not(None))
        for gone in connection.execute(select(_samplers).where(*own)).mappings():
            note_deleted(connection, gone["folder"])
            self._stored.add(gone["user_id"], "samplers", -gone["size_bytes"])
        connection.execute(update(_samplers).where(*own).values(folder=None, size_bytes=0))


def _segments(connection: Connection, model: Model) -> list[Model]:
    return [record(Model, row) for row in connection.execute(segments_of(model)).mappings()]


def _is_added(connection: Connection, named: CheckpointName) -> bool:
    """Write a name unless its user has it already."""
    table = schema.checkpoint_names
    same = (table.c.user_id == named.user_id, table.c.name == named.name)
    if connection.execute(select(table.c.name).where(*same)).first() is not None:
        return False
    connection.execute(insert(table), row_of(named))
    return True
