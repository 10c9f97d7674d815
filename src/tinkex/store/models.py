"""Training runs and the snapshots their recovery starts from.

The time of the last request is gathered in memory and written about once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
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
_OLDEST = (_table.c.created_at.asc(), _table.c.model_id.asc())
_LAST = _table.c.continued_by.is_(None)
"""Only the last segment of a run that was resumed is listed."""
_SEARCHED = (_table.c.model_id, _table.c.base_model, _table.c.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs, and in which order; what is empty does not matter."""

    search: str = ""
    """A part of a run's id, of its name, of its base model, or of the name its session has."""
    tag: str = ""
    base_model: str = ""
    project: str = ""
    """The project of its session."""
    status: str = ""
    """`running`, `idle`, `finished`, `stopped`, `failed` or `lost`."""
    silent_since: float = 0.0
    """A program that was not heard of since then has left: its run is finished."""
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
            own = cast(_table.c.tags, String)
            inherited = _of_sessions(cast(sessions.c.tags, String).contains(text, autoescape=True))
            # A run without tags of its own stores NULL, or the JSON word for it.
            has_none = or_(own.is_(None), own == "null")
            conditions.append(or_(own.contains(text, autoescape=True), and_(has_none, inherited)))
        if self.base_model:
            conditions.append(_table.c.base_model == self.base_model)
        if self.project:
            conditions.append(_of_sessions(sessions.c.project_id == self.project))
        if self.status:
            conditions.append(self._status())
        return conditions

    def _status(self) -> ColumnElement[bool]:
        is_busy = _table.c.model_id.in_(self.busy)
        sessions = schema.sessions
        is_silent = and_(
            _table.c.last_request_time <= self.silent_since,
            _of_sessions(sessions.c.last_heartbeat <= self.silent_since),
        )
        is_over = or_(
            _table.c.unloaded.is_(True), _of_sessions(sessions.c.status_type != "active"), is_silent
        )
        is_lost = _table.c.corrupted.is_(True)
        ended = cast(sessions.c.status, String)
        is_stopped = _of_sessions(
            or_(sessions.c.status_type == "cancelled", ended.contains('"interrupted"'))
        )
        is_failed = _of_sessions(ended.contains('"errored"'))
        return {
            "running": and_(is_busy, ~is_lost),
            "lost": is_lost,
            "stopped": and_(is_stopped, ~is_busy, ~is_lost),
            "failed": and_(is_failed, ~is_busy, ~is_lost),
            "finished": and_(is_over, ~is_stopped, ~is_failed, ~is_busy, ~is_lost),
            "idle": and_(~is_over, ~is_busy, ~is_lost),
        }.get(self.status, false())

    def ordering(self) -> list[ColumnElement[Any]]:
        if self.order == "oldest":
            return list(_OLDEST)
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
    projects: list[str]
    """Projects that the user's sessions belong to."""


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

    def revise(self, model_id: str, change: Callable[[Model], dict[str, Any]]) -> Model:
        """Set columns of a run to what `change` makes of the row as it is; gives the new one.

        No other write comes between, so `change` may add to what is there. What it raises is
        raised here, and nothing is written.

        Raises:
            LookupError: There is no such run.
        """

        def write(connection: Connection) -> Model:
            model = _read(connection, model_id)
            return _revised(connection, model, change(model))

        return self._writer.run(write)

    def continue_run(self, model_id: str, before_id: str, values: dict[str, Any]) -> Model:
        """Make a run the last segment of the run that `before_id` belongs to.

        What the user called and noted of the run so far goes over, where the new segment has
        nothing of its own. `values` are further columns.
        """

        def write(connection: Connection) -> Model:
            model, before = _read(connection, model_id), _read(connection, before_id)
            first = before.first_segment_id
            last = _read(connection, before.continued_by or before_id)
            inherited = {
                "name": model.name or last.name,
                "note": model.note or last.note,
                "tags": model.tags or last.tags,
                "settings": {**(last.settings or {}), **(model.settings or {})} or None,
            }
            joined = {"continues": before_id, "first_run_id": first, "continued_by": None}
            others = update(_table).where(_of_run(first), _table.c.model_id != model_id)
            connection.execute(others.values(continued_by=model_id))
            return _revised(connection, model, {**inherited, **joined, **values})

        return self._writer.run(write)

    def find(self, user_id: str, text: str) -> Model | None:
        """A user's own run by its id, else by its name."""
        model = self.get(text)
        return model if model and model.user_id == user_id else self.named(user_id, text)

    def named(self, user_id: str, name: str) -> Model | None:
        """A user's newest run of a name: its own, or, where it has none, that of its session."""
        of_session = _of_sessions(schema.sessions.c.display_name == name)
        called = or_(_table.c.name == name, and_(_table.c.name.is_(None), of_session))
        query = select(_table).where(_table.c.user_id == user_id, _LAST, called)
        return self._first(Model, query.order_by(_table.c.created_at.desc()).limit(1))

    def names(self, user_id: str, limit: int) -> list[str]:
        """The names of a user's newest runs, each once."""
        sessions = schema.sessions
        name = func.coalesce(_table.c.name, sessions.c.display_name)
        query = select(name).join(sessions, sessions.c.session_id == _table.c.session_id)
        query = query.where(_table.c.user_id == user_id, _LAST, name.is_not(None))
        names = self._scalars(query.order_by(_table.c.created_at.desc()).limit(limit))
        return list(dict.fromkeys(names))

    def segments(self, model: Model) -> list[Model]:
        """All segments of the run that a model belongs to, the first one first."""
        return self._all(Model, segments_of(model))

    def later_segments(self, first_run_id: str) -> list[str]:
        """The ids of all segments of a run but the first one."""
        query = select(_table.c.model_id).where(_table.c.first_run_id == first_run_id)
        return list(self._scalars(query))

    def segments_of_runs(self, first_run_ids: Sequence[str]) -> dict[str, list[Model]]:
        """All segments of some runs, by the ids of their first ones, the first one first."""
        of_runs = or_(
            _table.c.model_id.in_(first_run_ids), _table.c.first_run_id.in_(first_run_ids)
        )
        segments: dict[str, list[Model]] = {}
        for model in self._all(Model, select(_table).where(of_runs).order_by(*_OLDEST)):
            segments.setdefault(model.first_segment_id, []).append(model)
        return segments

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
        where = [or_(mine, _table.c.model_id.in_(_public_runs())) if with_public else mine, _LAST]
        if project_id is not None:
            where.append(_of_sessions(schema.sessions.c.project_id == project_id))
        order = (_table.c.created_at.desc(), _table.c.model_id.desc())
        return self._page(Model, _table, where, order, limit, offset)

    def filtered(
        self, user_id: str | None, wanted: RunFilter, limit: int, offset: int
    ) -> FilteredRuns:
        """The runs of a user that fit, with their sessions; of all users where it is None."""
        owned = [_table.c.user_id == user_id] if user_id is not None else []
        where = [*owned, _LAST, *wanted.conditions()]
        # A search looks at every row, so it counts in the same scan; an index counts all rows.
        counted = [func.count().over().label("total")] if wanted.search else []
        query = select(_table, *counted).where(*where).order_by(*wanted.ordering())
        count = select(func.count()).select_from(_table).where(*where)
        names = select(_table.c.base_model).where(*owned).distinct().limit(200)
        session = schema.sessions.c
        projects = select(session.project_id).where(session.project_id.is_not(None)).distinct()
        if user_id is not None:
            projects = projects.where(session.user_id == user_id)
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
                projects=sorted(connection.execute(projects.limit(200)).scalars()),
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
            size = snapshot.size_bytes - (before["size_bytes"] if before else 0)
            owner = connection.execute(_owner(snapshot.model_id)).scalar_one_or_none()
            if owner is not None:
                self._stored.add(owner, "state", size, name=snapshot.folder)
            return Snapshot(**before) if before else None

        return self._writer.run(write)

    def get_snapshot(self, model_id: str) -> Snapshot | None:
        return self._first(Snapshot, select(_snapshots).where(_snapshots.c.model_id == model_id))

    def drop_snapshot(self, model_id: str) -> None:
        of_model = _snapshots.c.model_id == model_id

        def write(connection: Connection) -> None:
            for gone in connection.execute(select(_snapshots).where(of_model)).mappings():
                note_deleted(connection, gone["folder"])
                owner = connection.execute(_owner(model_id)).scalar_one_or_none()
                if owner is not None:
                    self._stored.add(owner, "state", -gone["size_bytes"])
            connection.execute(_snapshots.delete().where(of_model))

        self._writer.run(write)

    def _set(self, model_id: str, values: dict[str, Any]) -> None:
        self._write(update(_table).where(_table.c.model_id == model_id).values(**values))


def segments_of(model: Model) -> Select[Any]:
    """The rows of all segments of the run that a model belongs to, the first one first."""
    return select(_table).where(_of_run(model.first_segment_id)).order_by(*_OLDEST)


def _of_run(first_segment_id: str) -> ColumnElement[bool]:
    return or_(_table.c.model_id == first_segment_id, _table.c.first_run_id == first_segment_id)


def _read(connection: Connection, model_id: str) -> Model:
    row = connection.execute(select(_table).where(_table.c.model_id == model_id)).mappings().first()
    if row is None:
        raise LookupError(f"there is no run {model_id!r}")
    return record(Model, row)


def _revised(connection: Connection, model: Model, values: dict[str, Any]) -> Model:
    if values:
        of_model = _table.c.model_id == model.model_id
        connection.execute(update(_table).where(of_model).values(**values))
    return replace(model, **values)


def _owner(model_id: str) -> Any:
    return select(_table.c.user_id).where(_table.c.model_id == model_id)


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
