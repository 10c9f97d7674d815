"""Commands from the browser: the owner's, as child processes; for everyone else a line to type."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from patience import PATIENCE_S, soon, until
from visits import token_of

import tinkex
from tinkex.cli.commands.console import _link as console_link
from tinkex.runs.names import remember
from tinkex.server.console import launcher as launchers
from tinkex.server.console.command_line import arguments, line
from tinkex.server.console.folder_pages import create_app
from tinkex.server.console.launcher import Launcher
from tinkex.server.console.resumption import folder_of_run, is_resumable
from tinkex.server.process.problems import ApiError

FORM = {
    "fields": [
        {"name": "data", "flag": None, "kind": "text", "is_required": True},
        {"name": "rank", "flag": "--rank", "kind": "integer", "is_required": False},
        {"name": "tracker", "flag": "--tracker", "kind": "choice", "is_required": False},
        {"name": "force", "flag": "--force", "kind": "flag", "is_required": False},
    ]
}
for one in FORM["fields"]:
    one |= {"choices": ["wandb", "trackio"] if one["name"] == "tracker" else []}
    one |= {"is_multiple": one["name"] == "tracker"}


def test_a_form_becomes_arguments_and_never_a_shells_words():
    hostile = "$(touch x); `id` 'a\"b'"
    assert arguments(FORM, {"data": hostile, "rank": "8"}) == [hostile, "--rank=8"]
    assert (
        line(["train", "sft", hostile]) == "tinkex train sft '$(touch x); `id` '\"'\"'a\"b'\"'\"''"
    )
    assert arguments(FORM, {"data": "--log-dir=/", "force": "yes"}) == [
        "--force",
        "--",
        "--log-dir=/",
    ]
    assert arguments(FORM, {"data": "-x"}, "--base-url=u") == ["--base-url=u", "--", "-x"]
    assert arguments(FORM, {"data": "a", "tracker": "wandb\ntrackio", "other": "x"}) == [
        "a",
        "--tracker=wandb",
        "--tracker=trackio",
    ]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "DATA is needed"),
        ({"data": "a\0b"}, "DATA must be a text"),
        ({"data": "a", "tracker": "other"}, "--tracker is one of wandb, trackio"),
    ],
)
def test_a_form_that_cannot_be_a_command_is_refused(values: dict[str, str], says: str):
    with pytest.raises(ApiError, match=says):
        arguments(FORM, values)


@pytest.fixture(scope="module")
def world(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("launches")
    with start_server(folder, "--engine", "toy") as base_url:
        yield SimpleNamespace(base_url=base_url, folder=folder)


def _owner_token(world: SimpleNamespace) -> str:
    [file] = world.folder.rglob("serving/*.json")
    assert file.parent.stat().st_mode & 0o077 == 0, "nobody else may read it"
    return str(json.loads(file.read_text())["owner_token"])


def test_on_an_open_server_only_its_owner_starts_commands(world: SimpleNamespace):
    """Everybody on this machine reaches it; a recipe reads files in the name of its owner."""
    with httpx.Client(base_url=world.base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
        page = client.get("/console/start/sft")
        assert "this server starts no commands for its visitors" in page.text
        form = {"form_token": token_of(page.text), "data": "missing.jsonl", "rank": "4"}
        assert client.post("/console/start/sft", data=form).status_code == 403
        told = client.post("/console/api/start/sft/command", data=form).json()["command"]
        assert told == f"tinkex train sft missing.jsonl --rank=4 --base-url={world.base_url}"
        client.get("/console/owner", params={"token": "wrong"})
        assert client.post("/console/start/sft", data=form).status_code == 403
        client.get("/console/owner", params={"token": _owner_token(world)})
        # What everybody is given is no use to a page on another port, which has the owner's cookie.
        assert client.post("/console/start/sft", data=form).status_code == 403
        form["form_token"] = token_of(client.get("/console/start/sft").text)
        started = client.post("/console/start/sft", data=form)
        assert started.status_code == 200
        told = _until_ended(client, started.url.path)
        assert told["command"] == "tinkex train sft missing.jsonl --rank=4"
        assert told["status"] == "failed"
        assert "missing.jsonl" in told["log"]


def test_the_link_of_tinkex_console_makes_its_owner_one_whatever_key_is_set(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    [file] = world.folder.rglob("serving/*.json")
    monkeypatch.setenv("TINKEX_HOME", str(file.parent.parent))
    for key in ("", "tml-local", "tml-of-another-server"):
        link = console_link(world.base_url, key)
        assert link == f"{world.base_url}/console/owner?token={_owner_token(world)}", key


def _until_ended(client: httpx.Client, path: str) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def has_ended() -> bool:
        told.update(client.get(path.replace("/console/", "/console/api/")).json())
        return told["status"] != "running"

    until(has_ended, lambda: str(told))
    return told


def test_another_tenant_and_an_administrator_get_the_command(
    start_server: Any, tmp_path: Path
) -> None:
    key = "tml-admin-0123456789abcdef"
    with (
        start_server(tmp_path, "--engine", "toy", "--api-key", key) as base_url,
        httpx.Client(base_url=base_url, headers={"X-API-Key": key}, timeout=PATIENCE_S) as client,
    ):
        page = client.get("/console/start/rl").text
        assert "this server starts no commands for its visitors" in page
        form = {"form_token": token_of(page), "reward": "r.py:f"}
        refused = client.post("/console/start/rl", data=form)
        assert refused.status_code == 403
        assert "type the command" in refused.text
        assert client.get("/console/launches/x").status_code == 403
        assert not [
            file for file in tmp_path.rglob("serving/*.json") if "owner" in file.read_text()
        ]


def test_a_checkpoint_is_exported_from_the_browser(world: SimpleNamespace, tmp_path: Path):
    with tinkex.ServiceClient(base_url=world.base_url) as service:
        training = service.create_lora_training_client("toy", rank=4)
        path = training.save_weights_for_sampler("final").result().path
    with httpx.Client(base_url=world.base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
        client.get("/console/owner", params={"token": _owner_token(world)})
        form = {"form_token": token_of(client.get("/console").text), "path": path}
        form["output"] = str(tmp_path / "adapter")
        started = client.post("/console/start/export", data=form)
        told = _until_ended(client, started.url.path)
        assert 'id="hint"' not in client.get(started.url.path).text, "it has nothing to resume"
    assert told["status"] == "finished", told["log"]
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


async def test_commands_are_bounded_stopped_and_end_with_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launchers, "MAX_RUNNING", 2)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    long = ["serve", "--engine", "toy", "--port", "0", "--data-dir"]
    launcher = Launcher(tmp_path, {}, needs_token=True)
    first = await launcher.start([*long, str(tmp_path / "a")], "")
    second = await launcher.start([*long, str(tmp_path / "b")], "")
    with pytest.raises(ApiError, match="2 commands run already"):
        await launcher.start(["version"], "")
    for launch in (first, second):
        await soon(lambda one=launch: b"base_url" in one.output, launch.facts)
    launcher.stop(first)
    await asyncio.wait_for(first.process.wait(), PATIENCE_S)
    assert first.status in ("finished", "stopped")
    third = await launcher.start(["version"], "")
    await asyncio.wait_for(third.process.wait(), PATIENCE_S)
    await launcher.close()
    assert second.process.returncode is not None
    assert third.status == "finished"
    assert third.facts()["log"].strip()


async def test_a_console_ends_though_a_command_left_a_program_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The program keeps the pipe of the command's output; it leaves even the command's session."""
    monkeypatch.setattr(launchers, "STOP_S", 0.3)
    away = "os.setsid(), print(os.getpid(), flush=True), time.sleep(900)"
    away = f"import os, time; os.fork() or ({away})"
    monkeypatch.setattr(launchers, "_PROGRAM", (sys.executable, "-c", away))
    launcher = Launcher(tmp_path, {}, needs_token=True)
    launch = await launcher.start([], "")
    await soon(lambda: launch.output.endswith(b"\n"), launch.facts)
    # Not `wait`: on some Pythons that waits for the end of the pipe.
    await soon(lambda: launch.process.returncode is not None)
    await asyncio.wait_for(launcher.close(), PATIENCE_S)
    os.kill(int(launch.output), signal.SIGKILL)  # it was there all the time


