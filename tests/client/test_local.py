"""No key, no URL: a server of one's own starts, is shared, and ends with its last client."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import until
from recovery_world import wait_until

import tinkex
from tinkex.cli import address
from tinkex.client.config import ClientConfig
from tinkex.client.http.backends import make_httpx
from tinkex.client.session import embedded_server
from tinkex.conformance.probe import Probe
from tinkex.errors import LocalServerError
from tinkex.store import Store
from tinkex.wire.local_servers import read_record

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINKEX_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_LOCAL_ENGINE", "toy")
    monkeypatch.setattr(embedded_server, "IDLE_S", 0.5)
    return tmp_path


def _ended(pid: int, within_s: float) -> bool:
    """Whether the server that we started as `pid` ends by itself."""
    child = next(child for child in embedded_server._children if child.pid == pid)
    try:
        return child.wait(within_s) is not None
    except subprocess.TimeoutExpired:
        return False


def _listens(base_url: str) -> bool:
    host, _, port = base_url.removeprefix("http://").partition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0


def test_a_client_without_a_key_starts_a_server_others_join_it_and_it_ends(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tinkex.local"), tinkex.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        prompt, params = (
            tinkex.ModelInput.from_ints([1, 2]),
            tinkex.SamplingParams(max_tokens=3, stop=[]),
        )
        assert len(sampler.sample(prompt, 1, params).result(60).sequences[0].tokens) == 3
        started = [r for r in caplog.records if "Starting a private server" in r.getMessage()]
        assert len(started) == 1
        record = json.loads((home / "local-toy.json").read_text())
        seen = subprocess.run(
            [sys.executable, "-c", "import tinkex; s = tinkex.ServiceClient();"
             "s.get_server_capabilities(); print(s._sessionless().config.base_url)"],
            capture_output=True, text=True, timeout=500, check=True,
        )  # fmt: skip
        assert seen.stdout.strip() == record["base_url"]
    assert _ended(record["pid"], within_s=60)


def test_behind_a_proxy_servers_of_this_machine_are_reached_directly(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    with tinkex.ServiceClient() as service:
        assert service.get_server_capabilities().supported_models
        base_url = service._sessionless().config.base_url
        assert address.send("GET", base_url, "/healthz", "tml-k").json() == {"status": "ok"}
        with contextlib.closing(Probe(base_url, "tml-k")) as probe:
            assert probe.http.get("healthz").status_code == 200
    tls = ClientConfig(base_url="https://localhost:8765", api_key="tml-k")
    client = make_httpx(tls)
    assert client._transport_for_url(httpx.URL(tls.base_url)) is client._transport


def test_it_loads_whatever_model_is_asked_for(home: Path) -> None:
    """Two programs with two models share one private server."""
    with tinkex.ServiceClient(model="acme/first") as one, tinkex.ServiceClient() as two:
        first = one.create_lora_training_client(rank=2)
        second = two.create_lora_training_client("acme/second", rank=2)
        assert first.get_info().model_data.model_name == "acme/first"
        assert second.get_info().model_data.model_name == "acme/second"
        assert one.create_sampling_client().get_base_model() == "acme/first"
        assert one.holder.config.base_url == two.holder.config.base_url
        names = [m.model_name for m in two.get_server_capabilities().supported_models]
        assert {"acme/first", "acme/second"} <= set(names)


def test_a_dead_record_is_replaced_and_a_broken_server_shows_its_last_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "local-nonsense.json").write_text('{"base_url": "http://127.0.0.1:1"}')
    monkeypatch.setenv("TINKEX_LOCAL_ENGINE", "nonsense")
    with pytest.raises(LocalServerError, match="(?s)ended at once.*nonsense"):
        tinkex.ServiceClient().get_server_capabilities()


@pytest.fixture
def own_server(home: Path, start_server: Callable[..., Any]) -> Callable[..., Any]:
    """A `tinkex serve` of the same user."""
    (home / "server").mkdir()
    return lambda *flags: start_server(
        home / "server", "--engine", "toy", *flags, env={"TINKEX_HOME": str(home)}
    )


def _address() -> str:
    with tinkex.ServiceClient() as service:
        service.get_server_capabilities()
        return service._sessionless().config.base_url


def test_ones_own_server_is_joined_where_it_has_the_model(
    home: Path, own_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with own_server() as base_url:
        assert _address() == base_url
        assert f"Using your server at {base_url}" in caplog.text
        assert not (home / "local-toy").exists()
    assert not list((home / "serving").iterdir()), "a server that ended is not announced"


def test_local_means_the_private_server_and_a_client_says_how_to_come_back(
    home: Path, own_server: Callable[..., Any]
) -> None:
    with own_server() as base_url:
        with tinkex.ServiceClient() as joined:
            assert joined.get_server_address() == base_url
        with tinkex.ServiceClient(base_url="local") as private:
            assert private.get_server_address() == "local"
            assert private._sessionless().config.base_url != base_url
        assert (home / "local-toy").exists()


@pytest.fixture
def plain_serve(home: Path, start_server: Callable[..., Any]) -> Callable[..., Any]:
    """A `tinkex serve` of the same user that names no data folder."""
    (home / "logs").mkdir()
    env = {"TINKEX_HOME": str(home)}
    return lambda *flags: start_server(
        home / "logs", "--engine", "toy", *flags, env=env, names_folder=False
    )


def _end_private(home: Path) -> None:
    pid = read_record(home / "local-toy.json")["pid"]
    for child in embedded_server._children:
        if child.pid == pid:
            child.kill()
            child.wait()


def test_a_server_that_names_no_folder_has_the_runs_of_the_private_one(
    home: Path, plain_serve: Callable[..., Any]
) -> None:
    """And the other way round; `local` means whoever has them."""
    with tinkex.ServiceClient() as private:
        private.create_lora_training_client("toy", rank=4, name="before")
    _end_private(home)
    with plain_serve() as base_url:
        for config in ({}, {"base_url": "local"}):
            with tinkex.ServiceClient(**config) as joined:
                assert joined.get_server_address() == "local"
                assert joined._sessionless().config.base_url == base_url
        with tinkex.ServiceClient() as joined:
            joined.create_lora_training_client("toy", rank=4, name="beside")
            runs = joined.create_rest_client().list_training_runs().result().training_runs
            assert [run.name for run in runs] == ["beside", "before"]
    with tinkex.ServiceClient() as private:
        runs = private.create_rest_client().list_training_runs().result().training_runs
        assert [run.name for run in runs] == ["beside", "before"]


@pytest.mark.parametrize(
    ("flags", "folder"),
    [((), "local-toy"), (("--api-key", "tml-a=ann"), "server"), (("--model", "acme/a"), "server")],
)
def test_only_a_server_for_oneself_shares_the_private_folder(
    home: Path, plain_serve: Callable[..., Any], flags: tuple[str, ...], folder: str
) -> None:
    with plain_serve(*flags):
        assert [path.parent.name for path in home.glob("*/tinkex.db")] == [folder]


def test_a_server_that_was_there_before_keeps_its_folder(
    home: Path, plain_serve: Callable[..., Any]
) -> None:
    (home / "server").mkdir()
    Store.in_folder(home / "server").close()
    with plain_serve():
        assert not (home / "local-toy" / "tinkex.db").exists()


def test_a_private_server_in_use_is_not_taken_over(home: Path) -> None:
    with tinkex.ServiceClient() as private:
        private.get_server_capabilities()
        command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--engine", "toy"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert refused.returncode == 1
        assert f"tinkex serve --data-dir {home / 'server'}" in refused.stderr


def test_a_key_for_a_server_that_shares_the_folder_closes_it(
    home: Path, plain_serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_serve() as base_url:
        added = [sys.executable, "-m", "tinkex.cli", "keys", "add", "--user", "alice"]
        monkeypatch.setenv("TINKEX_SERVER_ENGINE", "toy")
        subprocess.run(added, check=True, capture_output=True, timeout=500)
        assert not (home / "server" / "tinkex.db").exists()
        until(lambda: httpx.get(f"{base_url}/api/v1/training_runs").status_code == 401)


@pytest.mark.parametrize("flags", [("--model", "acme/other"), ("--api-key", "tml-secret=alice")])
def test_a_server_that_does_not_fit_runs_beside_the_private_one(
    home: Path, own_server: Callable[..., Any], flags: tuple[str, ...]
) -> None:
    """Each has a folder of its own: neither waits for the other, and neither is refused."""
    with own_server(*flags) as base_url:
        assert _address() not in ("", base_url)
        assert (home / "local-toy" / "tinkex.db").exists()


def test_keys_of_ones_own_server_are_none_of_the_private_ones(home: Path) -> None:
    added = [sys.executable, "-m", "tinkex.cli", "keys", "add", "--user", "alice"]
    subprocess.run(added, check=True, capture_output=True, timeout=500)
    assert (home / "server" / "tinkex.db").exists()
    assert _address().startswith("http://127.0.0.1:")


def test_the_server_does_not_inherit_the_clients_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses variables it does not know, and a client's timeout is none of its own."""
    monkeypatch.setenv("TINKEX_CLIENT_TIMEOUT_S", "20")
    with tinkex.ServiceClient(base_url="local") as service:
        models = service.get_server_capabilities().supported_models
        assert [model.model_name for model in models] == [MODEL]
    assert _ended(embedded_server._children[-1].pid, within_s=60)


