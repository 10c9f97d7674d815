"""What belongs to one user of a machine is closed to the others, and to web pages."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from app_world import AppWorld, open_app
from server_process import ServerProcess

from tinkex.client.session import embedded_server
from tinkex.client.session.embedded_server import join_local_server
from tinkex.errors import ConfigError
from tinkex.server.guard.origin import is_loopback_name
from tinkex.server.process.config import ServerConfig

BODY = {"tags": [], "sdk_version": "test"}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_data_folder_is_its_users_alone(tmp_path: Path) -> None:
    os.umask(0o022)
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        data = tmp_path / "data"
        httpx.post(f"{server.base_url}/api/v1/create_session", json=BODY)
        assert _mode(data) == 0o700
        for path in data.rglob("*"):
            with suppress(FileNotFoundError):  # a file of a moment
                assert not _mode(path) & 0o077, path


def test_a_folder_from_before_is_closed_at_the_next_start(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy"):
        pass
    data = tmp_path / "data"
    data.chmod(0o755)
    (data / "tinkex.db").chmod(0o644)
    with ServerProcess(tmp_path, "--engine", "toy"):
        assert (_mode(data), _mode(data / "tinkex.db")) == (0o700, 0o600)


async def test_no_secret_is_in_the_database(tmp_path: Path) -> None:
    async with open_app(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "tinkex.db")) as db, db:
        assert db.execute("SELECT count(*) FROM secrets").fetchone() == (0,)
    files = {file.name: _mode(file) for file in (tmp_path / "secrets").iterdir()}
    assert files == {"jwt": 0o600, "links": 0o600}


async def test_secrets_of_an_older_version_move_and_stay_the_same(tmp_path: Path) -> None:
    async with open_app(tmp_path):
        pass
    (tmp_path / "secrets" / "jwt").unlink()
    with closing(sqlite3.connect(tmp_path / "tinkex.db")) as db, db:
        db.execute("INSERT INTO secrets VALUES ('jwt', ?)", (b"k" * 32,))
    async with open_app(tmp_path):
        assert (tmp_path / "secrets" / "jwt").read_bytes() == b"k" * 32


def test_the_embedded_server_asks_for_a_key_that_its_user_alone_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "IDLE_S", 0.5)
    env = dict(os.environ) | {"TINKEX_HOME": str(tmp_path), "TINKEX_LOCAL_ENGINE": "toy"}
    server = join_local_server(env)
    try:
        url = f"{server.base_url}/api/v1/create_session"
        assert _mode(tmp_path / "local.key") == 0o600
        assert httpx.post(url, json=BODY).status_code == 401
        assert httpx.post(url, json=BODY, headers={"x-api-key": "tml-other"}).status_code == 401
        assert httpx.post(url, json=BODY, headers={"x-api-key": server.api_key}).status_code == 200
        (pid,) = [int(p) for p in _pids_of(server.base_url, tmp_path)]
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert server.api_key not in command
    finally:
        asyncio.run(server.leave())


def _pids_of(base_url: str, home: Path) -> list[str]:
    import json

    return [str(json.loads(file.read_text())["pid"]) for file in home.glob("local-toy.json")]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example"},
        {"host": "localhost.attacker.example"},
        {"origin": "https://attacker.example"},
        {"origin": "null"},
        {"x-forwarded-for": "10.0.0.1"},
    ],
)
async def test_an_open_server_talks_to_programs_of_its_machine_only(
    app_world: AppWorld, headers: dict[str, str]
) -> None:
    for path in ("create_session", "sessions/search"):
        answer = await app_world.post(path, headers=headers)
        assert answer.status_code == 403, answer.text
        assert "tinkex keys add" in answer.json()["detail"]


async def test_with_a_key_the_host_may_be_any(two_keys: AppWorld) -> None:
    headers = {"host": "tinkex.example", "x-forwarded-for": "10.0.0.1"}
    answer = await two_keys.post("create_session", BODY, key="tml-ann", headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["localhost:80", "127.0.0.1", "[::1]:8765", "a.localhost"])
def test_names_of_this_machine(name: str) -> None:
    assert is_loopback_name(name)


@pytest.mark.parametrize("name", ["", "127.0.0.1.nip.io", "localhost@evil", "10.0.0.1", "[::"])
def test_names_of_others(name: str) -> None:
    assert not is_loopback_name(name)


async def test_a_key_can_be_required_on_loopback_too(tmp_path: Path) -> None:
    async with open_app(tmp_path, key_required=True) as world:
        assert (await world.post("create_session", key="tml-any")).status_code == 401


def test_keys_come_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\ntml-one=ann\n\ntml-two\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ServerConfig(api_key_file=str(file))
    file.chmod(0o600)
    assert ServerConfig(api_key_file=str(file)).api_keys == ("tml-one=ann", "tml-two")
