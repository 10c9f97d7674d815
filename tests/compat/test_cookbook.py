"""tinker-cookbook 0.5.8, unmodified, on our SDK, our server and a real model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cookbook

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def service(start_server, tmp_path_factory):
    alias = f"{cookbook.ALIAS}={cookbook.MODEL}"
    with start_server(tmp_path_factory.mktemp("server"), "--alias", alias) as base_url:
        yield base_url


@pytest.fixture(scope="module")
def workplace(default_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    cookbook.make_workplace(folder, default_model_dir)
    return folder


def metrics(log: Path) -> list[dict]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_supervised_chat_training_runs(service, workplace, tmp_path):
    done = cookbook.chat_sl(service, workplace, tmp_path / "log")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "log")
    assert len(rows) == 3
    assert all(0 < row["train_mean_nll"] < 10 for row in rows)
    assert "Training completed successfully" in done.stdout + done.stderr


def test_reinforcement_learning_on_arithmetic_runs_on_policy(service, workplace, tmp_path):
    """The gap between sampler and trainer is rounding, not a mismatch."""
    done = cookbook.math_rl(service, workplace, tmp_path / "log")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "log")
    assert len(rows) == 2
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-4 for row in rows)
    assert all(math.isfinite(row["env/all/reward/total"]) for row in rows)


def test_the_chat_program_answers(service, workplace):
    done = cookbook.chat(service, workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
