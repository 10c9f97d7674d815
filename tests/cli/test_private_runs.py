"""Runs of the private server: deleted, adopted by another one, called by name, resumed."""

from __future__ import annotations

import json
import os
import weakref

import httpx
import pytest
from held_port import HeldPort

from tinkex import ServiceClient
from tinkex.cli.names import resolve, resolve_start
from tinkex.cli.state import State
from tinkex.client.session import embedded_server, holder
from tinkex.contract.models import DEFAULT_MODEL
from tinkex.errors import LocalServerError
from tinkex.wire.local_servers import read_record

pytestmark = pytest.mark.usefixtures("default_model_dir")
SFT = ("--batch-size", "2", "--epochs", "1", "--rank", "2", "--eval-share", "0")


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def machine(cli, data, tmp_path, monkeypatch):
    """A machine without any server: commands start the private one."""
    home = tmp_path / "home"
    (home / "server").mkdir(parents=True)
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.setenv("TINKEX_HOME", str(home))
    monkeypatch.setenv("TINKEX_LOCAL_ENGINE", "toy")
    monkeypatch.setattr(embedded_server, "IDLE_S", 0.5)
    # A process has one client of the private server; that of an earlier machine must not be met.
    monkeypatch.setattr(holder, "_shared", weakref.WeakValueDictionary())
    return home


def end_private(home) -> None:
    """As a reboot does."""
    pid = read_record(home / "local-toy.json")["pid"]
    for child in embedded_server._children:
        if child.pid == pid:
            child.kill()
            child.wait()


def test_a_deleted_run_is_gone_and_its_name_is_free(cli, machine, data):
    assert cli("train", "sft", data, *SFT, "--name", "own").code == 0
    asked = cli("run", "delete", "own")  # nobody answers
    assert (asked.code != 0, "for good?" in asked.err) == (True, True), (asked.out, asked.err)
    deleted = cli("run", "delete", "own", "--yes", "--json")
    assert (deleted.code, deleted.json["num_checkpoints"] > 0) == (0, True), deleted.err
    assert "runs/own" in deleted.err, "the log folder stays"
    assert cli("run", "list", "--json").json["runs"] == []
    again = cli("run", "delete", "own", "--yes")
    assert (again.code, "No training run 'own'" in again.err) == (1, True), again.err


def test_a_renamed_run_goes_by_its_new_name_where_its_folder_is_meant(cli, machine, data):
    assert cli("train", "sft", data, *SFT, "--name", "own").code == 0
    assert cli("run", "rename", "own", "caps").code == 0
    resumed = cli("train", "resume", "caps")
    assert (resumed.code, "finished run of 2 steps" in resumed.err) == (0, True), resumed.err
    shown = cli("run", "rollouts", "caps", "--json")
    assert shown.code == 1
    assert "runs/own kept no answers" in shown.out.replace(str(data.parent) + "/", "")
    for name in ("caps", "own"):
        traced = cli("run", "trace", name, "-o", str(data.parent / f"{name}.trace"))
        assert traced.code == 0, traced.err
    deleted = cli("run", "delete", "caps", "--yes")
    assert "runs/own" in deleted.err, "the log folder stays"
    again = cli("train", "sft", data, *SFT, "--name", "own", "--log-dir", "elsewhere")
    assert again.code == 0, again.err


def test_a_run_that_ends_with_an_error_says_how_far_it_is_saved(cli, machine, data):
    code = "asked = 0\n\ndef reward(completion):\n    global asked\n    asked += 1\n"
    code += "    if asked > 4:\n        raise ValueError('enough')\n    return float(asked % 2)\n"
    (data.parent / "reward.py").write_text(
        code + "\ndef prompts():\n    return [{'prompt': 'Hi'}] * 2\n"
    )
    flags = ("--steps", "9", "--prompts-per-step", "1", "--group-size", "2", "--max-tokens", "2")
    few = ("--rank", "2", "--save-every", "1", "--eval-share", "0", "--name", "short")
    ended = cli("train", "rl", "reward.py:reward", *flags, *few)
    assert ended.code == 1
    assert "The first 2 steps are saved.\nResume with: tinkex train resume short" in ended.err
    refused = cli("train", "rl", "reward.py:reward", *flags, *few, "--seed", "3")
    assert "are saved" not in refused.err, "it was refused before a step"


def test_a_server_that_was_just_starting_with_the_folder_is_joined(
    cli, machine, data, start_server, monkeypatch
):
    """It says where it listens once it answers; a private one that starts meanwhile cannot."""
    folder, serving = machine / "local-toy", machine / "serving"
    folder.mkdir()
    with start_server(folder, "--engine", "toy", env={"TINKEX_HOME": str(machine)}) as base_url:
        serving.rename(machine / "not-yet")

        def refused(*_):
            (machine / "not-yet").rename(serving)
            raise LocalServerError("Another server uses the data folder")

        monkeypatch.setattr(embedded_server._PrivateServer, "start", refused)
        with ServiceClient(base_url="local") as service:
            assert service.get_console_url().startswith(f"{base_url}/console")


