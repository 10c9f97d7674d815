"""Training runs and the snapshots their recovery starts from.

The time of the last request is gathered in memory and written about once a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    String,
    and_,
    cast,
    false,
    func,
    or_,
    select,
    true,
    update,
)

from tinkex.store import schema
from tinkex.store.folders import note_deleted
from tinkex.store.noun import LatestMoments, StoredNoun, record, row_of
from tinkex.store.records import Model, Session, Snapshot
from tinkex.store.upsert import insert_or_ignore, insert_or_replace
from tinkex.store.writer import GroupWriter

_table = schema.models
_snapshots = schema.snapshots
_SEARCHED = (_table.c.model_id, _table.c.base_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs, and in which order; what is empty does not matter."""

    search: str = ""
    """A part of a run's id, of its base model, or of the name its session has."""
    tag: str = ""
    base_model: str = ""
    status: str = ""
    """`running`, `idle`, `finished` or `lost`."""
    busy: tuple[str, ...] = ()
    """The runs that have something to do now."""
    order: str = "newest"
    """`newest`, `oldest` or `active`."""

    def conditions(self) -> list[ColumnElement[bool]]:
        conditions = []
        sessions = schema.sessions
        if self.search:
            named = sessions.c.display_name.icontains(self.search, autoescape=True)
            conditions.append(
                or_(
                    *(column.icontains(self.search, autoescape=True) for column in _SEARCHED),
                    _of_sessions(named),
                )
            )
        if self.tag:
            # The list is stored as JSON text; quotes around make it the whole tag.
            text = orjson.dumps(self.tag).decode()
            conditions.append(
                _of_sessions(cast(sessions.c.tags, String).contains(text, autoescape=True))
            )
        if self.base_model:
            conditions.append(_table.c.base_model == self.base_model)
        if self.status:
            conditions.append(self._status())
        return conditions

    def _status(self) -> ColumnElement[bool]:
        is_busy = _table.c.model_id.in_(self.busy)
        is_over = or_(
            _table.c.unloaded.is_(True), _of_sessions(schema.sessions.c.status_type != "active")
        )
        is_lost = _table.c.corrupted.is_(True)
        return {
            "running": and_(is_busy, ~is_lost),
            "lost": is_lost,
            "finished": and_(is_over, ~is_busy, ~is_lost),
            "idle": and_(~is_over, ~is_busy, ~is_lost),
        }.get(self.status, false())

    def ordering(self) -> list[ColumnElement[Any]]:
        if self.order == "oldest":
            return [_table.c.created_at.asc(), _table.c.model_id.asc()]
        moment = _table.c.last_request_time if self.order == "active" else _table.c.created_at
        return [moment.desc(), _table.c.model_id.desc()]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredRuns:
    models: list[Model]
    """One page of them."""
    sessions: dict[str, Session]
    total: int
    base_models: list[str]
    """What the user's runs, fitting or not, are trained on."""


