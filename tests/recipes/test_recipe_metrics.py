"""Numbers that recipes report, against slow and obvious ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tinkex import Datum, ModelInput, ServiceClient
from tinkex.recipes import dpo, rl
from tinkex.recipes.policy_shift import Shift
from tinkex.types import TensorData

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def service(toy_server):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def quiet(*args):
    """Neither progress nor notes."""


def slow_shift(loss_fn, data, outputs):
    """Token by token, as the definitions read."""
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}.get(loss_fn, (None, None))
    ratios, kls, clipped = [], [], []
    for datum, output in zip(data, outputs, strict=True):
        advantages = datum.loss_fn_inputs["advantages"].tolist()
        sampled = datum.loss_fn_inputs["logprobs"].tolist()
        trained = output["logprobs"].tolist()
        for a, q, p in zip(advantages, sampled, trained, strict=True):
            if a == 0:
                continue
            r = math.exp(p - q)
            ratios.append(r)
            kls.append(r - 1 - math.log(r))
            if loss_fn == "ppo":  # the clipped branch of the minimum is taken, strictly
                clip = min(max(r, low), high)
                clipped.append(min(r * a, clip * a) != r * a)
            elif loss_fn == "cispo":
                clipped.append(min(max(r, low), high) != r)
    found = {"ratio_mean": sum(ratios) / len(ratios), "approx_kl": sum(kls) / len(kls)}
    if clipped:
        found["clip_fraction"] = sum(clipped) / len(clipped)
    return found


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_ratio_kl_and_clip_fraction_are_what_their_definitions_say(loss_fn):
    random = np.random.default_rng(3)
    data, outputs = [], []
    for length in (1, 7, 40):
        advantages = random.choice([-1.0, 0.0, 0.5], length).astype(np.float32)
        before = -random.random(length).astype(np.float32)
        now = before + random.normal(0, 0.7, length).astype(np.float32)
        inputs = {
            "target_tokens": [1] * length,
            "logprobs": before.tolist(),
            "advantages": advantages.tolist(),
        }
        data.append(Datum(model_input=ModelInput.from_ints([1] * length), loss_fn_inputs=inputs))
        outputs.append({"logprobs": TensorData.from_numpy(now)})
    shift = Shift(loss_fn)
    shift.add(data[:1], outputs[:1])
    shift.add(data[1:], outputs[1:])
    assert shift.metrics() == pytest.approx(slow_shift(loss_fn, data, outputs), rel=1e-6)


def test_nothing_learned_says_nothing():
    assert Shift("ppo").metrics() == {}


def test_rl_reports_how_far_the_policy_moved_from_its_samples(service, tmp_path):
    """The first update starts at ratio one; after it the others of the same samples do not."""

    def train(name, **changes):
        config = rl.RlConfig(
            log_dir=str(tmp_path / name),
            rank=4,
            steps=1,
            prompts_per_step=4,
            group_size=4,
            max_tokens=6,
            eval_share=0,
            learning_rate=0.1,
            loss_fn="ppo",
            **changes,
        )
        rl.train(
            config,
            service,
            lambda completion, row: len(completion) % 3,
            [{"prompt": f"Count to {i}"} for i in range(6)],
            quiet,
            quiet,
        )
        lines = (Path(config.log_dir) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    one, four = train("one"), train("four", updates_per_step=4)
    assert len(one) == len(four) == 1
    for record in one:
        assert record["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert record["approx_kl"] == pytest.approx(0.0, abs=1e-4)
        assert record["clip_fraction"] == 0.0
    assert all(record["approx_kl"] > 1e-3 and record["clip_fraction"] > 0 for record in four)
    for record in (*one, *four):
        assert list(record)[2] == "reward"  # after step and time: what RL is about comes first
        assert {"grad_norm", "learning_rate", "tokens_per_s", "answer_tokens"} <= set(record)
        spent = record["answer_tokens"] / record["reward"]
        assert record["tokens_per_reward"] == pytest.approx(spent)


def test_a_pass_of_average_answers_is_left_out_of_an_accumulated_step(service, tmp_path, caplog):
    """It was sent, and the log said that the whole batch had no signal."""

    def reward(completions, **kwargs):  # one group with a signal, one answer of it average
        return [0.0, 1.0, 2.0] + [5.0] * (len(completions) - 3)

    norms = []
    for name, size in (("one", {"prompts_per_step": 3}), ("three", {"accumulate": 3})):
        settings = {"prompts_per_step": 1, "group_size": 3, "max_tokens": 4, **size}
        config = rl.RlConfig(
            log_dir=str(tmp_path / name), rank=4, steps=1, eval_share=0, **settings
        )
        prompts = [{"prompt": f"Count to {i}"} for i in range(3)]
        norms.append(rl.train(config, service, reward, prompts, quiet, quiet).metrics["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert "Every advantage of this batch is zero" not in caplog.text


def test_a_tie_counts_half_in_dpo_accuracy():
    """M9: margins of 3e-6, all of them rounding, were an accuracy of 1."""
    assert dpo.accuracy(torch.tensor([3e-6, 1e-5, -2e-6])) == 0.5
    assert dpo.accuracy(torch.tensor([0.5, -0.5, 0.2, 0.0])) == 2.5 / 4


def test_an_untrained_policy_prefers_neither_answer(service, tmp_path):
    rows = [{"prompt": f"Q{i}", "chosen": "aye sir", "rejected": "no way"} for i in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = []
    config = dpo.DpoConfig(
        data=str(path), log_dir=str(tmp_path / "log"), rank=4, epochs=1, eval_share=0
    )
    dpo.train(config, service, lambda step, count, metrics: first.append(metrics), quiet)
    assert first[0]["accuracy"] == 0.5
    assert first[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first[0]["grad_norm"] > 0
