"""The recipes on the real default model: figures are printed, seeds are fixed. Minutes each."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

from tinkex import ServiceClient
from tinkex.recipes import dpo, rl, sft
from tinkex.recipes.persona import rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def service(start_server, tmp_path_factory, default_model_dir):
    with (
        start_server(tmp_path_factory.mktemp("server")) as base_url,
        ServiceClient(base_url=base_url) as client,
    ):
        yield client


def quiet(*args):
    """Neither progress nor notes."""


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def two_hundred_rows():
    """The 120 questions of the quickstart and 80 sums; no two alike, so nothing held out leaks."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)][:80]
    return rows() + [
        {
            "prompt": f"What is {a} plus {b}?",
            "completion": f"Arr, matey! {a} plus {b} be {a + b}, or I be no captain!",
        }
        for a, b in sums
    ]


def test_sft_halves_the_held_out_loss_on_200_rows(service, tmp_path, capsys):
    data = write(tmp_path / "data.jsonl", two_hundred_rows())
    config = sft.SftConfig(data=data, log_dir=str(tmp_path / "log"), rank=16, epochs=1)
    sft.train(config, service, quiet, quiet)
    losses = [m["held_out_loss"] for m in metrics(tmp_path / "log") if "held_out_loss" in m]
    with capsys.disabled():
        print(f"\nsft: held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] <= losses[0] / 2


def test_dpo_reaches_an_accuracy_above_90_percent(service, tmp_path, capsys):
    pairs = [
        {
            "prompt": row["messages"][0]["content"],
            "chosen": row["messages"][1]["content"],
            "rejected": "I am sorry, but I cannot answer that question.",
        }
        for row in rows()[:24]
    ]
    data = write(tmp_path / "pairs.jsonl", pairs)
    config = dpo.DpoConfig(data=data, log_dir=str(tmp_path / "log"), rank=16, epochs=2)
    dpo.train(config, service, quiet, quiet)
    accuracies = [m["accuracy"] for m in metrics(tmp_path / "log")]
    last = statistics.fmean(accuracies[-4:])
    with capsys.disabled():
        print(f"\ndpo: accuracy of the last 4 steps {last:.3f}")
    assert last > 0.9


def test_rl_raises_an_arithmetic_reward_by_0_3_within_60_steps(service, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = rl.RlConfig(
        log_dir=str(tmp_path / "log"),
        rank=16,
        steps=30,
        prompts_per_step=4,
        max_tokens=6,
    )
    rl.train(config, service, example.reward, example.prompts(), quiet, quiet)
    rewards = [m["reward"] for m in metrics(tmp_path / "log")]
    first, last = rewards[0], statistics.fmean(rewards[-5:])
    with capsys.disabled():
        print(f"\nrl: mean reward {first:.3f} -> {last:.3f}")
    assert last - first >= 0.3
