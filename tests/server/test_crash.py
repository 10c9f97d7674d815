"""`kill -9` at any moment costs a running client a pause and nothing else."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import ServerProcess
from wire_client import WireClient, loss_of

NUM_STEPS = 30
FLAGS = ("--engine", "toy", "--deterministic", "--toy-latency", "0.01", "--snapshot-every", "7")


def run_training(base_url: str, model_id: str, client: WireClient) -> tuple[list[float], str]:
    """30 pipelined steps of two passes each; gives the losses and the final checkpoint."""
    losses, number = [], 0
    for step in range(NUM_STEPS):
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
    server: ServerProcess, disturb: Callable[[], None] | None = None
) -> tuple[list[float], bytes]:
    client = WireClient(server.base_url)
    done = threading.Event()

    def disturber() -> None:
        while not done.is_set() and disturb is not None:
            disturb()

    thread = threading.Thread(target=disturber)
    thread.start()
    try:
        session = client.session()
        losses, _ = run_training(server.base_url, client.model(session), client)
    finally:
        done.set()
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
    chance = random.Random(0)
    with ServerProcess(tmp_path, *FLAGS) as server:
        kills = iter(range(4))

        def disturb() -> None:
            time.sleep(chance.uniform(0.2, 0.9))
            if next(kills, None) is not None:
                server.kill_worker()

        assert train_while(server, disturb) == undisturbed
        assert next(kills, None) is None, "the run ended before every kill was made"
        assert "replaying" in server.log


def test_a_run_goes_on_bit_for_bit_when_the_server_is_killed(
    tmp_path: Path, undisturbed: tuple[list[float], bytes]
) -> None:
    chance = random.Random(1)
    with ServerProcess(tmp_path, *FLAGS) as server:
        kills = iter(range(3))

        def disturb() -> None:
            time.sleep(chance.uniform(0.3, 0.8))
            if next(kills, None) is not None:
                server.kill()
                server.start()

        assert train_while(server, disturb) == undisturbed
        assert next(kills, None) is None, "the run ended before every kill was made"
