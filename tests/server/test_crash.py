"""`kill -9` at any moment costs a running client a pause and nothing else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess
from wire_client import WireClient, loss_of

NUM_STEPS = 30
FLAGS = ("--engine", "toy:latency_s=0.01", "--deterministic", "--snapshot-every", "7")


def run_training(
    model_id: str, client: WireClient, on_step: Callable[[int], None]
) -> tuple[list[float], str]:
    """30 pipelined steps of two passes each; gives the losses and the final checkpoint."""
    losses, number = [], 0
    for step in range(NUM_STEPS):
        on_step(step)
        promises = []
        for part in range(2):
            number += 1
            tokens = [(step * 7 + part * 3 + i) % 50 for i in range(8)]
            promises.append(client.train(model_id, number, tokens))
        number += 1
        done = client.step(model_id, number, learning_rate=0.05)
        losses += [loss_of(client.result(promise)) for promise in promises]
        client.result(done)
        if step % 10 == 9:
            number += 1
            client.result(client.save(model_id, number, f"step-{step}"))
    number += 1
    path = client.result(client.save(model_id, number, "final"))["path"]
    return losses, path


def checkpoint_bytes(server: ServerProcess) -> bytes:
    (folder,) = (server.folder / "data" / "checkpoints").glob("*/weights/final-*")
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*.npz")))


def train_while(
    server: ServerProcess, kills: dict[int, Callable[[], None]] | None = None
) -> tuple[list[float], bytes]:
    """Train; at each step named in `kills`, call it at some moment of that step."""
    client, chance = WireClient(server.base_url), random.Random(0)
    threads = []

    def on_step(step: int) -> None:
        if kills is not None and step in kills:
            for thread in threads:
                thread.join()  # one disturbance at a time
            delay_s = chance.uniform(0.0, 0.06)
            threads.append(threading.Timer(delay_s, kills[step]))
            threads[-1].start()

    try:
        session = client.session()
        losses, _ = run_training(client.model(session), client, on_step)
    finally:
        for thread in threads:
            thread.join()
        client.close()
    return losses, checkpoint_bytes(server)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], bytes]:
    with ServerProcess(tmp_path_factory.mktemp("calm"), *FLAGS) as server:
        return train_while(server)


def test_a_run_goes_on_bit_for_bit_when_its_worker_is_killed(
    tmp_path: Path, undisturbed: tuple[list[float], bytes]
) -> None:
    with ServerProcess(tmp_path, *FLAGS) as server:
        kills = dict.fromkeys((2, 9, 10, 23), server.kill_worker)
        assert train_while(server, kills) == undisturbed
        assert server.log.count("starting it again") == len(kills)
        assert "replaying" in server.log


def test_a_run_goes_on_bit_for_bit_when_the_server_is_killed(
    tmp_path: Path, undisturbed: tuple[list[float], bytes]
) -> None:
    with ServerProcess(tmp_path, *FLAGS) as server:

        def restart() -> None:
            server.kill()
            server.start()

        assert train_while(server, dict.fromkeys((4, 19, 28), restart)) == undisturbed
        assert server.log.count("effective config") == 4
        assert "replaying" in server.log