class Models(StoredNoun):
    def __init__(self, reader: Engine, writer: GroupWriter) -> None:
        super().__init__(reader, writer)
        self._touched = LatestMoments(writer, _table.c.model_id, _table.c.last_request_time)

    def create(self, model: Model) -> None:
        """Add a run. One that is there already stays as it is: a repeat changes nothing."""
        row = row_of(model)
        self._writer.run(lambda c: c.execute(insert_or_ignore(c, _table), row))

    def count_loaded(self, user_ids: Sequence[str]) -> dict[str, int]:
        """Models of each user whose state is kept."""
        query = select(_table.c.user_id, func.count()).where(_table.c.user_id.in_(user_ids))
        query = query.where(_table.c.unloaded.is_(False)).group_by(_table.c.user_id)
        return {row[0]: row[1] for row in self._rows(query)}

    def get(self, model_id: str) -> Model | None:
        return self._first(Model, select(_table).where(_table.c.model_id == model_id))

    def touch(self, model_id: str, at: float | None = None) -> None:
        """Note a request. Returns at once; the row follows within about a second."""
        self._touched.note(model_id, at)

    def mark(
        self, model_id: str, *, corrupted: bool | None = None, unloaded: bool | None = None
    ) -> None:
        flags = {"corrupted": corrupted, "unloaded": unloaded}
        self._set(model_id, {name: flag for name, flag in flags.items() if flag is not None})

    def set_lora(
        self, model_id: str, lora: dict[str, Any], optimizer_config: dict[str, Any]
    ) -> None:
        """Note the shape and optimizer of the checkpoint that was loaded into the run."""
        self._set(model_id, {"lora": lora, "optimizer_config": optimizer_config})

    def set_base(self, model_id: str, fingerprint: str) -> None:
        """On which base weights the run was made."""
        self._set(model_id, {"base_fingerprint": fingerprint})

    def of_session(self, session_id: str) -> list[Model]:
        query = select(_table).where(_table.c.session_id == session_id)
        return self._all(Model, query.order_by(_table.c.model_seq_id))

    def page(
        self,
        user_id: str | None,
        limit: int,
        offset: int,
        *,
        project_id: str | None = None,
        with_public: bool = False,
    ) -> tuple[list[Model], int]:
        """A user's runs, or everybody's, newest first, and how many there are in all.

        `with_public` adds other users' runs that have a public checkpoint.
        """
        mine = true() if user_id is None else _table.c.user_id == user_id
        where = [or_(mine, _table.c.model_id.in_(_public_runs())) if with_public else mine]
        if project_id is not None:
            where.append(_of_sessions(schema.sessions.c.project_id == project_id))
        order = (_table.c.created_at.desc(), _table.c.model_id.desc())
        return self._page(Model, _table, where, order, limit, offset)

    def filtered(
        self, user_id: str | None, wanted: RunFilter, limit: int, offset: int
    ) -> FilteredRuns:
        """The runs of a user that fit, with their sessions; of all users where it is None."""
        owned = [_table.c.user_id == user_id] if user_id is not None else []
        where = [*owned, *wanted.conditions()]
        # A search looks at every row, so it counts in the same scan; an index counts all rows.
        counted = [func.count().over().label("total")] if wanted.search else []
        query = select(_table, *counted).where(*where).order_by(*wanted.ordering())
        count = select(func.count()).select_from(_table).where(*where)
        names = select(_table.c.base_model).where(*owned).distinct().limit(200)
        with self._reader.connect() as connection:
            found = connection.execute(query.limit(limit).offset(offset)).mappings().all()
            models = [record(Model, row) for row in found]
            total = int(found[0]["total"]) if found and counted else offset + len(models)
            if (len(models) == limit and not counted) or (offset and not models):
                total = int(connection.execute(count).scalar_one())
            of_page = schema.sessions.c.session_id.in_({model.session_id for model in models})
            rows = connection.execute(select(schema.sessions).where(of_page)).mappings()
            return FilteredRuns(
                models=models,
                sessions={row["session_id"]: record(Session, row) for row in rows},
                total=total,
                base_models=sorted(connection.execute(names).scalars()),
            )

    def has_public(self, model_id: str) -> bool:
        """Whether a run has a public checkpoint that has not expired."""
        query = _public_runs().where(schema.checkpoints.c.model_id == model_id).limit(1)
        return bool(self._scalars(query))

    def silent_since(self, moment: float) -> list[str]:
        """Models that hold state and were not used since, nor their session seen; oldest first."""
        return self._scalars(_unused_since(moment))

    def closed_since(self, moment: float) -> list[str]:
        """Models that hold state, whose session its client ended, and not used since."""
        return self._scalars(_unused_since(moment).where(schema.sessions.c.status_type != "active"))

    def save_snapshot(self, snapshot: Snapshot) -> Snapshot | None:
        """Make this the state to recover from; gives the one before, whose folder may now go."""
        query = select(_snapshots).where(_snapshots.c.model_id == snapshot.model_id)

        def write(connection: Connection) -> Snapshot | None:
            before = connection.execute(query).mappings().first()
            connection.execute(insert_or_replace(connection, _snapshots), row_of(snapshot))
            if before and before["folder"] != snapshot.folder:
                note_deleted(connection, before["folder"])
            return Snapshot(**before) if before else None

        return self._writer.run(write)

    def get_snapshot(self, model_id: str) -> Snapshot | None:
        return self._first(Snapshot, select(_snapshots).where(_snapshots.c.model_id == model_id))

    def drop_snapshot(self, model_id: str) -> None:
        of_model = _snapshots.c.model_id == model_id

        def write(connection: Connection) -> None:
            for folder in connection.execute(select(_snapshots.c.folder).where(of_model)).scalars():
                note_deleted(connection, folder)
            connection.execute(_snapshots.delete().where(of_model))

        self._writer.run(write)

    def _set(self, model_id: str, values: dict[str, Any]) -> None:
        self._write(update(_table).where(_table.c.model_id == model_id).values(**values))


def _unused_since(moment: float) -> Any:
    """The ids of models with state, neither they nor their session used since; oldest first."""
    sessions = schema.sessions
    return (
        select(_table.c.model_id)
        .join(sessions, sessions.c.session_id == _table.c.session_id)
        .where(_table.c.unloaded.is_(False), _table.c.last_request_time < moment)
        .where(sessions.c.last_heartbeat < moment)
        .order_by(_table.c.last_request_time)
    )


def _of_sessions(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    sessions = schema.sessions
    return _table.c.session_id.in_(select(sessions.c.session_id).where(condition))


def _public_runs() -> Any:
    marks = schema.checkpoints
    alive = or_(marks.c.expires_at.is_(None), marks.c.expires_at > time.time())
    return select(marks.c.model_id).where(marks.c.public.is_(True), alive)