def test_what_was_trained_privately_is_adopted_by_a_server_with_keys(
    cli, machine, data, start_server
):
    assert cli("train", "sft", data, *SFT, "--name", "own").code == 0
    end_private(machine)
    target = machine / "server"
    assert cli("keys", "add", "--user", "ann", "--data-dir", target).code == 0
    refused = cli("admin", "adopt", machine / "local-toy", "--data-dir", target)
    assert (refused.code, "--owner USER" in refused.err) == (1, True), refused.err
    told = ("--owner", "ann", "--data-dir", target, "--json")
    adopted = cli("admin", "adopt", machine / "local-toy", *told)
    assert [run["name"] for run in adopted.json["adopted"]] == ["own"], adopted.err
    key = cli("keys", "add", "--user", "ann", "--data-dir", target, "--json").json["key"]
    with start_server(target, "--engine", "toy") as base_url:
        os.environ["TINKER_API_KEY"] = key
        try:
            listed = cli("run", "list", "--json", "--base-url", base_url).json["runs"]
            assert [run["name"] for run in listed] == ["own"]
        finally:
            del os.environ["TINKER_API_KEY"]


def test_a_renamed_run_of_another_server_is_found_by_its_new_name(
    cli, machine, data, start_server, monkeypatch
):
    """While the private server runs, which is the first to be asked and does not have it."""
    with start_server(
        machine / "server", "--engine", "toy", env={"TINKEX_HOME": str(machine)}
    ) as url:
        for name, server in (("served", url), ("own", "local")):
            ran = cli("train", "sft", data, *SFT, "--name", name, "--base-url", server)
            assert ran.code == 0, ran.err
        with ServiceClient(base_url="local") as private:
            private.get_server_capabilities()  # it runs from here on, and until the end
            renamed = cli("run", "rename", "served", "caps", "--json").json
            noted = cli("run", "note", "caps", "first", "--json")
            assert (noted.code, noted.json["note"]) == (0, "first"), noted.err
            for text in ("caps", renamed["training_run_id"], "served"):
                told = cli("run", "info", text, "--json")
                assert told.code == 0, (text, told.out, told.err)
                assert told.json["training_run_id"] == renamed["training_run_id"]
            assert "No training run 'nobody'" in cli("run", "info", "nobody").err
            assert "No training run 'caps'" in cli("run", "info", "caps", "--base-url", "local").err
            monkeypatch.setenv("TINKER_BASE_URL", "local")
            assert "No training run 'caps'" in cli("run", "info", "caps").err, "one is named"


def test_what_the_private_server_has_is_found_beside_a_server_that_commands_join(
    cli, machine, data, start_server
):
    """By path, also where no folder here knows it; as what a run starts from; in lists."""
    ran = cli("train", "sft", data, *SFT, "--name", "own", "--json")
    assert ran.code == 0, ran.err
    sampler_path = ran.json["sampler_path"]
    end_private(machine)
    beside = {"TINKEX_HOME": str(machine)}
    with start_server(machine / "server", "--engine", "toy", env=beside) as url:
        joined = cli("run", "list", "--json")
        assert joined.json["runs"] == [], joined.err
        for text in (sampler_path, "own"):
            told = cli("checkpoint", "info", text, "--json")
            assert told.code == 0, (told.out, told.err)
            assert told.json["tinker_path"] == sampler_path
        start = ("--epochs", "1", "--batch-size", "2", "--eval-share", "0")
        on = cli("train", "sft", data, *start, "--from", "own", "--name", "on", "--json")
        assert on.code == 0, on.err
        listed = cli("checkpoint", "list", "--run-id", "on", "--json")
        assert (listed.code, on.json["state_path"] in listed.out) == (0, True), listed.err
        (machine / "runs.json").unlink()  # as for a run that another program made
        for find, text, path in (
            (resolve, sampler_path, sampler_path),
            (resolve_start, "on", on.json["state_path"]),  # by its name on its server
        ):
            end_private(machine)
            state = State()
            assert (find(state, text), state.base_url) == (path, "local")
        everywhere = {
            one["server"] for one in cli("run", "list", "--all", "--json").json["servers"]
        }
        assert everywhere == {"local", url}
        tables = cli("run", "list", "--all").out
        for server in everywhere:  # with the tables, also when they go to a file
            assert f"Runs of the server {server} (" in tables


def test_a_run_whose_server_is_gone_is_found_on_the_server_that_adopted_it(cli, machine, data):
    ran = cli("train", "sft", data, *SFT, "--name", "own", "--json")
    assert ran.code == 0, ran.err
    port = HeldPort()
    folder = data.parent / "runs" / "own"
    (folder / "server.json").write_text(json.dumps({"server": f"http://127.0.0.1:{port.number}"}))
    told = cli("checkpoint", "info", "own", "--json")
    assert told.code == 0, (told.out, told.err)
    assert told.json["tinker_path"] == ran.json["sampler_path"]
    resumed = cli("train", "resume", "own", "--json")
    assert (resumed.code, resumed.out and resumed.json["steps"]) == (0, 2), resumed.err


