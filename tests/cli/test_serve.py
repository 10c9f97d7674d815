"""`tinkex serve` as its user meets it: a terminal, a pipe, and settings that cannot work."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinkex.server.greeting import greeting
from tinkex.server.process.config import ServerConfig


def _serve(folder: Path, *flags: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tinkex.cli", "serve", "--port", "0"]
    command += ["--data-dir", str(folder), *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    env["TINKEX_HOME"] = str(folder)
    return subprocess.Popen(command, env=env, **options)  # type: ignore[call-overload]


def _on_terminal(folder: Path, *flags: str, until: str) -> str:
    """What a terminal shows until `until` is on it; then Ctrl-C."""
    ours, theirs = pty.openpty()
    server = _serve(folder, *flags, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 100
    while until not in shown and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.5)[0]:
            shown += os.read(ours, 4096).decode()
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=200) == 0
    os.close(ours)
    return shown.replace("\r\n", "\n")


def test_a_terminal_is_told_where_what_and_how_to_connect_and_stop(tmp_path):
    shown = _on_terminal(tmp_path, "--engine", "toy", until="Ctrl-C")
    assert "listens on http://127.0.0.1:" in shown
    assert "model     tinkex/SmolLM2-135M-Instruct-Q4 (toy engine" in shown
    assert "TINKER_BASE_URL=http://127.0.0.1:" in shown
    assert str(tmp_path) in shown
    assert '{"port"' not in shown


def test_json_on_a_terminal_when_asked_for(tmp_path):
    shown = _on_terminal(tmp_path, "--engine", "toy", "--json", until="}")
    assert json.loads(shown)["base_url"].startswith("http://127.0.0.1:")


def test_a_pipe_gets_one_json_line_and_the_log_level_counts(tmp_path):
    flags = ("--engine", "toy", "--until-idle", "1", "--log-level")
    out, err = _serve(
        tmp_path, *flags, "info", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ).communicate(timeout=500)
    assert [*json.loads(out)] == ["port", "base_url"]
    first = err.decode().splitlines()[0]
    assert "effective config beside the defaults" in first
    assert (len(first) < 300, '"engine": "toy"' in first) == (True, True), first
    _, err = _serve(
        tmp_path, *flags, "warning", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ).communicate(timeout=500)
    assert err == b""


def test_a_port_in_use_is_all_that_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ("--engine", "toy", "--port", str(taken.getsockname()[1]))
        _, err = _serve(
            tmp_path, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ).communicate(timeout=500)
    assert len(err.decode().splitlines()) == 1, err
    assert b"Another server may hold the port" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cuda:99"], "engine.device is 'cuda:99'"),
        (["--model", "/no/such/folder"], "there is no model at /no/such/folder"),
        (["--model", "NoSuch/Model"], "No base model 'NoSuch/Model'"),
        (["--device", "mps"], "device 'mps' cannot be used"),
        (["--device", "xpu:0"], "device 'xpu:0' cannot be used"),
    ],
)
def test_what_cannot_work_ends_the_server_in_words(tmp_path, flags, says):
    server = _serve(tmp_path, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = server.communicate(timeout=500)
    text = err.decode()
    assert server.returncode == 1
    assert out == b"" or "cuda" in says, "it announced an address that cannot work"
    assert f"Error: {says}" in text
    assert "Traceback" not in text


def test_a_folder_in_use_is_told_before_the_wait(tmp_path):
    first = _serve(tmp_path, "--engine", "toy", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert first.stdout is not None
    assert first.stdout.readline()
    second = _serve(tmp_path, "--engine", "toy", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert second.stderr is not None
    lines = iter(second.stderr.readline, b"")
    waits = next(line.decode() for line in lines if b"Waiting" in line)
    assert "Another server uses" in waits
    assert f"(process {first.pid})" in waits
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=500)
    assert second.poll() is None, "it takes over once the first is gone"
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=500)


def test_the_greeting_names_keys_other_machines_and_what_was_set(tmp_path):
    config = ServerConfig(
        host="0.0.0.0", data_dir=tmp_path, api_keys=("tml-secret=alice",), snapshot_every_ops=7
    )
    text = greeting(config, "http://127.0.0.1:8765", needs_key=True)
    assert "TINKER_API_KEY=tml-... TINKER_BASE_URL=http://127.0.0.1:8765" in text
    assert f"from other machines: http://{os.uname().nodename}:8765" in text
    assert "console   http://127.0.0.1:8765/console" in text
    assert "snapshot_every_ops = 7" in text
    assert "secret" not in text
