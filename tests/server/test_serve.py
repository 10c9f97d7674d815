"""The server as a process: its first line, its signals, its last client, its operators."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from patience import until
from server_process import ServerProcess, refused_start
from wire_client import WireClient, model_body


def test_it_says_no_in_one_shape(client: WireClient) -> None:
    for path, status in (("nowhere", 404), ("optim_step", 400)):
        response = client.post(path, {"model_id": 3})
        assert response.status_code == status
        body = response.json()
        assert body["detail"]
        assert body["category"] == "user"
        assert int(response.headers["content-length"]) > 0


def test_operators_see_health_and_metrics(toy_process: ServerProcess, client: WireClient) -> None:
    client.session()
    base = toy_process.base_url
    assert httpx.get(f"{base}/healthz").json() == {"status": "ok"}
    until(lambda: httpx.get(f"{base}/readyz").status_code == 200)
    text = httpx.get(f"{base}/metrics").text
    assert 'tinkex_http_requests_total{route="/api/v1/create_session",status="200"}' in text
    assert "tinkex_workers_ready 1.0" in text


def test_sigterm_ends_it_gracefully_while_a_poll_waits(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        client = WireClient(server.base_url)
        model = client.model(client.session())
        body = json.dumps(client.train(model, 9, [1]))
        head = "POST /api/v1/retrieve_future HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-test\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as poll:
            poll.sendall((head + body).encode())
            client.session()  # came later, and is answered: the poll is held by now
            workers = server.worker_pids()
            assert server.stop() == 0
            assert poll.recv(13) == b"HTTP/1.1 408 "
        client.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_server_leaves_no_worker_behind(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        workers = server.worker_pids()
        assert workers
        server.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_private_server_ends_with_its_last_client(tmp_path: Path) -> None:
    first, second = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in "ab"
    )
    flags = ("--engine", "toy", "--until-idle", "1", "--parent-pid", str(first.pid))
    with ServerProcess(tmp_path, *flags) as server:
        process = server._process
        assert process is not None
        attached = httpx.post(f"{server.base_url}/tinkex/v1/attach", json={"pid": second.pid})
        assert attached.status_code == 200
        first.communicate(b"\n")
        time.sleep(2.5)
        assert process.poll() is None, "its client lives, however quiet"
        second.communicate(b"\n")
        assert process.wait(timeout=60) == 0


def test_it_refuses_to_start_on_a_busy_port_or_with_wrong_settings(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        busy = refused_start("--port", str(server.port), "--data-dir", str(tmp_path / "b"))
        assert "cannot listen" in busy
    assert "no api key" in refused_start("--host", "0.0.0.0")
    assert "expected NAME=MODEL" in refused_start("--alias", "x")
    (tmp_path / "flag.toml").write_text("workers = 2\n")  # the name of the flag
    assert "'workers'. Did you mean 'num_workers'?" in refused_start(
        "--config", str(tmp_path / "flag.toml")
    )


def test_ctrl_c_reaches_the_worker_only_through_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        client = WireClient(server.base_url)
        client.model(client.session())
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGINT)
        client.model(client.session())
        assert server.worker_pids() == [worker]
        client.close()


def test_a_second_ctrl_c_cuts_off_what_runs_and_shows_no_traceback(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("stop_grace_s = 600\n")
    flags = ("--engine", "toy:latency_s=600", "--config", str(settings))
    with ServerProcess(tmp_path, *flags) as server, httpx.Client(timeout=30) as http:
        sample = {
            "base_model": "toy",
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 5},
        }
        with http.stream("POST", f"{server.base_url}/api/v1/sample_stream", json=sample):
            os.kill(server.pid, signal.SIGINT)
            deadline = time.monotonic() + 60
            while "stopping; what was accepted is kept" not in server.log:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert server.stop() == 0
        assert "stopping now" in server.log
        assert "Traceback" not in server.log


def test_a_request_that_does_not_end_ends_with_the_grace(tmp_path: Path) -> None:
    """And what was accepted goes on after the next start."""
    settings = tmp_path / "settings.toml"
    settings.write_text("stop_grace_s = 0.2\n")
    flags = ("--config", str(settings))
    with ServerProcess(tmp_path, "--engine", "toy:latency_s=600", *flags) as server:
        client = WireClient(server.base_url)
        sample = {
            "base_model": "toy",
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 5},
        }
        session = client.session()
        body = {**model_body(session), "type": "create_model"}
        promise = client.ok("create_model", body)
        url = f"{server.base_url}/api/v1/sample_stream"
        with client.http.stream("POST", url, json=sample):
            assert server.stop() == 0
        assert "Traceback" not in server.log
        server._flags = ("--engine", "toy", *flags)
        server.start()
        assert client.result(promise)["model_id"]
        client.close()
