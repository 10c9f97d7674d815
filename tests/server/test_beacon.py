"""The files by which local mode finds a user's servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from tinkex.server.process.beacon import Beacon
from tinkex.server.process.config import ServerConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    return tmp_path / "serving"


def _light() -> dict[str, object]:
    """Start and end a beacon of this process; gives what its file said."""
    beacon = Beacon(ServerConfig(engine="toy"), "http://127.0.0.1:1", needs_key=False)
    with beacon.lit():
        return json.loads(beacon._file.read_text())


def _ended_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=200)
    return child.pid


def test_the_next_server_removes_the_file_of_one_that_was_killed(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        killed = tmp_path / "serving" / f"{server.pid}.json"
        server.kill()
        assert killed.exists(), "a killed server cannot remove its file"
        server.start()
        assert not killed.exists()
        assert (tmp_path / "serving" / f"{server.pid}.json").exists()


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, False),
        ({"pid": os.getppid()}, True),
        ({"boot": "an earlier one", "pid": os.getppid()}, False),
        ({"host": "another"}, True),
        ({"host": "another", "boot": "another"}, True),
        ({"pids": "of another container"}, True),
    ],
    ids=["dead", "alive", "before a reboot", "elsewhere", "elsewhere and rebooted", "container"],
)
def test_only_a_server_that_is_dead_for_certain_loses_its_file(
    folder: Path, changed: dict[str, object], stays: bool
) -> None:
    written = _light() | {"pid": _ended_pid()} | changed
    (folder / "other.json").write_text(json.dumps(written))
    _light()
    assert (folder / "other.json").exists() == stays
    assert not (folder / f"{os.getpid()}.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_says_nothing_is_left_alone(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "broken.json").write_text(text)
    _light()
    assert (folder / "broken.json").read_text() == text