async def test_a_command_takes_no_module_from_the_folder_it_runs_in(tmp_path: Path):
    """The folder may be /tmp, where others write."""
    (tmp_path / "click.py").write_text("raise SystemExit('taken over')")
    launcher = Launcher(tmp_path, {"TINKEX_HOME": str(tmp_path)}, needs_token=True)
    launch = await launcher.start(["version"], "")
    await asyncio.wait_for(launch.process.wait(), PATIENCE_S)
    await launcher.close()
    assert launch.status == "finished", launch.facts()["log"]


async def test_the_console_of_folders_starts_commands_with_its_link_alone(tmp_path: Path):
    app = create_app(tmp_path, "secret")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as stranger:
        assert (await stranger.get("/console/start/sft")).status_code == 303
        assert (await stranger.post("/console/start/sft", data={"data": "x"})).status_code == 401
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"X-API-Key": "secret"}
    ) as client:
        page = (await client.get("/console/start/sft")).text
        assert "<button>Start</button>" in page
        form = {"form_token": token_of(page), "data": "x.jsonl"}
        told = await client.post("/console/api/start/sft/command", data=form)
        assert told.json()["command"] == "tinkex train sft x.jsonl"


# ------------------------------------------------------------------------------------ resuming


def _log_folder(folder: Path, state_path: str, *, step: int = 4, end: int | None = None) -> Path:
    """The files of a run of `tinkex train`, stopped at `step`, or ended where `end` is given."""
    folder.mkdir(parents=True, mode=0o755)
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    (folder / "config.json").write_text(json.dumps({"model": "toy", "log_dir": str(folder)}))
    started = {"command": "sft", "params": {"data": "missing.jsonl"}, "cwd": str(folder.parent)}
    (folder / "command.json").write_text(json.dumps(started))
    saved = {"step": step, "state_path": state_path}
    (folder / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
    if end is not None:
        (folder / "finished.json").write_text(json.dumps({"config": {}, "end": {"step": end}}))
    for file in folder.iterdir():
        os.utime(file, (1.0, 1.0))  # not written just now: nothing runs
    return folder


RUN = "s:train:0"
STATE = f"tinker://{RUN}/weights/a"


def test_a_log_folder_is_resumed_only_where_it_is_the_runs_and_ours(tmp_path: Path):
    """Any client can say that its log folder is /tmp/x; resuming runs what the folder names."""
    stopped = _log_folder(tmp_path / "stopped", STATE)
    assert folder_of_run(str(stopped), {RUN}, Path("/")) == stopped
    assert folder_of_run("stopped", {RUN}, tmp_path) == stopped
    assert folder_of_run(str(stopped), {"other:train:0"}, Path("/")) is None, "of another run"
    for claimed in (None, "", 7, "a\0b", "missing", "../" * 40):
        assert folder_of_run(claimed, {RUN}, tmp_path) is None
    ended = _log_folder(tmp_path / "ended", STATE, end=4)
    assert folder_of_run("ended", {RUN}, tmp_path) is None, "nothing is left to do"
    assert not is_resumable(ended)
    (stopped / "command.json").chmod(0o666)
    assert folder_of_run("stopped", {RUN}, tmp_path) is None, "others may have written it"
    (stopped / "command.json").chmod(0o644)
    stopped.chmod(0o777)
    assert folder_of_run("stopped", {RUN}, tmp_path) is None
    stopped.chmod(0o755)
    (stopped / "checkpoints.jsonl").write_text("")
    assert folder_of_run("stopped", {RUN}, tmp_path) is None, "nothing was saved"


def test_a_named_run_is_found_wherever_its_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = _log_folder(tmp_path / "far" / "away" / "sums", STATE)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    assert folder_of_run("runs/sums", {RUN}, tmp_path) is None
    remember("sums", folder)
    assert folder_of_run("runs/sums", {RUN}, tmp_path) == folder


async def test_a_stopped_folder_is_resumed_from_its_page(tmp_path: Path):
    stopped = _log_folder(tmp_path / "stopped", STATE)
    _log_folder(tmp_path / "ended", STATE, end=4)
    transport = httpx.ASGITransport(app=create_app(tmp_path, "secret"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"X-API-Key": "secret"}
    ) as client:
        listed = (await client.get("/console/api/runs")).json()["runs"]
        runs = {run["name"]: run for run in listed}
        assert {name: run["status"] for name, run in runs.items()} == {
            "stopped": "stopped",
            "ended": "finished",
        }
        addresses = {name: f"/console/runs/{run['run_id']}" for name, run in runs.items()}
        page = (await client.get(addresses["stopped"])).text
        command = f"tinkex train resume {stopped}"
        assert f'<code id="resume-command">{command}</code>' in page
        form = {"form_token": token_of(page)}
        assert "resume-command" not in (await client.get(addresses["ended"])).text
        refused = await client.post(f"{addresses['ended']}/resume", data=form)
        assert (refused.status_code, "cannot be resumed" in refused.text) == (400, True)
        forged = await client.post(f"{addresses['stopped']}/resume", data={"form_token": "x"})
        assert forged.status_code == 403
        started = await client.post(f"{addresses['stopped']}/resume", data=form)
        assert started.status_code == 303
        launch = await client.get(started.headers["location"])
        assert command in launch.text
    await _close(transport)


async def _close(transport: httpx.ASGITransport) -> None:
    await transport.app.state.console.launcher.close()  # type: ignore[attr-defined]


def test_a_servers_run_is_resumed_by_its_owner_alone(world: SimpleNamespace, tmp_path: Path):
    with tinkex.ServiceClient(base_url=world.base_url) as service:
        training = service.create_lora_training_client("toy", rank=4)
        training.log_settings({"log_dir": str(tmp_path / "logs")}).result()
        path = training.save_state("a").result().path
        run = training.model_id
    folder = _log_folder(tmp_path / "logs", path)
    with httpx.Client(base_url=world.base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
        page = client.get(f"/console/runs/{run}").text
        assert f"tinkex train resume {folder}" in page, "the command is shown"
        assert "<button>Resume</button>" not in page
        form = {"form_token": token_of(page)}
        assert client.post(f"/console/runs/{run}/resume", data=form).status_code == 403
        client.get("/console/owner", params={"token": _owner_token(world)})
        page = client.get(f"/console/runs/{run}").text
        assert "<button>Resume</button>" in page
        form = {"form_token": token_of(page)}
        started = client.post(f"/console/runs/{run}/resume", data=form)
        told = _until_ended(client, started.url.path)
    assert told["command"] == f"tinkex train resume {folder}"
    assert "was not typed by you" in told["log"], "nor does a folder that others wrote run anything"


def test_a_servers_run_shows_its_owner_the_rollouts_of_its_log_folder(
    world: SimpleNamespace, tmp_path: Path
):
    """What the server keeps has no rewards and is gone with it; the log folder has both."""
    with tinkex.ServiceClient(base_url=world.base_url) as service:
        training = service.create_lora_training_client("toy", rank=4)
        training.log_settings({"log_dir": str(tmp_path / "logs")}).result()
        path = training.save_state("a").result().path
        run = training.model_id
    folder = _log_folder(tmp_path / "logs", path, end=4)  # also of a run that has ended
    answers = [
        {"step": step, "group": 0, "prompt": "Who?", "text": "Arr!", "tokens": [1], "reward": 0.25}
        for step in (0, 3)
    ]
    lines = "".join(json.dumps(one) + "\n" for one in answers)
    (folder / "rollouts.jsonl").write_text(lines)
    (folder / "rollouts.jsonl").chmod(0o644)
    with httpx.Client(base_url=world.base_url, follow_redirects=True) as client:
        address = f"/console/api/runs/{run}/rollouts"
        assert client.get(address).json()["steps"] == [], "not for everybody of this machine"
        client.get("/console/owner", params={"token": _owner_token(world)})
        told = client.get(address).json()
        assert (told["steps"], told["step"]) == ([0, 3], 3)
        assert told["answers"] == [answers[1]]
        assert told["file"] == str(folder / "rollouts.jsonl")
        page = client.get(f"/console/runs/{run}/rollouts?step=0").text
        assert "reward 0.25" in page
        assert str(folder / "rollouts.jsonl") in page
        folder.chmod(0o777)
        assert client.get(address).json()["steps"] == [], "others may have written it"


async def test_texts_of_the_command_line_have_their_code_as_code(tmp_path: Path):
    transport = httpx.ASGITransport(app=create_app(tmp_path, "secret"))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers={"X-API-Key": "secret"}
    ) as client:
        for path in ("", "/sft", "/dpo", "/rl", "/distill", "/export"):
            page = (await client.get(f"/console/start{path}")).text
            assert "`" not in page, path
        assert "<code>messages</code>" in (await client.get("/console/start/sft")).text
