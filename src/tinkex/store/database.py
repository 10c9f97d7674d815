"""Open a database by URL and bring its tables up to date.

A new database is made from the tables of `schema` and marked with the newest revision; one that
exists already goes through the revisions of `migrations/versions` that it has not seen.

SQLite runs in WAL mode: readers never wait for the writer. Two engines over one database: `writer`
opens every transaction with BEGIN IMMEDIATE, so that it never meets a lock half-way; `reader` is a
pool for everything else. PostgreSQL needs no such care and shares one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError

from tinkex.errors import ConfigError
from tinkex.store.schema import metadata

MIGRATIONS = Path(__file__).parent / "migrations"
FIRST_REVISION = "0010"
"""The oldest revision that is opened; earlier ones were never part of a release."""
NEWEST_REVISION = "0014"
"""What a new database is marked with: the last of `migrations/versions`."""
# As Alembic makes it, which is imported only where a database has revisions to go through.
_MARK = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
BUSY_TIMEOUT_MS = 10_000
CACHE_KB = 4000
"""Pages of the database that each connection keeps; the system's cache has the others."""


@dataclass(frozen=True, slots=True)
class Database:
    reader: Engine
    writer: Engine

    def dispose(self) -> None:
        self.reader.dispose()
        self.writer.dispose()


def sqlite_file(data_dir: Path) -> Path:
    return data_dir / "tinkex.db"


def sqlite_url(data_dir: Path) -> str:
    return f"sqlite:///{sqlite_file(data_dir)}"


def open_database(url: str, *, full_sync: bool = True) -> Database:
    """Connect and migrate. `full_sync` False trades the last moments before a power cut for speed.

    Raises:
        ConfigError: The URL is not one of a SQLite file or a PostgreSQL database, or what is there
            cannot be used.
    """
    url = _with_driver(url)
    options: dict[str, Any] = {"json_serializer": _dumps, "json_deserializer": orjson.loads}
    if url.startswith("postgresql"):
        engine = create_engine(url, pool_size=8, pool_pre_ping=True, **options)
        database = Database(engine, engine)
    else:
        # The connection used last is used next: its pages are warm, and the others stay small.
        reader = create_engine(url, pool_size=8, pool_use_lifo=True, **options)
        writer = create_engine(url, pool_size=1, **options)
        _prepare_sqlite(reader, "BEGIN", full_sync)
        _prepare_sqlite(writer, "BEGIN IMMEDIATE", full_sync)
        database = Database(reader, writer)
    try:
        migrate(database.writer)
    except ConfigError:
        database.dispose()
        raise
    except DBAPIError as exc:
        database.dispose()
        raise _unusable(database.writer, exc) from exc
    return database


def _unusable(engine: Engine, exc: DBAPIError) -> Exception:
    """Why a database cannot be used, in words; other failures stay as they are."""
    shown, cause = engine.url.render_as_string(), str(exc.orig or exc)
    if any(sign in cause for sign in ("not a database", "malformed", "disk image")):
        return ConfigError(
            f"The database {shown} is damaged ({cause}). Restore it from a backup "
            "(`tinkex admin restore`); the checkpoints beside it are untouched."
        )
    if "unable to open" in cause or "readonly" in cause:
        return ConfigError(f"The database {shown} cannot be opened ({cause}). Check its folder.")
    return exc


def migrate(engine: Engine) -> None:
    """Make the tables of a new database, or bring those of an existing one up to date."""
    with engine.begin() as connection:
        revision = _revision(connection)
        if revision is None:
            # In one transaction with the mark: after a crash between the two a later Tinkex would
            # find tables without a revision, and mark these older ones as its newest.
            metadata.create_all(connection)
            _MARK.create(connection, checkfirst=True)
            connection.execute(_MARK.insert().values(version_num=NEWEST_REVISION))
            return
        if revision < FIRST_REVISION:  # revisions are numbers of four digits
            raise ConfigError(
                f"The database {engine.url.render_as_string()} has revision {revision}, from "
                f"before the first release; this Tinkex opens {FIRST_REVISION} and later. Start a "
                "server of commit e232661 on it once, which brings it up to date, or give this "
                "server a --data-dir of its own."
            )
        if revision != NEWEST_REVISION:
            _upgrade(connection)


def _revision(connection: Connection) -> str | None:
    """The mark of a database; None for a new one."""
    if not inspect(connection).has_table(_MARK.name):
        return None
    revision: str | None = connection.scalar(select(_MARK.c.version_num))
    return revision


def _upgrade(connection: Connection) -> None:
    """Go through the revisions that a database has not seen."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, NEWEST_REVISION)
    except CommandError as exc:
        raise ConfigError(
            f"The database {connection.engine.url.render_as_string()} was written by a newer "
            f"Tinkex than this one ({exc}). Update Tinkex, or give this server a --data-dir of its "
            "own."
        ) from exc


def _with_driver(url: str) -> str:
    try:
        parsed = make_url(url)
    except ArgumentError as exc:
        raise ConfigError(
            f"--database {url!r} is not a URL. Use sqlite:////path/to/file.db or "
            "postgresql://user:password@host/name."
        ) from exc
    name = parsed.get_backend_name()
    if name == "postgresql":
        return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    if name == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return url
    raise ConfigError(
        f"--database names {name!r}. Tinkex stores in a SQLite file (sqlite:////path/to/file.db) "
        "or in PostgreSQL (postgresql://user:password@host/name)."
    )


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()


def _prepare_sqlite(engine: Engine, begin: str, full_sync: bool) -> None:
    def connect(raw: Any, _record: Any) -> None:
        raw.isolation_level = None  # We say BEGIN ourselves; the driver's own is too late for DDL.
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={'FULL' if full_sync else 'NORMAL'}",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "temp_store=MEMORY",
            f"cache_size=-{CACHE_KB}",
        ):
            raw.execute(f"PRAGMA {pragma}")

    def do_begin(pooled: Any) -> None:
        pooled.dbapi_connection.execute(begin)

    event.listen(engine, "connect", connect)
    # The dialect's own does nothing; as an event this statement would cost four times as much.
    engine.dialect.do_begin = do_begin  # type: ignore[assignment, method-assign]
