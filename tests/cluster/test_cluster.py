"""Workers on the nodes of a Ray cluster: the same bits as on one machine, whoever dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_cluster import RayCluster
from server_process import ServerProcess
from wire_client import PROTO, WireClient, model_body, optim_body, train_body

import tinkex
from tinkex.wire import tinker_public_pb2 as pb

PATIENCE_S = 120.0


@pytest.fixture
def node(cluster: RayCluster) -> Iterator[str]:
    node_id = cluster.add()
    yield node_id
    cluster.kill(node_id)  # nothing happens to one that a test has killed


@pytest.fixture
def nodes(cluster: RayCluster, node: str) -> Iterator[list[str]]:
    other = cluster.add()
    yield [node, other]
    cluster.kill(other)


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {what}"
        time.sleep(0.2)


def _gauge(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.base_url}/metrics", timeout=60).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"tinkex_{name} ")))


def _wait_workers(server: ServerProcess, count: int) -> None:
    _until(lambda: _gauge(server, "workers_ready") == count, f"{count} workers are ready")


class Loop:
    """A run of a few steps; everything that the server answered is in `said`."""

    def __init__(self, server: ServerProcess, base_model: str) -> None:
        self.client = WireClient(server.base_url)
        self.base_model = base_model
        self.session = self.client.session()
        self.said: list[Any] = []
        self.model, self.seq_id = self._model(0), 0

    def _model(self, number: int) -> str:
        body = model_body(self.session, number) | {"base_model": self.base_model}
        answer = self.client.result(self.client.ok("create_model", body))
        return str(answer["model_id"])

    def train(self, tokens: list[int]) -> None:
        self.seq_id += 1
        body = train_body(self.model, self.seq_id, tokens)
        promise = self.client.ok("forward_backward", body, headers=PROTO)
        answer = pb.ForwardBackwardOutput.FromString(self.client.result(promise))
        for name in [name for name in answer.metrics if "time_s" in name]:
            del answer.metrics[name]
        self.said.append(answer.SerializeToString(deterministic=True))

    def step(self) -> None:
        self.train([1 + ((self.seq_id + 3) * k) % 90 for k in range(1, 9)])
        self.seq_id += 1
        body = optim_body(self.model, self.seq_id, 0.01)
        metrics = self.client.result(self.client.ok("optim_step", body))["metrics"]
        self.said.append({k: v for k, v in metrics.items() if "time_s" not in k})

    def save(self, name: str, kind: str = "save_weights") -> str:
        self.seq_id += 1
        body = {"model_id": self.model, "seq_id": self.seq_id, "path": name}
        return str(self.client.result(self.client.ok(kind, body))["path"])

    def sample(self, path: str, seed: int) -> None:
        body = {
            "model_path": path,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
            "sampling_params": {"max_tokens": 8, "seed": seed, "temperature": 1.0},
        }
        self.said.append(self.client.result(self.client.ok("asample", body)))

    def load(self, path: str) -> None:
        """Go on with a checkpoint, as another run."""
        self.model, self.seq_id = self._model(1), 1
        body = {"model_id": self.model, "seq_id": 1, "path": path, "optimizer": True}
        self.client.result(self.client.ok("load_weights", body))


def _whole_loop(server: ServerProcess, base_model: str) -> tuple[list[Any], dict[str, bytes]]:
    """Train, save, sample, load and go on; gives all answers, and the files of the checkpoint."""
    loop = Loop(server, base_model)
    for _ in range(3):
        loop.step()
    path, sampler = loop.save("a"), loop.save("b", "save_weights_for_sampler")
    for seed in range(4):
        loop.sample(sampler, seed)
    loop.load(path)
    loop.step()
    loop.save("c")
    loop.client.close()
    files = sorted((server.folder / "data" / "checkpoints").glob("*/weights/c-*/*"))
    return loop.said, {file.name: file.read_bytes() for file in files}


# ------------------------------------------------------------------------------ the same, elsewhere


def test_nodes_give_the_bits_of_a_single_worker(
    cluster: RayCluster, nodes: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(tiny_model), "--device", "cpu", "--deterministic")
    with ServerProcess(tmp_path / "one", *flags) as server:
        alone = _whole_loop(server, str(tiny_model))
    with ServerProcess(tmp_path / "two", *flags, "--ray", cluster.address) as server:
        _wait_workers(server, 2)
        together = _whole_loop(server, str(tiny_model))
        assert _gauge(server, "nodes") == 2
    assert together[0] == alone[0]
    assert together[1] == alone[1]
    assert "adapter_model.safetensors" in alone[1]


@pytest.mark.parametrize("engine", ["toy", "torch"])
def test_nodes_share_the_passes_of_one_run_and_give_the_bits_of_a_single_worker(
    cluster: RayCluster, nodes: list[str], tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    """Gradients travel from node to node, and nothing of them is left on the way."""
    command = [sys.executable, str(Path(__file__).parent / "shared_run.py")]
    model = "toy" if engine == "toy" else str(tiny_model)
    done = subprocess.run(
        [*command, cluster.address, str(tmp_path), model],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {"num_workers": 2, "is_equal": True, "left": [], "have_summed": True}


# ------------------------------------------------------------------------------ who comes and goes


def test_a_run_goes_on_when_its_node_is_killed_and_a_new_node_is_used(
    cluster: RayCluster, node: str, tmp_path: Path
) -> None:
    flags = ("--engine", "toy", "--deterministic")
    with ServerProcess(tmp_path / "one", *flags) as server:
        loop = Loop(server, "toy")
        alone = _steps(loop, 6)
        loop.client.close()
    with ServerProcess(tmp_path / "two", *flags, "--ray", cluster.address) as server:
        _wait_workers(server, 1)
        loop = Loop(server, "toy")
        first = _steps(loop, 2)
        other = cluster.add()
        _wait_workers(server, 2)
        cluster.kill(node)
        first += _steps(loop, 2)
        _until(lambda: _gauge(server, "nodes") == 1, "the dead node is not counted")
        third = cluster.add()
        _wait_workers(server, 2)
        first += _steps(loop, 2)
        loop.client.close()
        cluster.kill(third)
    cluster.kill(other)
    assert first == alone


def _steps(loop: Loop, count: int) -> list[Any]:
    del loop.said[:]
    for _ in range(count):
        loop.step()
    return list(loop.said)


def test_an_engine_that_hangs_is_replaced(cluster: RayCluster, node: str, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("stuck_after_s = 8\n")
    flags = ("--engine", "toy", "--deterministic", "--config", str(config))
    with ServerProcess(tmp_path / "server", *flags, "--ray", cluster.address) as server:
        _wait_workers(server, 1)
        loop = Loop(server, "toy")
        loop.step()
        (pid,) = [row["pid"] for row in _status(cluster)["workers"]]
        os.kill(pid, signal.SIGSTOP)
        loop.step()
        (now,) = [row["pid"] for row in _status(cluster)["workers"]]
        assert now != pid
        assert not Path(f"/proc/{pid}").exists()
        loop.client.close()


def test_a_killed_server_leaves_no_engine_behind(
    cluster: RayCluster, node: str, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path, "--engine", "toy", "--ray", cluster.address) as server:
        _wait_workers(server, 1)
        assert len(_status(cluster)["workers"]) == 1
        server.kill()
        _until(lambda: not _status(cluster)["workers"], "the engine is gone")


# ------------------------------------------------------------------------------ refused, in words


def _status(cluster: RayCluster) -> dict[str, Any]:
    command = [sys.executable, "-m", "tinkex.cli", "--json", "cluster", "status"]
    done = subprocess.run(
        [*command, "--ray", cluster.address], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _refusal(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--data-dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "RAY_"))}
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=PATIENCE_S, env=env
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_an_address_nobody_listens_at_is_refused(tmp_path: Path) -> None:
    text = _refusal(tmp_path, "--engine", "toy", "--ray", "127.0.0.1:9")
    assert "nobody listens at 127.0.0.1:9" in text
    assert "ray start --head" in text
    assert "takes auto or HOST:PORT" in _refusal(tmp_path, "--engine", "toy", "--ray", "ray://x")


def test_a_cluster_without_devices_is_refused(cluster: RayCluster, tmp_path: Path) -> None:
    text = _refusal(tmp_path, "--engine", "toy", "--ray", cluster.address)
    assert "offer neither GPUs nor CPUs" in text


def test_more_workers_than_devices_are_refused(
    cluster: RayCluster, node: str, tmp_path: Path
) -> None:
    flags = ("--engine", "toy", "--ray", cluster.address, "--workers", "2")
    text = _refusal(tmp_path, *flags)
    assert "--workers is 2, and the cluster has 1 devices" in text


def test_a_node_without_the_models_files_is_left_out(
    cluster: RayCluster, node: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Both nodes are this machine; a model under ~ is where HOME says."""
    poor = tmp_path / "home"
    poor.mkdir()
    link = Path.home() / f".tinkex-test-{os.getpid()}"
    link.symlink_to(tiny_model)
    name = f"~/{link.name}"
    other = cluster.add(env={"HOME": str(poor)})
    flags = ("--model", name, "--device", "cpu", "--ray", cluster.address)
    try:
        with ServerProcess(tmp_path / "server", *flags) as server:
            _wait_workers(server, 1)
            _until(lambda: _gauge(server, "nodes_left_out") == 1, "one node is left out")
            assert f"it has no model at {name}" in server.log
    finally:
        cluster.kill(other)
        link.unlink()