def _steps(service: tinkex.ServiceClient, disturb: Callable[[int], None]) -> list[float]:
    """Ten steps of a loop that knows nothing of servers; two of them are under way at a time."""
    client = service.create_lora_training_client(MODEL, rank=4, seed=1)
    waiting = []
    for step in range(10):
        disturb(step)
        tokens = [(step * 7 + i) % 50 for i in range(12)]
        inputs = {"target_tokens": tokens, "weights": [1.0] * 12}
        datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens), inputs)
        adam = tinkex.AdamParams(learning_rate=0.05)
        waiting.append(client.train_step([datum], "cross_entropy", adam))
        if step:
            waiting[step - 1].result(120)
    return [future.result(120).loss for future in waiting]


def _kill(home: Path) -> int:
    pid = int(json.loads((home / "local-toy.json").read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    assert _ended(pid, within_s=60)
    return pid


def test_a_killed_server_is_started_again_and_the_loop_never_hears_of_it(home: Path) -> None:
    """Same port, same data: the journal brings session, run and promises back."""
    killed = []

    def kill(step: int) -> None:
        if step in (4, 7):
            killed.append(_kill(home))

    with tinkex.ServiceClient() as service:
        expected = _steps(service, lambda step: None)
        url = service.holder.config.base_url
        assert _steps(service, kill) == expected
        record = json.loads((home / "local-toy.json").read_text())
        assert record["base_url"] == url
        assert len({*killed, record["pid"]}) == 3
    assert _ended(record["pid"], within_s=60)


_NEIGHBOUR = """
import sys, tinkex
service = tinkex.ServiceClient()
client = service.create_lora_training_client({model!r}, rank=4, seed=1)
print("ready", flush=True)
sys.stdin.readline()
print(client.get_info().model_id == client.model_id, service.holder.config.base_url, flush=True)
sys.stdin.readline()
"""


def test_two_programs_that_share_a_server_both_go_on_when_it_is_killed(home: Path) -> None:
    """Whoever finds it dead first starts it; the other one finds it where it was."""
    program = [sys.executable, "-c", _NEIGHBOUR.format(model=MODEL)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tinkex.ServiceClient() as service,
        subprocess.Popen(program, **pipes) as neighbour,
    ):
        client = service.create_lora_training_client(MODEL, rank=4, seed=1)
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "ready\n"
        _kill(home)
        print(file=neighbour.stdin, flush=True)
        assert client.get_info().model_id == client.model_id
        url = service.holder.config.base_url
        assert neighbour.stdout.readline() == f"True {url}\n"
        record = json.loads((home / "local-toy.json").read_text())
        assert (record["base_url"], len(record["restarts"])) == (url, 1)
        neighbour.communicate("\n", timeout=500)


def test_a_server_that_keeps_dying_is_given_up_with_its_last_words(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "MAX_RESTARTS", 1)
    with tinkex.ServiceClient() as service:
        service.create_lora_training_client(MODEL, rank=4, seed=1)
        _kill(home)
        client = service.create_lora_training_client(MODEL, rank=4, seed=1)  # started again
        _kill(home)
        with pytest.raises(LocalServerError, match=r"(?s)died 2 times.*data is safe.*last words"):
            client.get_info()


# The handler registered first runs last, and drops what the end of the interpreter would.
ENDS_FIRST = """
import atexit
atexit.register(lambda: embedded_server._children.clear())
import tinkex
from tinkex.client.session import embedded_server
embedded_server.IDLE_S = 0.5
tinkex.ServiceClient().get_server_capabilities()
"""


def test_a_program_may_end_before_the_server_it_started(home: Path) -> None:
    """Python has nothing to warn of: the server goes when it has noticed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", ENDS_FIRST],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert "still running" not in done.stderr
    base_url = json.loads((home / "local-toy.json").read_text())["base_url"]
    wait_until(lambda: not _listens(base_url))
