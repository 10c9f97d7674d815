"""What the tests of recovery share: a server that dies, a run to lose, a loop to compare."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from held_port import HeldPort
from patience import until as wait_until

from tinkex.client.config import ClientConfig
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.service.service_client import ServiceClient
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import BadRequestError
from tinkex.types import AdamParams, Datum, ModelInput

ADAM = AdamParams(learning_rate=0.05)


REQUEST_S = 100.0
"""What a single request may take: only a server that does not answer spends it."""


class Server:
    """A server process on a data directory; killed without warning, started again elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._services: list[ServiceClient] = []
        self._ports: list[HeldPort] = []
        self.latency_s = 0.0
        self.base_url = ""

    def start(self, port: int = 0) -> None:
        """On a port of its own, unless that of a server before it is named."""
        if not port:
            self._ports.append(HeldPort())
            port = self._ports[-1].number
        engine = f"toy:latency_s={self.latency_s}"
        command = [sys.executable, "-m", "tinkex.server", "--engine", engine, "--port", str(port)]
        env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
        env["TINKEX_HOME"] = str(self._folder)
        log = (self._folder / "server.log").open("ab")
        self._child = subprocess.Popen(
            [*command, "--data-dir", str(self._folder)], stdout=subprocess.PIPE, stderr=log, env=env
        )
        log.close()
        assert self._child.stdout is not None
        self.base_url = json.loads(self._child.stdout.readline())["base_url"]

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        if not self.is_running:
            return
        assert self._child is not None
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(60)
        assert self._child.stdout is not None
        self._child.stdout.close()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections are taken and nobody answers."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)
        yield
        self._child.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Another process on the same address and data: its runs come back by themselves."""
        port = int(self.base_url.rpartition(":")[2])
        self.kill()
        self.start(port)

    def connect(self, retry_window_s: float = 0.5) -> ServiceClient:
        config = ClientConfig.from_env(
            base_url=self.base_url,
            env={},
            retry_window_s=retry_window_s,
            timeout_s=REQUEST_S,
        )
        self._services.append(ServiceClient(config=config))
        return self._services[-1]

    def disconnect(self) -> None:
        """Close every client, so that none goes on calling a server that is gone."""
        for service in self._services:
            service.close()
        self._services.clear()


def batch(step: int) -> list[Datum]:
    tokens = [(step * 7 + i) % 50 for i in range(12)]
    return [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": [1.0] * 12})]


PATIENT = 300
"""Attempts enough for a server that takes long to start on a busy machine."""


def quick(server: Server, **options) -> RecoveryPolicy:
    defaults = {
        "max_attempts": PATIENT,
        "save_every_steps": 3,
        "initial_delay_s": 0.1,
        "max_delay_s": 0.5,
        "attempt_timeout_s": REQUEST_S,
        "monitor_interval_s": 0.0,
        "unreachable_s": 5.0,  # a busy machine may keep a server silent for a second or two
        "connect": server.connect,
    }
    return RecoveryPolicy(**{**defaults, **options})


def train(client, steps, *, disturb=lambda step: None) -> list[float]:
    losses = []
    for step in steps:
        disturb(step)
        losses.append(
            client.train_step(batch(step), "cross_entropy", ADAM).result(2 * REQUEST_S).loss
        )
    return losses


def new_client(server: Server) -> TrainingClient:
    service = server.connect()
    base = service.get_server_capabilities().supported_models[0].model_name
    return service.create_lora_training_client(base, rank=4, seed=1)


def undisturbed(server: Server, num_steps: int) -> list[float]:
    return train(new_client(server), range(num_steps))


def delete_run(server: Server, client) -> None:
    """Unload the model from under its client."""
    other = server.connect()
    stranger = TrainingClient(other.holder, 0, client.client.model_id)

    def gone() -> bool:
        try:
            stranger.unload_model().result(60)
        except BadRequestError as exc:  # a checkpoint is still being saved
            return "under way" not in str(exc)
        return True

    wait_until(gone)
    other.close().result(60)