def test_a_node_with_other_code_is_left_out(cluster: RayCluster, node: str, tmp_path: Path) -> None:
    root = Path(tinkex.__file__).parent
    shutil.copytree(root, tmp_path / "src" / "tinkex")
    with (tmp_path / "src" / "tinkex" / "errors.py").open("a") as out:
        out.write("# another version\n")
    other = cluster.add(env={"PYTHONPATH": str(tmp_path / "src")})
    flags = ("--engine", "toy", "--ray", cluster.address)
    with ServerProcess(tmp_path / "server", *flags) as server:
        _wait_workers(server, 1)
        _until(lambda: _gauge(server, "nodes_left_out") == 1, "one node is left out")
        assert "install the same there" in server.log
    verdicts = {row["node_id"]: row["verdict"] for row in _status(cluster)["nodes"]}
    assert verdicts[node] == "ok"
    assert "install the same there" in verdicts[other]
    cluster.kill(other)


# ------------------------------------------------------------------------------ groups


def _followers(leader: int) -> list[int]:
    children = Path(f"/proc/{leader}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [p for p in pids if b"group.follower" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_a_group_on_a_node_gives_the_bits_of_a_group_here_and_is_started_again(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    model = str(tiny_model)
    flags = ("--model", model, "--device", "cpu", "--deterministic", "--group", "2")
    with ServerProcess(tmp_path / "here", *flags) as server:
        here = _whole_loop(server, model)
    node_id = cluster.add(num_cpus=2)
    with ServerProcess(tmp_path / "there", *flags, "--ray", cluster.address) as server:
        _wait_workers(server, 1)
        there = _whole_loop(server, model)
        loop = Loop(server, model)
        loop.step()
        (leader,) = [row["pid"] for row in _status(cluster)["workers"]]
        (follower,) = _followers(leader)
        os.kill(follower, signal.SIGKILL)
        loop.step()
        (again,) = [row["pid"] for row in _status(cluster)["workers"]]
        assert again != leader
        (follower,) = _followers(again)
        loop.client.close()
    _until(lambda: not Path(f"/proc/{follower}").exists(), "the follower ends with the server")
    cluster.kill(node_id)
    assert there == here


def test_a_group_that_no_node_can_hold_is_refused(
    cluster: RayCluster, node: str, tmp_path: Path
) -> None:
    said = _refusal(tmp_path, "--ray", cluster.address, "--group", "2", "--device", "cpu")
    assert "no node of the Ray cluster has as many devices" in said
