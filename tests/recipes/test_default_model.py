"""The recipes on the real default model: figures are printed, seeds are fixed. Minutes each."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex import ServiceClient
from tinkex.recipes import dpo, plans, rl, sft
from tinkex.recipes.persona import rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_sums.py"
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
    """The 102 questions of the quickstart and 98 sums; no two alike, so nothing held out leaks."""
    sums = [(a, b) for a in range(1, 15) for b in range(1, 8)]
    return rows() + [
        {
            "prompt": f"What is {a} plus {b}?",
            "completion": f"Arr, {a} plus {b} be {a + b}, matey!",
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


def preferences():
    """The same fact twice: as the captain says it, and plainly. Only the voice is preferred."""
    said = [[message["content"] for message in row["messages"]] for row in rows()]
    said = [(q, a) for q, a in said if a.startswith("Arr, ") and a.endswith(", matey!")]
    for question, answer in said[:60]:
        plain = answer.removeprefix("Arr, ").removesuffix(", matey!")
        plain = plain.replace(" o' ", " of ").replace(" be ", " is ")
        plain = plain[0].upper() + plain[1:]
        yield {"prompt": question, "chosen": answer, "rejected": f"{plain}."}


def test_dpo_reaches_an_accuracy_above_90_percent_on_pairs_it_has_not_seen(
    service, tmp_path, capsys
):
    data = write(tmp_path / "pairs.jsonl", preferences())
    config = dpo.DpoConfig(
        data=data, log_dir=str(tmp_path / "log"), rank=16, epochs=1, eval_share=0.25
    )
    result = dpo.train(config, service, quiet, quiet)
    accuracies = [m["accuracy"] for m in metrics(tmp_path / "log") if "accuracy" in m]
    last = statistics.fmean(accuracies[-4:])
    held_out = result.metrics["held_out_accuracy"]
    with capsys.disabled():
        print(f"\ndpo: accuracy of the last 4 of {len(accuracies)} steps {last:.3f}")
        print(f"dpo: accuracy on the 15 pairs held out {held_out:.3f}")
    assert last > 0.9
    assert held_out > 0.9


def test_rl_raises_an_arithmetic_reward_by_0_3_within_60_steps(service, tmp_path, capsys):
    """The reward is one for the right sum and zero for anything else, whatever its form."""
    spec = importlib.util.spec_from_file_location("grpo_sums", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = rl.RlConfig(
        log_dir=str(tmp_path / "log"),
        rank=16,
        steps=30,
        prompts_per_step=4,
        max_tokens=12,
        eval_share=0.25,
    )
    rl.train(config, service, example.reward, example.prompts(), quiet, quiet)
    logged = metrics(tmp_path / "log")
    rewards = [m["reward"] for m in logged if "reward" in m]
    first, last = (statistics.fmean(part) for part in (rewards[:2], rewards[-5:]))
    held_out = [m["held_out_reward"] for m in logged if "held_out_reward" in m]
    with capsys.disabled():
        print(f"\nrl: mean reward of the first 2 steps {first:.3f}, of the last 5 {last:.3f}")
        print(f"rl: right greedy answers to sums held out {held_out[0]:.2f} -> {held_out[-1]:.2f}")
    assert last - first >= 0.3
    assert held_out[-1] - held_out[0] >= 0.3


def test_the_estimate_of_a_run_is_within_a_factor_of_two(service, tmp_path, capsys):
    """After a short run of the kind, on a machine that does nothing else."""
    data = write(tmp_path / "data.jsonl", two_hundred_rows())
    config = sft.SftConfig(data=data, log_dir=str(tmp_path / "warm"), rank=16, epochs=0.2)
    sft.train(config, service, quiet, quiet)
    config = replace(config, log_dir=str(tmp_path / "log"), epochs=0.6)
    plan = plans.plan_sft(config, service, quiet)
    estimated = plan.estimate(service).result().device_seconds
    began = time.monotonic()
    sft.train(config, service, quiet, quiet)
    took = time.monotonic() - began
    with capsys.disabled():
        print(f"\nestimate: {estimated:.1f} s, it took {took:.1f} s")
    assert estimated / 2 < took < estimated * 2
