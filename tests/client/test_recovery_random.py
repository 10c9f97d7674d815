"""Losses at random moments, with calls under way (R23).

Other seeds than the usual ten: `TINKEX_RECOVERY_SEEDS=100-160 pytest -m slow -k random ...`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import threading
import time

import pytest
from recovery_world import ADAM, batch, new_client, quick

from tinkex.client.training_client import TrainingClient
from tinkex.errors import TinkerError

FIRST, LAST = map(int, os.environ.get("TINKEX_RECOVERY_SEEDS", "0-10").split("-"))


def pipelined(client) -> list[float]:
    """Four steps under way at any time, some of them with a look at the state between the two
    halves; each is awaited on a thread of its own, and optimizer steps never are."""

    def loss(future) -> float:
        return future.result(120).metrics["loss:sum"]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        losses = []
        for step in range(14):
            waiting = [client.forward_backward(batch(step), "cross_entropy")]
            client.optim_step(ADAM)
            if step % 3 == 0:
                waiting.append(client.forward(batch(99), "cross_entropy"))
            losses += [threads.submit(loss, future) for future in waiting]
            if len(losses) > 4:
                losses[-5].result()
        return [future.result() for future in losses]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_losses_at_random_moments_leave_no_trace(server, seed):
    """R23: deletions and kills while calls are under way; every result is exactly as without."""
    server.kill()
    server.latency_s = 0.03
    server.start()
    expected = pipelined(new_client(server))
    rng = random.Random(seed)
    every = rng.choice((1, 2, 3, 5))
    client = new_client(server).with_recovery(
        quick(server, max_attempts=30, save_every_steps=every)
    )

    def disturb() -> None:
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.random() * 0.6)
            if rng.random() < 0.5:
                with contextlib.suppress(TinkerError):  # busy, or gone already
                    run = TrainingClient(server.connect().holder, 0, client.client.model_id)
                    run.unload_model().result(5)
            else:
                server.kill()
                time.sleep(rng.random() * 0.5)
                server.start()

    chaos = threading.Thread(target=disturb)
    chaos.start()
    try:
        assert pipelined(client) == expected
    finally:  # or the next test would find two hands on the server
        chaos.join()
        client.close()
        server.latency_s = 0.0
