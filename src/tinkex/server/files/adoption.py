"""Runs of another data folder, brought into this one.

The other folder is only read: its database is copied aside, and the copy is opened. Each run is
taken by itself: first the folders of its checkpoints, each written aside, synced and compared with
its original by digest, then all its rows in one transaction. A crash leaves at worst folders that
no row knows, which the server sets aside when it starts. What is here already is left as it is.
State and requests stay behind, and so do bills: an adopted run goes on from its checkpoints.

Both folders belong to whoever runs the command, who must trust the other one. Blocks.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinkex.engine.folders import write_whole
from tinkex.errors import ConfigError, EngineError, InvalidInputError
from tinkex.server.files.backup import copy_database, database_of, scratch_files
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.files.damage import damage_of
from tinkex.server.files.depot import storage_of
from tinkex.server.files.folders import DataFolder, folder_size
from tinkex.server.files.scratch import scratch_folder
from tinkex.store import Checkpoint, Store, WholeRun
from tinkex.store.claim import LOCK_FILE, FileLock

BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class Adopted:
    """The runs of the other folder, by what became of them."""

    runs: list[WholeRun] = field(default_factory=list)
    there: list[WholeRun] = field(default_factory=list)
    """Those that this folder had already."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a run was not taken, by its id."""
    names_in_use: list[str] = field(default_factory=list)
    """Names of checkpoints that stand for others here, and still do."""


def adopt(store: Store, data_dir: Path, source: Path, *, run: str = "", owner: str = "") -> Adopted:
    """Bring the runs of `source` into the folder of `store`, which this process has claimed.

    Args:
        run: The id or name of one of them; empty: all.
        owner: The user they belong to here; empty: the one they have there.

    Raises:
        ConfigError: There is no such run, a server uses the other folder, or nobody could reach
            the runs here.
    """
    if source.resolve() == data_dir.resolve():
        raise ConfigError(f"{source} is the data folder that would adopt its own runs.")
    if (url := storage_of(source)) is not None:
        raise ConfigError(f"The checkpoints of {source} are in {url}, not in the folder.")
    adopted = Adopted()
    with _read_only(source, data_dir) as other:
        runs = list(_chosen(other, run))
        if run and not runs:
            raise ConfigError(f"{source} has no run {run!r}. Leave --run out to adopt all runs.")
        _check_owners(store, {owner or whole.user_id for whole in runs})
        for whole in runs:
            _adopt_run(store, DataFolder(data_dir), DataFolder(source), whole, owner, adopted)
    return adopted


@contextmanager
def _read_only(source: Path, data_dir: Path) -> Iterator[Store]:
    """A store over a copy of the other folder's database, while no server uses the original."""
    database = database_of(source)
    lock = FileLock(source / LOCK_FILE)
    try:
        if not lock.try_take():
            raise ConfigError(
                f"A server uses {source}{lock.holder()}. Stop it first; a private one ends by "
                "itself, seconds after its last program."
            )
        with scratch_folder(data_dir, scratch_files(database)) as scratch:
            copy_database(database, scratch / database.name)
            other = Store(f"sqlite:///{scratch / database.name}")
            try:
                yield other
            finally:
                other.close()
    finally:
        lock.release()


def _chosen(other: Store, run: str) -> Iterator[WholeRun]:
    for whole in other.runs.all():
        if not run or run == whole.name or run in (segment.model_id for segment in whole.segments):
            yield whole


def _check_owners(store: Store, owners: set[str]) -> None:
    """Refuse to make runs that no key opens."""
    keys = store.accounts.active_keys()
    if nobody := sorted(owners - {key.user_id for key in keys} if keys else ()):
        raise ConfigError(
            f"This server has keys, and none of them is of the user {nobody[0]!r}: nobody could "
            "reach the runs. Name one who has a key with --owner USER (`tinkex keys list`)."
        )


def _adopt_run(
    store: Store,
    here: DataFolder,
    there: DataFolder,
    whole: WholeRun,
    owner: str,
    adopted: Adopted,
) -> None:
    if any(store.models.get(segment.model_id) for segment in whole.segments):
        adopted.there.append(whole)
        return
    copied: list[Checkpoint] = []
    try:
        for checkpoint in whole.checkpoints:
            copied.append(_copied(here, there, checkpoint))
        ours = whole.given_to(owner, copied)
        adopted.names_in_use += store.runs.add(ours)
    except BaseException as exc:
        for checkpoint in copied:
            shutil.rmtree(here.path(checkpoint.folder), ignore_errors=True)
        if not isinstance(exc, EngineError | InvalidInputError):
            raise
        adopted.refused[whole.model_id] = str(exc)
        return
    adopted.runs.append(ours)


def _copied(here: DataFolder, there: DataFolder, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose folder is here, whole and with the digest of the original."""
    path = parse_path(checkpoint.path)
    source = there.path(checkpoint.folder)
    # The folder's own name is not used: what is in a foreign database becomes no path here.
    run, name = path.run_id.replace(":", "-"), f"{path.name}-{secrets.token_hex(6)}"
    target = here.root / "checkpoints" / run / path.kind / name
    if not source.is_dir() or not source.resolve().is_relative_to(there.root):
        raise EngineError(f"the folder of {checkpoint.path} is missing: {source}")
    write_whole(target, lambda aside: _copy_files(source, aside), {})
    if damage := damage_of(target, deep=True):
        shutil.rmtree(target, ignore_errors=True)
        raise EngineError(f"{checkpoint.path} is damaged: {damage}")
    return replace(checkpoint, folder=here.name(target), size_bytes=folder_size(target))


def _copy_files(source: Path, target: Path) -> None:
    for file in sorted(source.rglob("*")):
        copy = target / file.relative_to(source)
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            raise EngineError(f"{file} is neither a file nor a folder, and not copied")
        if file.is_dir():
            copy.mkdir()
        elif _copy_file(file, copy) != _digest(copy):
            raise EngineError(f"{file} was not copied as it is; the disk may be broken")


def _copy_file(source: Path, target: Path) -> str:
    """Copy a file and have it on the disk; gives the digest of what was read."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
