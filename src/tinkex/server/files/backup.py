"""Copy a server's data folder while it runs, bring a copy back, and check what is in one.

A backup is one tar: the database as of one moment, then every folder that it lists, the id and the
secrets. Folders are never changed once they are listed, so the copy is consistent without stopping
anything; one that was deleted in between is named as missing. Only SQLite is copied here, as
PostgreSQL has `pg_dump`. Blocks; knows nothing of HTTP.
"""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tinkex.contract.cost import Cost
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.server.files.damage import damage_of
from tinkex.server.files.depot import URL_FILE, is_stored, storage_of
from tinkex.server.files.scratch import scratch_folder
from tinkex.store.binding import ID_FILE
from tinkex.store.claim import LOCK_FILE, FileLock
from tinkex.store.database import sqlite_file
from tinkex.wire import tar

_LISTED = (
    "SELECT folder FROM checkpoints UNION SELECT folder FROM snapshots "
    "UNION SELECT folder FROM sampling_sessions WHERE ephemeral AND folder IS NOT NULL"
)
_MARK = "tinkex-backup.txt"
_PART = "backup.tar"
_LIMITS = Cost(files=10_000_000, sent_bytes=1 << 62, depth=tar.MAX_DEPTH)
"""Of a backup, which is the operator's own: as large as a data folder is."""


@dataclass(slots=True)
class Found:
    """The files of a data folder, held against its database."""

    num_listed: int = 0
    missing: list[str] = field(default_factory=list)
    """Listed folders that are not there."""
    strays: list[str] = field(default_factory=list)
    """Folders that no row lists; the server moves them to `quarantine/` when it starts."""
    num_stored: int = 0
    """Listed checkpoints whose home is an object store, which is not looked at here."""
    damaged: list[str] = field(default_factory=list)
    """Listed folders that do not hold what was written into them, and why."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the database itself, or with the id."""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.damaged or self.problems)


def backup(data_dir: Path, target: Path) -> Found:
    """Write a tar of the data folder to `target`, which must not exist."""
    database = database_of(data_dir)
    if target.exists():
        raise ConfigError(f"{target} exists; name a file that does not.")
    # What is in a part is as secret as the server: it is nobody else's at any moment.
    with scratch_folder(target.parent, scratch_files(database)) as scratch:
        copy = scratch / database.name
        copy_database(database, copy)
        contents = _write(scratch / _PART, data_dir, copy)
        _publish(scratch / _PART, target)
    return contents


