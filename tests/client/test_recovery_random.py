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
from collections.abc import Callable, Iterator

import pytest
from recovery_world import ADAM, Server, batch, new_client, quick

from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import TinkerError

FIRST, LAST = map(int, os.environ.get("TINKEX_RECOVERY_SEEDS", "0-10").split("-"))
WAIT_S = 120.0


def pipelined(client) -> list[float]:
    """Four steps under way at any time, some of them with a look at the state between the two
    halves; each is awaited on a thread of its own, and optimizer steps never are."""

    def loss(future) -> float:
        return future.result(WAIT_S).metrics["loss:sum"]

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


def squared(data, logprobs):
    """A loss of the user's own; it waits for a forward pass."""
    return sum(one.square().sum() for one in logprobs), {}


def anything(seed: int) -> Callable[[TrainingClient], list[float]]:
    """A loop of random calls, the same for the same seed; gives every loss it saw."""

    def loop(client: TrainingClient) -> list[float]:
        rng = random.Random(seed)
        seen, paths = [], []
        for step in range(24):
            kind = rng.choice("step step halves halves look custom save load sampler drop".split())
            if kind == "step":
                seen.append(client.train_step(batch(step), "cross_entropy", ADAM))
            elif kind == "halves":
                seen.append(client.forward_backward(batch(step), "cross_entropy"))
                client.optim_step(ADAM)
            elif kind == "look":
                seen.append(client.forward(batch(99), "cross_entropy"))
            elif kind == "custom":
                seen.append(client.forward_backward_custom(batch(step), squared))
            elif kind == "save":
                paths.append(client.save_state(f"mine-{step}").result(WAIT_S).path)
            elif kind == "load" and paths:
                client.load_state_with_optimizer(rng.choice(paths))
            elif kind == "sampler":
                client.save_weights_and_get_sampling_client()
            elif kind == "drop":  # nobody waits for it, and it counts all the same
                client.train_step(batch(step), "cross_entropy", ADAM).cancel()
            if seen and rng.random() < 0.3:
                seen[rng.randrange(len(seen))].result(WAIT_S)
        return [future.result(WAIT_S).metrics["loss:sum"] for future in seen]

    return loop


def delete(server: Server, client, rng: random.Random) -> None:
    with contextlib.suppress(TinkerError):  # busy, or gone already
        run = TrainingClient(server.connect().holder, 0, client.client.model_id)
        run.unload_model().result(5)


def replace(server: Server, client, rng: random.Random) -> None:
    server.kill()
    time.sleep(rng.random() * 0.5)
    server.start()


def restart(server: Server, client, rng: random.Random) -> None:
    server.restart()


def freeze(server: Server, client, rng: random.Random) -> None:
    """Silent for longer or shorter than the client's patience, then there as if nothing was."""
    with server.frozen():
        time.sleep(rng.random() * 3)


@contextlib.contextmanager
def disturbed(server: Server, client, rng: random.Random, *ways) -> Iterator[None]:
    def disturb() -> None:
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.random() * 0.6)
            rng.choice(ways)(server, client, rng)

    chaos = threading.Thread(target=disturb)
    chaos.start()
    try:
        yield
    finally:  # or the next test would find two hands on the server
        chaos.join()
        client.close()


@pytest.fixture
def slow_server(server: Server) -> Iterator[Server]:
    server.kill()
    server.latency_s = 0.03
    server.start()
    yield server
    server.latency_s = 0.0


def recovering(server: Server, rng: random.Random):
    every = rng.choice((1, 2, 3, 5))
    return new_client(server).with_recovery(quick(server, save_every_steps=every))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_losses_at_random_moments_leave_no_trace(slow_server, seed):
    """R23: deletions and kills while calls are under way; every result is exactly as without."""
    expected = pipelined(new_client(slow_server))
    rng = random.Random(seed)
    client = recovering(slow_server, rng)
    with disturbed(slow_server, client, rng, delete, replace):
        assert pipelined(client) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_losses_in_random_loops_leave_no_trace(slow_server, seed):
    """R23: whatever the loop does, and also when the server only seemed to be lost."""
    loop, rng = anything(seed), random.Random(seed)
    expected = loop(new_client(slow_server))
    client = recovering(slow_server, rng)
    with disturbed(slow_server, client, rng, delete, replace, restart, freeze):
        assert loop(client) == expected
