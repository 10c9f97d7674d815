"""A database and a data folder belong together, by an id that both hold.

The folder keeps the id in `store.id`, the database in its table `meta`. Started with the one and
another other (a lost database, a wrong `--data-dir`), a server would list checkpoints that are not
there and find folders that nobody lists; it refuses instead, and touches nothing. Knows ids and
words, not checkpoints.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, func, select

from tinkex.errors import ConfigError
from tinkex.store import schema
from tinkex.store.upsert import insert_or_ignore

ID_FILE = "store.id"
_NAME = "store_id"


def bind(engine: Engine, data_dir: Path) -> str:
    """Make sure that the two belong together; gives their id. New ones are given one.

    Raises:
        ConfigError: They do not; the text names the way out.
    """
    in_folder, in_database = _folder_id(data_dir), database_id(engine)
    shown = engine.url.render_as_string()
    if in_folder is not None and in_folder != in_database:
        raise _foreign(data_dir, shown, in_folder, in_database)
    if in_folder is None and in_database is not None and (count := _num_folders(engine)):
        raise ConfigError(
            f"The database {shown} lists {count} folders of checkpoints and state, and {data_dir} "
            f"is not the data folder they are in: it has no {ID_FILE}. Give the --data-dir that "
            f"has it. If that folder is lost, write {in_database} into {data_dir / ID_FILE}: the "
            "server then starts, and what was in the folder does not load."
        )
    if in_folder is None:
        # The database first: ended in between, it lists no folder and takes this one again.
        in_folder = in_database or _give_id(engine)
        _write_id(data_dir / ID_FILE, in_folder)
    return in_folder


def refuse_lost_database(data_dir: Path, file: Path) -> None:
    """Refuse before an empty SQLite file takes the place of one that was lost.

    Raises:
        ConfigError: The folder has an id, and there is no database file.
    """
    in_folder = _folder_id(data_dir)
    if in_folder is not None and not file.exists():
        raise _foreign(data_dir, str(file), in_folder, None)


def database_id(engine: Engine) -> str | None:
    query = select(schema.meta.c.value).where(schema.meta.c.name == _NAME)
    with engine.begin() as connection:
        return connection.execute(query).scalar()


def _foreign(data_dir: Path, shown: str, in_folder: str, in_database: str | None) -> ConfigError:
    what = f"has the id {in_database}" if in_database else "is new or was lost"
    return ConfigError(
        f"The data folder {data_dir} belongs to a database with the id {in_folder}, and {shown} "
        f"{what}. Nothing was touched. Restore that database from a backup, name it with "
        "--database, or give this server a --data-dir of its own. To keep the folder with this "
        f"database all the same, delete {data_dir / ID_FILE}: what the database does not list then "
        f"moves to {data_dir / 'quarantine'}."
    )


def _folder_id(data_dir: Path) -> str | None:
    try:
        return (data_dir / ID_FILE).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def _write_id(file: Path, store_id: str) -> None:
    aside = file.with_suffix(".id.new")
    with aside.open("w", encoding="utf-8") as out:
        out.write(f"{store_id}\n")
        out.flush()
        os.fsync(out.fileno())
    # After the fsync: a power cut that left an empty file would part the folder from its database.
    aside.replace(file)


def _give_id(engine: Engine) -> str:
    row = {"name": _NAME, "value": uuid.uuid4().hex}
    with engine.begin() as connection:
        connection.execute(insert_or_ignore(connection, schema.meta), row)
    known_id = database_id(engine)
    assert known_id is not None
    return known_id


def _num_folders(engine: Engine) -> int:
    with engine.begin() as connection:
        return _count(connection, schema.checkpoints) + _count(connection, schema.snapshots)


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
