"""Backup, restore, check, shrink; and a database that cannot be used says so in words."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from app_world import AppWorld, open_app

from tinkex.errors import ConfigError
from tinkex.server.files import backup


async def _save(world: AppWorld) -> str:
    model = await world.model()
    body = {"model_id": model, "path": "kept", "seq_id": 1}
    return str((await world.result(await world.ok("save_weights", body)))["path"])


async def _loads(world: AppWorld, path: str) -> bool:
    body = {"model_id": await world.model(), "path": path, "seq_id": 1, "optimizer": True}
    return "error" not in await world.result(await world.ok("load_weights", body))


async def test_a_backup_of_a_running_server_restores(tmp_path: Path) -> None:
    async with open_app(tmp_path / "data") as world:
        path = await _save(world)
        made = backup.backup(tmp_path / "data", tmp_path / "copy.tar")
        assert made.ok
        assert made.num_listed >= 1
    assert (tmp_path / "copy.tar").stat().st_mode & 0o077 == 0
    assert backup.restore(tmp_path / "copy.tar", tmp_path / "new").ok
    async with open_app(tmp_path / "new") as world:
        assert await _loads(world, path)
    with pytest.raises(ConfigError, match="not empty"):
        backup.restore(tmp_path / "copy.tar", tmp_path / "new")


async def test_what_is_missing_and_what_nobody_lists_is_found(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        await _save(world)
    assert backup.check(tmp_path).ok
    (folder,) = (tmp_path / "checkpoints").glob("*/weights/*")
    folder.rename(folder.with_name("moved"))
    found = backup.check(tmp_path)
    assert not found.ok
    assert [Path(name).name for name in found.missing] == [folder.name]
    assert [Path(name).name for name in found.strays] == ["moved"]


async def test_unused_room_of_the_database_is_given_back(tmp_path: Path) -> None:
    async with open_app(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "tinkex.db")) as db, db:
        db.execute("CREATE TABLE big (x BLOB)")
        db.execute("INSERT INTO big VALUES (zeroblob(5000000))")
        db.execute("DROP TABLE big")
    before, after = backup.vacuum(tmp_path)
    assert after < before - 4_000_000


async def test_vacuum_beside_a_running_server_is_refused(tmp_path: Path) -> None:
    async with open_app(tmp_path):
        with pytest.raises(ConfigError, match=r"A server uses .* \(process \d+\)\. Stop it first"):
            backup.vacuum(tmp_path)
    before, after = backup.vacuum(tmp_path)
    assert before > 4096, "what a server left in its log counts"
    assert after > 4096


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("garbage", "damaged.*tinkex admin restore"),
        ("newer", "newer Tinkex"),
        ("empty", r"Restore that database.*delete .*store\.id"),
    ],
)
async def test_a_database_that_cannot_be_used_says_so(
    tmp_path: Path, damage: str, words: str
) -> None:
    async with open_app(tmp_path):
        pass
    file = tmp_path / "tinkex.db"
    if damage == "garbage":
        file.write_bytes(b"not a database at all" * 1000)
    elif damage == "empty":
        for part in tmp_path.glob("tinkex.db*"):
            part.write_bytes(b"")
    else:
        with closing(sqlite3.connect(file)) as db, db:
            db.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ConfigError, match=words):
        async with open_app(tmp_path):
            pass
