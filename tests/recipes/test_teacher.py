"""Recipes take the same steps whether the server asks the teacher or the client does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tinkex
from tinkex import ServiceClient
from tinkex.recipes import distill, dpo, rl

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PROMPTS = [{"prompt": f"Tell me {i}"} for i in range(8)]


def quiet(*args):
    """Neither progress nor notes."""


def curve(folder: Path):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("time", "tokens_per_s")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


@pytest.fixture
def services(toy_server, default_model_dir):
    """A client that names its teachers to the server, and one that meets a server without them."""
    with (
        ServiceClient(base_url=toy_server) as one,
        ServiceClient(base_url=toy_server, extensions=False) as two,
    ):
        yield {"one call": one, "two calls": two}


@pytest.fixture
def elder(services):
    """A checkpoint that differs from the base model."""
    training = services["one call"].create_lora_training_client(MODEL, rank=4, seed=2).result()
    # The toy knows pairs of tokens: all of them, so that it differs wherever a sample leads.
    halves = np.split(np.arange(49_152), 2)
    data = [
        tinkex.Datum(
            tinkex.ModelInput.from_ints(half[:-1].tolist()),
            {"target_tokens": half[1:], "weights": np.ones(len(half) - 1, np.float32)},
        )
        for half in halves
    ]
    training.train_step(data, "cross_entropy", tinkex.AdamParams(learning_rate=0.5)).result()
    return training.save_weights_for_sampler("elder").result().path


def test_distillation_is_the_same_in_one_call_as_in_two(services, elder, tmp_path):
    for name, service in services.items():
        config = distill.DistillConfig(
            log_dir=str(tmp_path / name),
            teacher=elder,
            rank=4,
            learning_rate=0.05,
            prompts_per_step=4,
            max_tokens=6,
            steps=4,
            eval_share=0.25,
            eval_every=2,
        )
        distill.train(config, service, PROMPTS, quiet, quiet)
    assert curve(tmp_path / "one call") == curve(tmp_path / "two calls")
    assert all(line["kl"] > 1e-3 for line in curve(tmp_path / "one call") if "kl" in line)
    rollouts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in services]
    assert rollouts[0] == rollouts[1]


def test_dpo_is_the_same_in_one_call_as_in_two(services, tmp_path):
    rows = [{"prompt": f"Q{i}", "chosen": "aye sir", "rejected": "no way"} for i in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, service in services.items():
        config = dpo.DpoConfig(
            data=str(path),
            log_dir=str(tmp_path / name),
            rank=4,
            learning_rate=0.02,
            batch_size=2,
            epochs=2,
            eval_share=0.34,
            eval_every=2,
        )
        dpo.train(config, service, quiet, quiet)
    assert curve(tmp_path / "one call") == curve(tmp_path / "two calls")


def test_a_kl_penalty_is_the_same_in_one_call_as_in_two(services, elder, tmp_path):
    """But for the rounding of advantages, which are float32 before the penalty is added."""
    for name, service in services.items():
        config = rl.RlConfig(
            log_dir=str(tmp_path / name),
            rank=4,
            learning_rate=0.02,
            prompts_per_step=2,
            group_size=4,
            max_tokens=6,
            steps=3,
            eval_share=0.0,
            kl_to=elder,
            kl_coef=0.1,
        )
        rl.train(config, service, lambda completion: len(completion) % 3, PROMPTS, quiet, quiet)
    one, two = (curve(tmp_path / name) for name in services)
    assert [set(line) for line in one] == [set(line) for line in two]
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