def _write(part: Path, data_dir: Path, copy: Path) -> Found:
    """Write the tar, what the copied database lists first and the secrets last."""
    names = _listed(copy)
    contents = Found(num_listed=len(names))
    # Links as files: `restore` takes no others, and hard links are what deduplication leaves.
    with (
        _new_file(part) as file,
        tarfile.open(fileobj=file, mode="w", dereference=True) as archive,
    ):
        _add_text(archive, _MARK, f"made {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        archive.add(copy, copy.name)
        for name in (ID_FILE, URL_FILE, *names, "secrets"):
            if (data_dir / name).exists():
                archive.add(data_dir / name, name)
            elif name in names:
                contents.missing.append(name)
        _set_stored_apart(contents, data_dir)
    return contents


def _publish(part: Path, target: Path) -> None:
    """Give the finished file its name, unless another one took it meanwhile."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    try:
        _name(part, target)
    except FileExistsError:
        raise ConfigError(f"{target} exists; name a file that does not.") from None


def _name(part: Path, target: Path) -> None:
    """Give a file a second name, whole or not at all, and never that of another file."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: a crash may leave an empty file
        _new_file(target).close()
        part.rename(target)


def _new_file(path: Path) -> IO[bytes]:
    """Open a file that was not there, not even as a link, and that nobody else may read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def scratch_files(database: Path) -> tuple[str, ...]:
    """The part, and the copy of the database with what SQLite puts beside it."""
    return (_PART, *(f"{database.name}{end}" for end in ("", "-journal", "-wal", "-shm")))


def restore(source: Path, data_dir: Path, *, deep: bool = True) -> Found:
    """Unpack a backup into `data_dir`, which must be empty or absent, and check it.

    `deep`: every digest, too.
    """
    if data_dir.exists() and any(data_dir.iterdir()):
        raise ConfigError(f"{data_dir} is not empty; restore into a new folder and use that.")
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=data_dir.parent, prefix=f".{data_dir.name}-"))
    try:
        with source.open("rb") as stream:
            members = _marked(tar.members(stream, _LIMITS), source)
            tar.extract(members, aside, _LIMITS, keep_modes=True)
        (aside / _MARK).unlink()
        if data_dir.exists():
            # Unlike `rmtree`, this fails if somebody wrote into the folder since it was seen empty.
            data_dir.rmdir()
        aside.rename(data_dir)
    except InvalidInputError as exc:
        raise ConfigError(f"{source} is no whole backup: {exc}") from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return check(data_dir, deep=deep)


def _marked(found: Iterable[tar.Found], source: Path) -> Iterator[tar.Found]:
    """The members of an archive that begins as ours do."""
    is_first = True
    for member, data in found:
        if is_first and member.name != _MARK:
            break
        is_first = False
        yield member, data
    if is_first:
        raise ConfigError(f"{source} is no backup made by `tinkex admin backup`.")


def check(data_dir: Path, *, deep: bool = False) -> Found:
    """Hold the folder against its database, and the database against itself. Changes nothing.

    `deep` reads all weights and compares their digests with those that were written.
    """
    database = database_of(data_dir)
    found = Found()
    try:
        with connect(database) as connection:
            state = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(10)")]
            found.problems += [] if state == ["ok"] else state
            known = connection.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
        names = set(_listed(database))
    except sqlite3.DatabaseError as exc:
        found.problems.append(f"{database.name} cannot be read: {exc}")
        return found
    file = data_dir / ID_FILE
    in_folder = file.read_text(encoding="utf-8").strip() if file.exists() else None
    if in_folder != (known[0] if known else None):
        found.problems.append(f"{ID_FILE} says {in_folder}, the database {known and known[0]}")
    there = {path.relative_to(data_dir).as_posix() for path in _folders(data_dir)}
    found.num_listed = len(names)
    found.missing = sorted(name for name in names if not (data_dir / name).is_dir())
    for name in sorted(names - set(found.missing)):
        if damage := damage_of(data_dir / name, deep=deep):
            found.damaged.append(f"{name}: {damage}")
    found.strays = sorted(there - names)
    _set_stored_apart(found, data_dir)
    return found


def _set_stored_apart(found: Found, data_dir: Path) -> None:
    if storage_of(data_dir) is None:
        return
    stored = [name for name in found.missing if is_stored(name)]
    found.num_stored = len(stored)
    found.missing = [name for name in found.missing if not is_stored(name)]


def vacuum(data_dir: Path) -> tuple[int, int]:
    """Give unused room of the database back; (bytes before, after). No server may run on it."""
    database = database_of(data_dir)
    lock = FileLock(data_dir / LOCK_FILE)
    try:
        if not lock.try_take():
            raise ConfigError(f"A server uses {data_dir}{lock.holder()}. Stop it first.")
        before = _size_of(database)
        with connect(database, writable=True) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return before, _size_of(database)
    except sqlite3.OperationalError as exc:
        raise ConfigError(f"{database} is in use ({exc}). Stop its server first.") from exc
    finally:
        lock.release()


def _size_of(database: Path) -> int:
    """Bytes of a database with the log beside it, where a crash may have left a part of it."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def database_of(data_dir: Path) -> Path:
    file = sqlite_file(data_dir)
    if not file.exists():
        raise ConfigError(
            f"{data_dir} holds no {file.name}. Name the server's --data-dir; a database in "
            "PostgreSQL is copied with pg_dump, and the folder with cp -a."
        )
    return file


def connect(database: Path, *, writable: bool = False) -> closing[sqlite3.Connection]:
    """For a `with`, which closes it; sqlite3's own only commits."""
    mode = "rw" if writable else "ro"
    uri = f"{database.resolve().as_uri()}?mode={mode}"
    return closing(sqlite3.connect(uri, uri=True, timeout=10))


def copy_database(source: Path, target: Path) -> None:
    with connect(source) as reader, closing(sqlite3.connect(target)) as writer:
        reader.backup(writer)
        # The copy takes over the WAL mode of its source. Only the main file goes into the tar, so
        # no log may be left beside it.
        writer.execute("PRAGMA journal_mode=DELETE")


def _listed(database: Path) -> list[str]:
    with connect(database) as connection:
        return sorted(str(row[0]) for row in connection.execute(_LISTED))


def _folders(data_dir: Path) -> list[Path]:
    patterns = ("checkpoints/*/*/*", "ephemeral/*", "state/*/*")
    return [path for p in patterns for path in data_dir.glob(p) if path.is_dir()]


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(text)
    archive.addfile(info, io.BytesIO(text.encode()))
