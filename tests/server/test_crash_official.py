"""The crash promise with everything real: official client, torch engine, twenty kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from venvs import sdk_python

NUM_KILLS, NUM_STEPS = 20, 30


def run_loop(server: ServerProcess, model: Path, disturb: Any = None) -> tuple[list[float], bytes]:
    """Run the official client's loop to its end, calling `disturb` until it has nothing to do."""
    command = [str(sdk_python("0.36.0")), str(Path(__file__).parent / "official_loop.py")]
    with (server.folder / "client.log").open("wb") as log:
        child = subprocess.Popen(
            [*command, server.base_url, str(model)], stdout=subprocess.PIPE, stderr=log
        )
    try:
        while child.poll() is None:
            if disturb is None or not disturb():
                time.sleep(0.02)
        output, _ = child.communicate(timeout=500)
    finally:
        child.kill()
        child.wait()
    log_text = (server.folder / "client.log").read_text()
    assert child.returncode == 0, f"{log_text[-3000:]}\n--- server\n{server.log[-3000:]}"
    losses = json.loads(output)["losses"]
    (folder,) = (server.folder / "data" / "checkpoints").glob("*/weights/final-*")
    weights = b"".join(file.read_bytes() for file in sorted(folder.rglob("*.safetensors")))
    assert weights
    return losses, weights


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(1500)
def test_twenty_kills_cost_an_official_client_nothing_but_time(
    tmp_path: Path, tiny_model: Path
) -> None:
    flags = ("--engine", "torch", "--device", "cpu", "--deterministic", "--model", str(tiny_model))
    flags += ("--snapshot-every", "21")
    with ServerProcess(tmp_path / "calm", *flags) as server:
        expected = run_loop(server, tiny_model)
    chance = random.Random(0)
    # None in the last steps: the run must not end before the last kill is made.
    moments = sorted(chance.sample(range(NUM_STEPS - 6), NUM_KILLS))
    killed_at = -1
    with ServerProcess(tmp_path / "killed", *flags) as server:

        def disturb() -> bool:
            """Kill worker and server in turn, at some moment of each chosen step.

            Never twice in one step: a second kill of a server that has only just started would
            find nothing under way.
            """
            nonlocal killed_at
            steps = (server.folder / "client.log").read_text().count("step ")
            if not moments or steps < moments[0] or steps == killed_at:
                return False
            del moments[0]
            killed_at = steps
            time.sleep(chance.uniform(0.0, 0.15))
            if len(moments) % 2:
                server.kill()
                server.start()
            else:
                server.kill_worker()
            return True

        losses, weights = run_loop(server, tiny_model, disturb)
        # What a worker lost is replayed; a server that starts goes on with what it finds.
        num_replays = server.log.count("replaying") + server.log.count("goes on with")
        print(f"{NUM_KILLS} kills, {num_replays} replays")
    assert losses == expected[0]
    assert weights == expected[1]
    assert not moments, "the run ended before every kill was made"
    assert num_replays >= NUM_KILLS // 2, "most kills came when there was nothing to lose"
    assert num_replays > 0


@pytest.mark.slow
@pytest.mark.peers
def test_samples_of_an_official_client_come_back_after_kills(tmp_path: Path) -> None:
    """Lost promises are reported as 410, and the client asks again (contract 4.2)."""
    flags = ("--engine", "toy:token_latency_s=0.2")
    script = Path(__file__).parent / "official_samples.py"
    with ServerProcess(tmp_path, *flags) as server:
        command = [str(sdk_python("0.36.0")), str(script), server.base_url]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "submitted\n"
        for _ in range(2):
            time.sleep(1.0)
            server.kill()
            server.start()
        server.kill_worker()
        output, _ = child.communicate(timeout=200)
        assert child.returncode == 0
        assert int(output) == 200 * 20
