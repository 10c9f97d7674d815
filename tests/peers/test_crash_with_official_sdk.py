"""`kill -9` of worker and server, 20 times in a 30-step run of the official SDK: only a pause."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from server_process import ServerProcess
from venvs import SDK_VERSIONS, sdk_python

NUM_KILLS = 20
FLAGS = ("--engine", "toy:latency_s=0.05", "--deterministic", "--snapshot-every", "7")
RUN_TIMEOUT_S = 900


def long_run(server: ServerProcess, disturb: Any = None) -> dict[str, Any]:
    """The last line of `long_run.py`, while `disturb(step)` is called at each of its steps."""
    process = subprocess.Popen(
        [str(sdk_python(SDK_VERSIONS[-1])), str(Path(__file__).parent / "long_run.py")],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(server.folder),
            "TINKER_BASE_URL": server.base_url,
            "TINKER_API_KEY": "tml-peer-key",
            "PEER_LR": "0.02",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(RUN_TIMEOUT_S, process.kill)
    guard.start()
    last: dict[str, Any] = {}
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    reader.start()
    for line in process.stdout:
        last = json.loads(line)
        if "at" in last and disturb is not None:
            disturb(last["at"])
    code = process.wait()
    guard.cancel()
    reader.join()
    process.stdout.close()
    process.stderr.close()
    assert code == 0, "".join(errors)[-3000:] + server.log[-2000:]
    return last


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_official_sdk_does_not_notice_twenty_kills(tmp_path: Path) -> None:
    """No exception in the loop, and the same losses and weights to the bit."""
    with ServerProcess(tmp_path / "calm", *FLAGS) as server:
        calm = long_run(server)
    chance = random.Random(1)
    moments = sorted(chance.sample(range(29), NUM_KILLS))
    killed = []

    with ServerProcess(tmp_path / "disturbed", *FLAGS) as server:

        def disturb(step: int) -> None:
            if step not in moments:
                return
            time.sleep(chance.random() * 0.1)
            if chance.random() < 0.5:
                server.kill_worker()
            else:
                server.kill()
                server.start()
            killed.append(step)

        disturbed = long_run(server, disturb)
    assert len(killed) == NUM_KILLS
    assert disturbed["losses"] == calm["losses"]
    assert disturbed["weights"] == calm["weights"]
