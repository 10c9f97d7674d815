"""Learning rates, schedules, decay, clipping and accumulation of the recipes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex import ServiceClient
from tinkex.errors import ConfigError
from tinkex.recipes import distill, dpo, get_lr, rl, sft
from tinkex.recipes.batches import parts_of
from tinkex.recipes.learning_rate import learning_rate_at
from tinkex.runs.run_log import RunLog

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def service(toy_server):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def quiet(*args):
    """Neither progress nor notes."""


def curve(folder):
    skipped = ("time", "tokens_per_s")
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in skipped} for line in lines]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


EVERYTHING = {
    "schedule": "cosine",
    "warmup": 2,
    "weight_decay": 0.01,
    "clip": 0.5,
    "accumulate": 2,
    "learning_rate": 0.02,
    "rank": 4,
    "save_every": 2,
}


def runs_of(recipe, service, tmp_path):
    """A function of (name, on_step, changes) that trains by a recipe with every setting."""
    data = write(
        tmp_path / "sft.jsonl",
        [{"prompt": f"Say {i}", "completion": "aye aye captain"} for i in range(12)],
    )
    pairs = write(
        tmp_path / "dpo.jsonl",
        [{"prompt": f"Q{i}", "chosen": "aye sir", "rejected": "no way"} for i in range(12)],
    )
    prompts = [{"prompt": f"Count to {i}"} for i in range(8)]
    few = {"steps": 4, "prompts_per_step": 2, "max_tokens": 6, "eval_share": 0}

    def train(name, on_step=quiet, **changes):
        settings = {**EVERYTHING, "log_dir": str(tmp_path / name), **changes}
        length = {"batch_size": 2, "epochs": 2, "eval_share": 0}
        if recipe is sft:
            config = sft.SftConfig(data=data, **{**length, **settings})
            return sft.train(config, service, on_step, quiet)
        if recipe is dpo:
            config = dpo.DpoConfig(data=pairs, **{**length, **settings})
            return dpo.train(config, service, on_step, quiet)
        if recipe is rl:
            config = rl.RlConfig(group_size=4, **few, **settings)
            reward = lambda completion, row: len(completion) % 3  # noqa: E731
            return rl.train(config, service, reward, prompts, on_step, quiet)
        config = distill.DistillConfig(teacher=MODEL, **few, **settings)
        return distill.train(config, service, prompts, on_step, quiet)

    return train


class KilledError(Exception):
    """Stands for a crash."""


@pytest.mark.parametrize("recipe", [sft, dpo, rl, distill], ids=lambda r: r.__name__[15:])
def test_a_resumed_run_with_every_setting_goes_on_exactly(recipe, service, tmp_path):
    train = runs_of(recipe, service, tmp_path)
    train("whole")
    whole = curve(tmp_path / "whole")

    def crash(step, num_steps, metrics):
        if step == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train("broken", crash)
    train("broken")
    assert curve(tmp_path / "broken") == whole
    rates = [record["learning_rate"] for record in whole if "learning_rate" in record]
    assert rates[0] < rates[1] < rates[2] == max(rates) == 0.02
    assert all("grad_norm" in record for record in whole if record.get("updates", 1))


@pytest.mark.parametrize("recipe", [sft, dpo], ids=["sft", "dpo"])
def test_accumulated_batches_are_one_larger_batch(recipe, service, tmp_path):
    train = runs_of(recipe, service, tmp_path)
    train("two", accumulate=2)
    train("one", accumulate=1, batch_size=4)
    for two, one in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_clipping_and_decay_reach_the_optimizer(service, tmp_path):
    """A clipped step changes the next loss; its norm is told as it was before clipping."""
    train = runs_of(sft, service, tmp_path)
    for name, changes in {
        "plain": {"clip": 0.0, "weight_decay": 0.0},
        "clipped": {"clip": 1e-3, "weight_decay": 0.0},
        "decayed": {"clip": 0.0, "weight_decay": 10.0},
    }.items():
        train(name, accumulate=1, schedule="constant", warmup=0, **changes)
    plain, clipped, decayed = (curve(tmp_path / name) for name in ("plain", "clipped", "decayed"))
    assert plain[0]["grad_norm"] == clipped[0]["grad_norm"] > 1e-3
    assert plain[-1]["loss"] != clipped[-1]["loss"]
    assert plain[-1]["loss"] != decayed[-1]["loss"]


def test_a_warmup_rises_to_the_peak_and_the_schedule_follows():
    def rates(schedule, warmup):
        return [learning_rate_at(step, 11, 1.0, schedule, warmup) for step in range(11)]

    assert rates("constant", 4) == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 7)
    linear = rates("linear", 0.2)  # three of eleven steps
    assert linear[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert linear[-1] == pytest.approx(0.1)
    rising = [learning_rate_at(step, 100, 1.0, "constant", 0.07) for step in range(100)]
    assert sum(rate < 1 for rate in rising) == 7  # 0.07 * 100 is more than 7 in floats
    cosine = rates("cosine", 0)
    assert (cosine[0], cosine[5], cosine[10]) == pytest.approx((1.0, 0.55, 0.1))
    slow = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    assert cosine == pytest.approx(slow)
    assert rates("linear", 50)[-1] < 1.0  # longer than the run: it only rises


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": -0.1}, "warmup must be a share"),
        ({"warmup": 2.5}, "warmup must be a share"),
        ({"warmup": math.nan}, "warmup must be a share"),
        ({"clip": -1}, "clip must be at least 0"),
        ({"weight_decay": math.inf}, "weight_decay must be at least 0"),
        ({"accumulate": 0}, "accumulate must be above 0"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"epochs": math.inf}, "epochs must be above 0 and finite, got inf"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        sft.SftConfig(data="x.jsonl", log_dir=str(tmp_path), **changes)


def test_parts_are_all_rows_in_their_order():
    assert parts_of([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert parts_of([1, 2], 4) == [[1], [2]]


def test_a_folder_from_before_a_setting_existed_goes_on_with_its_default(tmp_path):
    log = RunLog(tmp_path, {"rank": 4})
    log.metrics(0, {"loss": 1.0})
    RunLog(tmp_path, {"rank": 4, "warmup": 0.0}, defaults={"warmup": 0.0})
    (tmp_path / "config.json").write_text('{"rank": 4}')
    with pytest.raises(ConfigError, match="warmup=0.0, now .*2"):
        RunLog(tmp_path, {"rank": 4, "warmup": 2}, defaults={"warmup": 0.0})


# ------------------------------------------------------------------------------ get_lr


def test_get_lr_is_ten_times_the_full_rate_and_falls_with_the_width(tmp_path):
    """The published formula: 5e-5 * 10 * (2000 / hidden_size) ** exponent."""
    assert get_lr("meta-llama/Llama-3.1-8B-Instruct") == pytest.approx(
        5e-4 * (2000 / 4096) ** 0.781
    )
    assert get_lr("Qwen/Qwen3-30B-A3B") == pytest.approx(5e-4 * (2000 / 2048) ** 0.0775)
    assert get_lr(MODEL) == pytest.approx(5e-4 * (2000 / 576) ** 0.781)
    assert get_lr("acme/other-7b", hidden_size=4000) == pytest.approx(5e-4)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 1000}')
    assert get_lr(str(tmp_path)) == pytest.approx(5e-4 * 2**0.0775)
    assert get_lr(MODEL, 1) == get_lr(MODEL, 512)


def test_get_lr_of_a_model_it_does_not_know_says_what_to_give():
    with pytest.raises(ConfigError, match="No learning rate is known for 'acme/other-7b'.*number"):
        get_lr("acme/other-7b")
    with pytest.raises(ConfigError, match="rank must be from 1 to 512"):
        get_lr(MODEL, 0)


def test_auto_is_the_rate_of_the_model_and_its_share_for_the_recipe(service, tmp_path):
    for recipe, share in ((sft, 1.0), (rl, 0.2), (dpo, 0.5)):
        name = recipe.__name__[15:]
        train = runs_of(recipe, service, tmp_path)
        train(name, learning_rate="auto", schedule="constant", warmup=0)
        assert curve(tmp_path / name)[0]["learning_rate"] == pytest.approx(get_lr(MODEL) * share)


def test_auto_for_an_unknown_model_is_refused_before_a_run_is_made(tmp_path):
    data = write(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    config = sft.SftConfig(
        data=data, log_dir=str(tmp_path / "log"), model="acme/other", learning_rate="auto"
    )
    with pytest.raises(ConfigError, match="No learning rate is known"):
        sft.train(config, None, quiet, quiet)  # without a server
    assert replace(config, learning_rate=1e-3).learning_rate == 1e-3
