"""A run of the official SDK, and somebody who kills what it runs on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from venvs import sdk_python

HERE = Path(__file__).parent
RUN_TIMEOUT_S = 1500.0
NUM_STEPS = 30
SPARE_STEPS = 4
"""No kill in the last steps: the run must not end before the last one was made."""


@dataclass
class Outcome:
    told: list[Any]
    """All that the script was told."""
    weights: dict[str, bytes]
    """The files of its last checkpoint."""
    seconds: float
    kills: Counter[str] = field(default_factory=Counter)
    num_replays: int = 0
    num_shares: int = 0
    """How often members came to share the adapter."""

    def __str__(self) -> str:
        return (
            f"{sum(self.kills.values())} kills ({dict(self.kills)}), {self.num_replays} replays, "
            f"shared {self.num_shares} times, {self.seconds:.0f} s"
        )


@dataclass
class Killer:
    """Makes each kill at some moment of a step that was drawn for it, several in one step too."""

    weapons: Mapping[str, Callable[[], None]]
    num_kills: int = 20
    seed: int = 0
    num_steps: int = NUM_STEPS
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        steps = range(max(self.num_steps - SPARE_STEPS, 1))
        self.moments = sorted(self._chance.choices(steps, k=self.num_kills))
        names = sorted(self.weapons)
        self._order = [names[number % len(names)] for number in range(self.num_kills)]
        self._chance.shuffle(self._order)

    def act(self, step: int) -> None:
        if not self.moments or step < self.moments[0]:
            return
        del self.moments[0]
        time.sleep(self._chance.uniform(0.0, 0.4))
        name = self._order.pop()
        self.weapons[name]()
        self.kills[name] += 1


def official_run(
    server: ServerProcess,
    model: Path,
    killer: Killer | None = None,
    *,
    sdk: str = "official",
    num_steps: int = NUM_STEPS,
    learning_rate: float = 1e-2,
) -> Outcome:
    """Run `official_run.py` to its end; `killer` is asked to act again and again meanwhile.

    Args:
        sdk: `official`, or `ours`, which runs the same script.
    """
    python = [sys.executable, "-m", "tinkex.compat"] if sdk == "ours" else [sdk_python("0.36.0")]
    command = [*map(str, python), str(HERE / "official_run.py")]
    client_log, began = server.folder / "client.log", time.monotonic()
    with client_log.open("wb") as log:
        child = subprocess.Popen(
            [*command, server.base_url, str(model), str(num_steps), str(learning_rate)],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    guard = threading.Timer(RUN_TIMEOUT_S, child.kill)
    guard.start()
    try:
        while child.poll() is None:
            if killer is not None:
                killer.act(client_log.read_text().count("step "))
            time.sleep(0.02)
        output, _ = child.communicate(timeout=500)
    finally:
        guard.cancel()
        child.kill()
        child.wait()
    seconds = time.monotonic() - began
    assert child.returncode == 0, f"{client_log.read_text()[-3000:]}\n---\n{server.log[-5000:]}"
    (folder,) = (server.folder / "data" / "checkpoints").glob("*/weights/final-*")
    weights = {file.name: file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}
    return Outcome(
        json.loads(output),
        weights,
        seconds,
        killer.kills if killer else Counter(),
        server.log.count("replaying") + server.log.count("goes on with"),
        server.log.count("is shared by 2 workers"),
    )


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
