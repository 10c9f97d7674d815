"""Runs of the toy engine with the metrics of an RL recipe and of a supervised one."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import tinkex

NUM_STEPS = 40
NAMES = ("sums, rate 2e-4", "sums, rate 1e-3", "orders")


def train_runs(base_url: str, names: tuple[str, ...] = NAMES) -> list[SimpleNamespace]:
    """Runs that have ended, the first first: two of RL, the others supervised."""
    return [_trained(base_url, name, index) for index, name in enumerate(names)]


def _trained(base_url: str, name: str, index: int) -> SimpleNamespace:
    noise = random.Random(index)
    with tinkex.ServiceClient(base_url=base_url, display_name=name) as service:
        training = service.create_lora_training_client("toy", rank=8 * (index + 1), seed=index)
        for step in range(NUM_STEPS):
            training.forward_backward([_datum()], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3 * (1 - step / 80)))
            told = training.log_metrics(_metrics(step, index, noise), step=step)
        told.result()
        training.save_state("last").result()
        training.save_weights_for_sampler("final").result()
        return SimpleNamespace(name=name, run_id=training.model_id)


def _datum() -> tinkex.Datum:
    tokens = list(range(1, 31))
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 29},
    )


def _metrics(step: int, index: int, noise: random.Random) -> dict[str, Any]:
    """Numbers as recipes log them: noisy ones, and some that never change."""
    shared = {"turns": 1.0, "updates": 1.0, "train/entropy": 2 * math.exp(-step / 40)}
    if index > 1:
        loss = 3 * math.exp(-step / 15)
        return {**shared, "loss": loss + 0.1 * noise.random(), "eval/loss": loss + 0.3}
    gain = 1 - math.exp(-step * (index + 1) / 40)
    return {
        **shared,
        "reward": gain + 0.1 * noise.random(),
        "reward/format": min(1.0, step / 20) + 0.05 * noise.random(),
        "kl": step / 600 + 0.005 * noise.random(),
        "train/clip_fraction": 0.02 * noise.random(),
        "eval/pass@1": gain * 0.9,
    }
