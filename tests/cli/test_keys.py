"""`tinkex keys`: table, JSON and failures, and what a running server makes of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import patience
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from server_process import ServerProcess
from wire_client import WireClient


@pytest.fixture
def keys(cli, tmp_path) -> Callable[..., Any]:
    """`keys("list")` on a data folder of its own."""
    return lambda *args: cli("keys", *args, "--data-dir", tmp_path / "data")


def test_a_key_is_shown_once_and_only_its_number_is_listed(keys):
    made = keys("add", "--user", "ann", "--name", "laptop", "--json")
    assert made.code == 0
    assert "first key" in made.err
    assert made.json["key"].startswith("tml-")
    assert len(made.json["key"]) > 40
    table = keys("list")
    assert table.code == 0
    head, row = (table.out.split("\n")[n].split() for n in (2, 4))
    assert head == ["ID", "User", "Name", "Role", "Created", "State"]
    assert row == ["1", "ann", "laptop", "user", "just", "now", "active"]
    (listed,) = keys("list", "--json").json["keys"]
    assert listed["state"] == "active"
    assert listed["revoked_at"] is None
    assert made.json["key"] not in table.out + str(listed)


def test_a_key_has_a_role(keys):
    assert keys("add", "--user", "ann", "--admin", "--json").json["role"] == "admin"
    keys("add", "--user", "bob")
    keys("add", "--user", "prometheus", "--metrics")
    listed = keys("list", "--json").json["keys"]
    assert [key["role"] for key in listed] == ["admin", "user", "metrics"]


def test_adding_prints_a_table_for_people(keys):
    table = keys("add", "--user", "ann")
    assert "tml-" in table.out
    assert "ann" in table.out


def test_a_revoked_key_leaves_the_listing(keys):
    for user in ("ann", "bob"):
        keys("add", "--user", user)
    revoked = keys("revoke", 1)
    assert revoked.code == 0
    assert "revoked" in revoked.out
    assert [key["user"] for key in keys("list", "--json").json["keys"]] == ["bob"]
    states = [key["state"] for key in keys("list", "--all", "--json").json["keys"]]
    assert states == ["revoked", "active"]
    assert keys("list", "--user", "ann", "--json").json["keys"] == []
    last = keys("revoke", 2, "--json")
    assert last.json["state"] == "revoked"
    assert "No key is left" in last.err


def test_failures_name_the_next_move(keys, tmp_path):
    assert "No server has kept anything" in keys("list").err
    assert not (tmp_path / "data").exists(), "looking makes nothing"
    assert keys("add").code == 2
    assert keys("add", "--user", " ").code == 2
    keys("add", "--user", "ann")
    unknown = keys("revoke", 7)
    assert (unknown.code, unknown.out) == (1, "")
    assert "No key has the number 7. See `tinkex keys list`." in unknown.err
    keys("revoke", 1)
    assert "Keys (0)" in keys("list").out
    assert "Key 1 is revoked already. See `tinkex keys list --all`." in keys("revoke", 1).err


def test_a_database_that_is_none_is_refused(cli):
    wrong = cli("keys", "list", "--database", "mysql://nowhere/x")
    assert wrong.code == 1
    assert "postgresql://" in wrong.err


# ------------------------------------------------------------------------------------ live


@pytest.fixture
def server(tmp_path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, "--engine", "toy", "--api-key", "tml-fixed=op") as server:
        yield server


def status(server: ServerProcess, key: str) -> int:
    return httpx.get(
        f"{server.base_url}/api/v1/sessions", headers={"x-api-key": key}, trust_env=False
    ).status_code


def until(server: ServerProcess, key: str, wanted: int) -> None:
    patience.until(lambda: status(server, key) == wanted, lambda: f"{wanted} did not come")


def test_a_running_server_takes_a_new_key_and_drops_a_revoked_one_with_its_tokens(server, keys):
    key = keys("add", "--user", "ann", "--json").json["key"]
    assert status(server, key) == 200, "without a restart"
    answer = httpx.post(
        f"{server.base_url}/api/v1/auth/token", headers={"x-api-key": key}, trust_env=False
    )
    token = answer.json()["jwt"]
    assert status(server, token) == 200
    number = next(k["key_id"] for k in keys("list", "--json").json["keys"] if k["user"] == "ann")
    keys("revoke", number)
    until(server, key, 401)
    until(server, token, 401)
    assert status(server, "tml-fixed") == 200


def test_a_key_of_the_configuration_is_revoked_there(server, keys):
    (fixed,) = keys("list", "--json").json["keys"]
    assert fixed["state"] == "configured"
    refused = keys("revoke", fixed["key_id"])
    assert refused.code == 1
    assert "stands in the server's configuration" in refused.err


def test_an_administrator_disables_enables_and_stops_a_user(server, keys, cli, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    admin, ann = (
        keys("add", "--user", user, *flags, "--json").json["key"]
        for user, flags in (("root", ["--admin"]), ("ann of marketing", []))
    )
    monkeypatch.setenv("TINKER_API_KEY", admin)
    who = ("--user", "ann of marketing")
    off = cli("admin", "disable", *who, "--reason", "unpaid", "--json")
    assert off.json == {"user": "ann of marketing", "state": "disabled", "num_ended": 0}
    until(server, ann, 403)
    listed = cli("admin", "users", "--json").json["users"]
    assert [one["user_id"] for one in listed if one["disabled_at"]] == ["ann of marketing"]
    assert "disabled" in cli("admin", "users").out
    assert cli("admin", "enable", *who).code == 0
    until(server, ann, 200)
    assert cli("admin", "unpause", *who, "--json").json["state"] == "active"
    assert "There is no user 'eve'" in cli("admin", "unpause", "--user", "eve").err
    assert cli("admin", "stop", *who, "--json").json["num_ended"] == 0
    assert "There is no user 'eve'" in cli("admin", "stop", "--user", "eve").err
    assert "There is no run 'x'" in cli("admin", "stop", "--run", "x").err
    assert "There is no session 'x'" in cli("admin", "stop", "--session", "x").err
    assert cli("admin", "stop", "--run", "x", "--session", "y").code == 2
    monkeypatch.setenv("TINKER_API_KEY", ann)
    refused = cli("admin", "disable", "--user", "root")
    assert (refused.code, "needs an admin key" in refused.err) == (1, True)


def test_usage_is_shown_by_key(server, keys, cli, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
    admin = keys("add", "--user", "root", "--admin", "--json").json["key"]
    made = keys("add", "--user", "ann", "--name", "laptop", "--json").json
    client = WireClient(server.base_url, key=made["key"])
    model = client.model(client.session())
    client.result(client.train(model, 1, [1, 2, 3]))
    client.close()
    monkeypatch.setenv("TINKER_API_KEY", admin)
    # What is asked for is told again for a while, so each look asks for another number of lines.
    for limit in range(5, 105):
        asked = ("admin", "usage", "--by", "key", "--limit", limit)
        used = cli(*asked, "--json").json["usage"]
        if any(one["counts"].get("training") for one in used):
            break
        time.sleep(0.1)
    (one,) = [one for one in used if one["user_id"] == "ann"]
    assert (one["key_id"], one["key_name"]) == (made["key_id"], "laptop")
    assert one["counts"]["training"] == 3
    shown = cli(*asked).out
    assert "laptop" in shown
    assert made["key"] not in shown
    assert model in cli("admin", "usage", "--by", "run").out
    assert cli("admin", "usage", "--by", "moon").code == 2


def test_the_first_key_closes_an_open_server_and_opens_another_address(tmp_path, keys):
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        assert status(server, "") == 200
        key = keys("add", "--user", "ann", "--json").json["key"]
        until(server, "", 401)
        assert status(server, key) == 200
        keys("revoke", 1)
        until(server, key, 401)
        assert status(server, "") == 401, "and it does not open again by itself"
    command = [sys.executable, "-m", "tinkex.server", "--engine", "toy", "--host", "0.0.0.0"]
    command += ["--port", "0", "--data-dir", str(tmp_path / "data")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert "no api key is set" in refused.stderr
    keys("add", "--user", "ann")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert b"base_url" in process.stdout.readline()
        finally:
            process.terminate()


def test_a_data_folder_is_saved_restored_checked_and_shrunk(cli, keys, tmp_path):
    data, copy, new = (tmp_path / name for name in ("data", "copy.tar", "new"))
    keys("add", "--user", "ann", "--requests-per-minute", "60", "--json")
    assert cli("admin", "backup", "--data-dir", data, "--output", copy).code == 0
    assert cli("admin", "restore", "--input", copy, "--data-dir", new).code == 0
    again = cli("admin", "restore", "--input", copy, "--data-dir", new)
    assert (again.code, "not empty" in again.err) == (1, True)
    (kept,) = cli("keys", "list", "--data-dir", new, "--json").json["keys"]
    assert (kept["user"], kept["requests_per_minute"]) == ("ann", 60.0)
    assert cli("admin", "fsck", "--data-dir", new).code == 0
    assert cli("admin", "vacuum", "--data-dir", new).code == 0
    assert cli("admin", "fsck", "--data-dir", tmp_path / "nowhere").code == 1
