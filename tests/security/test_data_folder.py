"""Nothing is lost, however the data folder is named and whatever database comes with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from app_world import AppWorld, open_app

from tinkex.errors import ConfigError


async def _save(world: AppWorld, name: str, session: str | None = None) -> str:
    """Train a new run one step and save it; gives the checkpoint's path."""
    model = await world.model(session)
    await world.result((await world.train(model, 1, [1, 2, 3])).json())
    await world.result((await world.step(model, 2)).json())
    body = {"model_id": model, "path": name, "seq_id": 3}
    return str((await world.result(await world.ok("save_weights", body)))["path"])


async def _loads(world: AppWorld, path: str) -> bool:
    """Whether a new run can take the checkpoint."""
    await _swept(world)
    model = await world.model()
    body = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
    answer = await world.result(await world.ok("load_weights", body))
    return "error" not in answer


async def _swept(world: AppWorld) -> None:
    """Wait for the round of clean-up that every start makes."""
    shelf = world.parts.shelf
    clean = getattr(shelf, "set_strays_aside", None) or shelf.remove_strays
    await clean()


def _quarantined(folder: Path) -> set[str]:
    return {f.name.rsplit("-", 1)[0] for f in (folder / "quarantine").glob("*/checkpoints/*/*/*")}


async def test_another_spelling_of_the_data_dir_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_app(Path("data")) as world:
        path = await _save(world, "kept")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for spelling in (tmp_path / "data", Path("./data/../data"), Path("link"), tmp_path / "link"):
        async with open_app(spelling) as world:
            assert await _loads(world, path), spelling


async def test_a_moved_data_dir_loses_nothing_and_its_runs_go_on(tmp_path: Path) -> None:
    async with open_app(tmp_path / "here", snapshot_every_ops=1) as world:
        path = await _save(world, "kept")
        model = path.removeprefix("tinker://").split("/")[0]
    shutil.move(tmp_path / "here", tmp_path / "there")
    async with open_app(tmp_path / "there") as world:
        assert await _loads(world, path)
        assert "error" not in await world.result((await world.step(model, 4)).json())
    assert not (tmp_path / "here").exists()


async def test_a_lost_database_is_refused_in_words_and_nothing_is_touched(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        path = await _save(world, "kept")
    backup = (tmp_path / "tinkex.db").read_bytes()
    for file in tmp_path.glob("tinkex.db*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"Restore that database.*delete .*store\.id"):
        async with open_app(tmp_path) as world:
            await _swept(world)
    (tmp_path / "tinkex.db").write_bytes(backup)
    async with open_app(tmp_path) as world:
        assert await _loads(world, path)


async def test_the_way_out_keeps_the_unknown_checkpoints_in_quarantine(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        await _save(world, "kept")
    for file in [*tmp_path.glob("tinkex.db*"), tmp_path / "store.id"]:
        file.unlink(missing_ok=True)
    async with open_app(tmp_path) as world:
        await _swept(world)
    assert _quarantined(tmp_path) == {"kept"}


async def test_an_older_database_sends_newer_checkpoints_to_quarantine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_app(tmp_path) as world:
        first = await _save(world, "first")
    old = (tmp_path / "tinkex.db").read_bytes()
    async with open_app(tmp_path) as world:
        await _save(world, "second")
    for file in tmp_path.glob("tinkex.db*"):
        file.unlink()
    (tmp_path / "tinkex.db").write_bytes(old)
    async with open_app(tmp_path) as world:
        assert await _loads(world, first)
    assert _quarantined(tmp_path) == {"second"}
    assert "is in no listing; it was moved to" in caplog.text


async def test_two_databases_on_one_data_dir_are_refused(tmp_path: Path) -> None:
    data, other = tmp_path / "data", f"sqlite:///{tmp_path / 'other.db'}"
    async with open_app(data) as world:
        path = await _save(world, "kept")
        # At the same time the folder's lock refuses, after that the id does.
        with pytest.raises(ConfigError, match="Another server uses the data folder"):
            async with open_app(data, database=other):
                pass
    with pytest.raises(ConfigError, match="belongs to a database with the id"):
        async with open_app(data, database=other) as world:
            await _swept(world)
    async with open_app(data) as world:
        assert await _loads(world, path)


async def test_a_database_with_another_data_dir_is_refused(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'shared.db'}"
    async with open_app(tmp_path / "data", database=database) as world:
        path = await _save(world, "kept")
    with pytest.raises(ConfigError, match="is not the data folder they are in"):
        async with open_app(tmp_path / "empty", database=database):
            pass
    async with open_app(tmp_path / "data", database=database) as world:
        assert await _loads(world, path)


async def test_a_folder_that_was_deleted_goes_even_after_a_crash(tmp_path: Path) -> None:
    """Only what the database says was deleted is removed, and that it says for good."""
    async with open_app(tmp_path) as world:
        run, kind, name = (await _save(world, "gone")).removeprefix("tinker://").split("/")
        (folder,) = (tmp_path / "checkpoints").glob("*/weights/gone-*")
        kept = tmp_path / "copy"
        shutil.copytree(folder, kept)
        url = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        answer = await world.http.delete(url, headers={"x-api-key": "tml-test"})
        assert answer.status_code < 300, answer.text
        assert not folder.exists()
    with (
        closing(sqlite3.connect(tmp_path / "tinkex.db")) as db,
        db,
    ):  # as if killed before the folder went
        row = (folder.relative_to(tmp_path).as_posix(), time.time())
        db.execute("INSERT INTO deleted_folders VALUES (?, ?)", row)
    kept.rename(folder)
    async with open_app(tmp_path) as world:
        await world.parts.shelf.remove_deleted()
        assert not folder.exists()
    assert _quarantined(tmp_path) == set()


async def test_quarantine_has_an_end_and_touches_nothing_else(tmp_path: Path) -> None:
    async with open_app(tmp_path, quarantine_ttl_s=100.0) as world:
        root = tmp_path / "quarantine"
        old, new = (time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() - s)) for s in (200, 50))
        for name in (old, new, "notes-of-mine"):
            (root / name / "checkpoints").mkdir(parents=True)
        await asyncio.to_thread(world.parts.shelf.folders.purge_quarantine, time.time() - 100)
        assert sorted(os.listdir(root)) == sorted([new, "notes-of-mine"])
