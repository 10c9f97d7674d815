"""Backup, restore, check, shrink; and a database that cannot be used says so in words."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from app_world import AppWorld, open_app
from safetensors.numpy import save

from tinkex.engine.checkpoint.reader import content_of
from tinkex.errors import ConfigError
from tinkex.server.files import backup
from tinkex.server.files.damage import damage_of


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


# A backup that stops itself when it is about to copy the secrets, or to take its name (with
# "naming"), as a debugger would stop it.
_STOPPING = """
import os, signal, sys
from pathlib import Path
from tinkex.server.files.backup import backup

def stop(event, arguments):
    at_secrets = event == "open" and str(arguments[0]).endswith("secrets/jwt")
    at_name = event in ("os.link", "os.rename") and str(arguments[0]).endswith("backup.tar")
    if at_name if "naming" in sys.argv else at_secrets:
        os.kill(os.getpid(), signal.SIGSTOP)

sys.addaudithook(stop)
os.umask(0o022)
backup(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@contextmanager
def _stopped_backup(data: Path, target: Path, *where: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", _STOPPING, str(data), str(target), *where])
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it ended before it came to where it stops"
        yield child
    finally:
        child.kill()
        child.wait()


def _readable_by_others(folder: Path) -> list[str]:
    """Files below `folder` that another user could open; a closed folder closes what is in it."""
    found: list[str] = []
    for path in folder.iterdir():
        if path.stat().st_mode & 0o077:
            found += _readable_by_others(path) if path.is_dir() else [path.name]
    return found


@pytest.fixture
async def data_dir(tmp_path: Path) -> Path:
    async with open_app(tmp_path / "data") as world:
        await _save(world)
    return tmp_path / "data"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o755)
    return tmp_path / "out"


def test_a_backup_is_nobody_elses_at_any_moment(data_dir: Path, out: Path) -> None:
    with _stopped_backup(data_dir, out / "copy.tar") as child:
        assert any(out.rglob("*")), "it has begun to write"
        assert _readable_by_others(out) == []
        child.send_signal(signal.SIGCONT)
        assert child.wait() == 0
    assert [path.name for path in out.iterdir()] == ["copy.tar"]
    assert (out / "copy.tar").stat().st_mode & 0o777 == 0o600


def test_the_secrets_are_the_last_thing_in_a_backup(data_dir: Path, out: Path) -> None:
    backup.backup(data_dir, out / "copy.tar")
    with tarfile.open(out / "copy.tar") as archive:
        names = archive.getnames()
    first = names.index("secrets")
    assert first > 3
    assert all(name.startswith("secrets/") for name in names[first + 1 :])


@pytest.mark.parametrize("mode", [0o755, 0o2770], ids=["plain", "setgid"])
def test_what_a_killed_backup_left_is_removed_by_the_next(
    data_dir: Path, out: Path, mode: int
) -> None:
    """Folders made in one whose group is passed on carry that bit, too."""
    out.chmod(mode)
    with _stopped_backup(data_dir, out / "copy.tar"):
        pass
    assert any(out.iterdir()), "a killed backup cleans nothing up itself"
    (out / ".backup-abc_1234").mkdir(mode=0o700)  # killed before its lock
    backup.backup(data_dir, out / "copy.tar")
    assert [path.name for path in out.iterdir()] == ["copy.tar"]


def test_a_backup_has_its_name_when_it_is_whole_and_not_before(data_dir: Path, out: Path) -> None:
    with _stopped_backup(data_dir, out / "copy.tar", "naming"):
        assert not (out / "copy.tar").exists()
    backup.backup(data_dir, out / "copy.tar")
    assert [path.name for path in out.iterdir()] == ["copy.tar"]


# An audit hook that raises is how a file system answers that has no hard links (exFAT).
_WITHOUT_LINKS = """
import sys
from pathlib import Path
from tinkex.server.files.backup import backup

def refuse(event, arguments):
    if event == "os.link":
        raise PermissionError(1, "Operation not permitted")

sys.addaudithook(refuse)
backup(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_backup_needs_no_hard_links(data_dir: Path, out: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_LINKS, str(data_dir)]
    subprocess.run([*command, str(out / "copy.tar")], check=True)
    assert [path.name for path in out.iterdir()] == ["copy.tar"]
    assert (out / "copy.tar").stat().st_mode & 0o777 == 0o600
    (out / "other.tar").symlink_to(out / "absent")
    assert subprocess.run([*command, str(out / "other.tar")], check=False).returncode != 0
    assert not (out / "absent").exists()


def test_a_backup_of_files_that_are_links_restores(
    data_dir: Path, out: Path, tmp_path: Path
) -> None:
    """Deduplication leaves hard links; secrets may lie elsewhere."""
    first = next((data_dir / "checkpoints").rglob("adapter_config.json"))
    os.link(first, first.with_name("again.json"))
    (data_dir / "secrets").rename(tmp_path / "secrets")
    (data_dir / "secrets").symlink_to(tmp_path / "secrets")
    backup.backup(data_dir, out / "copy.tar")
    assert backup.restore(out / "copy.tar", tmp_path / "new").ok
    copy = tmp_path / "new" / first.relative_to(data_dir)
    assert copy.with_name("again.json").read_bytes() == first.read_bytes()
    secret = tmp_path / "new" / "secrets" / "jwt"
    assert secret.read_bytes() == (tmp_path / "secrets" / "jwt").read_bytes()
    assert secret.stat().st_mode & 0o777 == 0o600


def test_two_backups_at_once_leave_each_other_alone(data_dir: Path, out: Path) -> None:
    with _stopped_backup(data_dir, out / "first.tar") as child:
        assert backup.backup(data_dir, out / "second.tar").ok
        child.send_signal(signal.SIGCONT)
        assert child.wait() == 0
    assert {path.name for path in out.iterdir()} == {"first.tar", "second.tar"}
    with tarfile.open(out / "first.tar") as first, tarfile.open(out / "second.tar") as second:
        assert first.getnames() == second.getnames()


def test_of_two_backups_to_one_name_the_first_to_end_has_it(data_dir: Path, out: Path) -> None:
    with _stopped_backup(data_dir, out / "copy.tar") as child:
        backup.backup(data_dir, out / "copy.tar")
        made = (out / "copy.tar").read_bytes()
        child.send_signal(signal.SIGCONT)
        assert child.wait() != 0
    assert (out / "copy.tar").read_bytes() == made
    assert [path.name for path in out.iterdir()] == ["copy.tar"]


def test_a_link_at_the_name_of_a_backup_or_its_part_is_not_followed(
    data_dir: Path, out: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (out / ".copy.tar.part").symlink_to(victim)
    backup.backup(data_dir, out / "copy.tar")
    assert victim.read_text() == "mine"
    (out / "other.tar").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"other\.tar exists; name a file that does not"):
        backup.backup(data_dir, out / "other.tar")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("kind", ["link", "other files", "open to others", "file"])
def test_only_what_a_backup_made_is_removed(
    data_dir: Path, out: Path, tmp_path: Path, kind: str
) -> None:
    """Where others write, anybody can move or link a folder to such a name."""
    name = out / ".backup-abcd1234"
    folder = tmp_path / "elsewhere" if kind == "link" else name
    if kind == "file":
        name.write_text("kept")
    else:
        folder.mkdir()
        folder.chmod(0o755 if kind == "open to others" else 0o700)
        (folder / "tinkex.db").write_text("kept")
    if kind == "link":
        name.symlink_to(folder)
    elif kind == "other files":
        (folder / "store.id").write_text("kept")
    backup.backup(data_dir, out / "copy.tar")
    kept = name if kind == "file" else name / "tinkex.db"
    assert kept.read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_not_removed(data_dir: Path, out: Path) -> None:
    (folder := out / ".backup-abcd1234").mkdir(mode=0o700)
    (folder / "tinkex.db").write_text("kept")
    os.chown(folder, 65534, 65534)
    backup.backup(data_dir, out / "copy.tar")
    assert (folder / "tinkex.db").read_text() == "kept"


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


def _checkpoint_folder(folder: Path) -> Path:
    """A checkpoint as the engine writes it, with the digest of its weights."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    weights = {"base_model.model.q.lora_A.weight": np.ones((8, 64), np.float32)}
    (folder / "adapter_model.safetensors").write_bytes(save(weights))
    manifest = {"content_sha256": content_of(folder), "step": 3}
    (folder / "tinkex.json").write_text(json.dumps(manifest))
    return folder


def test_flipped_bytes_are_seen_by_a_deep_look_and_cut_files_by_a_quick_one(tmp_path: Path) -> None:
    folder = _checkpoint_folder(tmp_path / "good")
    assert damage_of(folder, deep=True) == ""
    flipped = _checkpoint_folder(tmp_path / "flipped")
    weights = flipped / "adapter_model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-400:] = bytes(byte ^ 255 for byte in whole[-400:])
    weights.write_bytes(whole)
    assert damage_of(flipped) == ""
    assert "was written" in damage_of(flipped, deep=True)
    weights.write_bytes(whole[:-10])
    assert "not as long as its header says" in damage_of(flipped)
    weights.write_bytes(whole[:20])
    assert "cut off within its header" in damage_of(flipped)
    manifest = _checkpoint_folder(tmp_path / "manifest") / "tinkex.json"
    manifest.write_bytes(manifest.read_bytes()[:30])
    assert "tinkex.json cannot be read, it may be cut off" in damage_of(manifest.parent)


async def test_damage_is_found_by_fsck_and_by_restore(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with open_app(data) as world:
        await _save(world)
    assert backup.check(data, deep=True).ok
    (folder,) = (data / "checkpoints").glob("*/weights/*")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"content_sha256": "', '"content_sha256": "0'))
    assert backup.check(data).ok
    assert [folder.name in one for one in backup.check(data, deep=True).damaged] == [True]
    backup.backup(data, tmp_path / "copy.tar")
    assert backup.restore(tmp_path / "copy.tar", tmp_path / "quick", deep=False).ok
    assert not backup.restore(tmp_path / "copy.tar", tmp_path / "new").ok
    manifest.write_bytes(manifest.read_bytes()[:40])
    assert not backup.check(data).ok, "a manifest that is cut off is seen by a quick look"