def test_a_server_of_this_machine_that_does_not_answer_hides_no_other(cli, machine, data):
    ran = cli("train", "sft", data, *SFT, "--name", "own", "--json")
    assert ran.code == 0, ran.err
    port = HeldPort()
    record = {"base_url": f"http://127.0.0.1:{port.number}", "pid": os.getpid(), "needs_key": False}
    (machine / "serving").mkdir()
    (machine / "serving" / "1.json").write_text(json.dumps({**record, "data_dir": "/elsewhere"}))
    shown = cli("run", "list", "--all", "--json")
    assert [one["server"] for one in shown.json["servers"]] == ["local"], shown.err
    assert f"{record['base_url']} shows no runs" in shown.err
    renamed = cli("run", "rename", "own", "caps")
    assert renamed.code == 0, renamed.err
    assert cli("run", "info", "nobody").code == 1
    assert cli("run", "info", "caps", "--json").json["name"] == "caps"
    state = State()
    assert resolve(state, "caps") == ran.json["sampler_path"]


def test_a_renamed_run_is_still_found_by_the_name_of_its_folder(cli, machine, data):
    """`tinkex train` goes on to recommend it; the private server took it for a base model."""
    ran = cli("train", "sft", data, *SFT, "--name", "own", "--json")
    assert ran.code == 0, ran.err
    assert cli("run", "rename", "own", "caps").code == 0
    for name in ("own", "caps"):
        assert resolve(State(), name) == ran.json["sampler_path"]


def test_a_private_server_needs_no_certificates(cli, machine, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(machine / "nothing.pem"))
    ran = cli("run", "list", "--json")
    assert (ran.code, ran.out and ran.json["runs"]) == (0, []), ran.err
    named = cli("chat", "nobody", "-p", "Hi")
    assert "certificates" not in named.err


@pytest.mark.parametrize("name", ["small", "letters", "caps"])
def test_a_name_means_the_same_to_the_command_line_and_to_openai_clients(
    cli, machine, data, start_server, name
):
    """A local run is called like a base model, like a named checkpoint, like a newer run."""
    ran = cli("train", "sft", data, *SFT, "--name", name, "--json")
    assert ran.code == 0, ran.err
    end_private(machine)
    folder = machine / "local-toy"
    flags = ("--engine", "toy", "--model", DEFAULT_MODEL, "--alias", f"small={DEFAULT_MODEL}")
    with start_server(folder, *flags, env={"TINKEX_HOME": str(machine)}) as base_url:
        with ServiceClient(base_url=base_url, api_key="tml-x") as service:
            training = service.create_lora_training_client(DEFAULT_MODEL, rank=2, name="caps")
            path = training.save_weights_for_sampler("newer").result().path
            service.create_rest_client().name_checkpoint(path, "letters").result()
        told = httpx.get(f"{base_url}/v1/models/{name}").json()["path"]
        assert told == (None if name == "small" else path)
        assert resolve(State(), name) == (told or "small")
        listed = httpx.get(f"{base_url}/v1/models").json()["data"]
        parents = {model["id"]: model["parent"] for model in listed}
        assert {parents.pop("small"), parents.pop(DEFAULT_MODEL)} == {None}
        assert {"letters", "caps"} <= parents.keys()
        assert set(parents.values()) == {DEFAULT_MODEL}
        missed = httpx.get(f"{base_url}/v1/models/letter").json()
        assert "'letters'" in str(missed)
        assert "letters" in cli("chat", "letter", "-p", "Hi").err


@pytest.mark.parametrize("changed", ["by somebody else", "afterwards"])
def test_the_code_that_a_foreign_folder_names_is_not_run(cli, machine, data, changed, monkeypatch):
    code = "from pathlib import Path\n\n"
    code += "def reward(completion):\n    Path('ran').write_text('x')\n    return 1.0\n"
    code += "def prompts():\n    return [{'prompt': 'Hi'}] * 2\n"
    for name in ("mine.py", "evil.py"):
        (data.parent / name).write_text(code)
    flags = ("--steps", "1", "--prompts-per-step", "1", "--group-size", "2", "--max-tokens", "2")
    ran = cli("train", "rl", "mine.py:reward", *flags, "--rank", "2", "--log-dir", "log")
    assert ran.code == 0, ran.err
    assert cli("train", "resume", "log").code == 0, "one's own goes on"
    (data.parent / "ran").unlink(missing_ok=True)
    if changed == "afterwards":
        command = data.parent / "log" / "command.json"
        command.write_text(command.read_text().replace("mine.py", "evil.py"))
    else:
        (machine / "commands.key").unlink()  # as on another machine
    refused = cli("train", "resume", "log")
    assert (refused.code, "was not typed by you" in refused.err) == (1, True), refused.err
    assert not (data.parent / "ran").exists()
