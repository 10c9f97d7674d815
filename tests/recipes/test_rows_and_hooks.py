"""Rows of a run (a file to evaluate on, packing, plain text), and the callbacks on its way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex import ServiceClient
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes import rl, sft
from tinkex.recipes.render import Rendered, Renderer

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def service(toy_server):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def quiet(*args):
    """Neither progress nor notes."""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": "aye aye"} for i in range(8)]
    return sft.SftConfig(
        data=write(tmp_path / "data.jsonl", rows),
        log_dir=str(tmp_path / "log"),
        rank=4,
        batch_size=2,
        epochs=1,
        eval_every=2,
        save_every=2,
        samples=0,
    )


def curve(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_file_to_evaluate_on_leaves_all_rows_to_train_on(service, config, tmp_path):
    others = write(tmp_path / "eval.jsonl", [{"prompt": "Who?", "completion": "me"}] * 3)
    notes = []
    with_file = replace(config, eval_data=others)
    sft.train(with_file, service, quiet, notes.append)
    assert any(note.startswith("8 rows to train on") for note in notes)
    assert any(note.startswith(f"{others}: 3 usable rows") for note in notes)
    held_out = [
        record["held_out_loss"] for record in curve(config.log_dir) if "held_out_loss" in record
    ]
    assert len(held_out) == 3
    share = replace(config, log_dir=str(tmp_path / "share"), eval_share=0.25)
    sft.train(share, service, quiet, notes.append)
    assert any(note.startswith("6 rows to train on") for note in notes)


def test_rl_evaluates_on_the_prompts_of_a_file(service, tmp_path):
    others = write(tmp_path / "eval.jsonl", [{"prompt": "Other?", "worth": 5}] * 40)
    seen = []

    def reward(completion, row):
        seen.append(row.get("worth"))
        return len(completion)

    settings = rl.RlConfig(
        log_dir=str(tmp_path / "rl"),
        rank=4,
        steps=1,
        prompts_per_step=2,
        group_size=2,
        max_tokens=4,
        eval_data=others,
    )
    rl.train(settings, service, reward, [{"prompt": "One"}, {"prompt": "Two"}], quiet, quiet)
    assert seen.count(5) == 80  # all of them, before and after
    assert seen.count(None) == 4


def test_patience_is_content_with_a_file_to_evaluate_on(config):
    assert replace(config, eval_share=0, eval_data="eval.jsonl", patience=2).patience == 2
    with pytest.raises(ConfigError, match="eval_data name a file"):
        replace(config, eval_share=0, patience=2)


def test_a_reward_of_zero_to_stop_at_needs_held_out_prompts(tmp_path):
    with pytest.raises(ConfigError, match="look at held-out prompts"):
        rl.RlConfig(log_dir=str(tmp_path), eval_share=0, stop_at_reward=0.0)


def test_patience_without_a_row_to_hold_out_says_that_it_has_no_effect(service, config):
    """A tenth of eight rows is none: the run went on as if nobody had asked."""
    notes = []
    sft.train(replace(config, patience=1), service, quiet, notes.append)
    assert any(note.startswith("Too few rows to hold one out: patience") for note in notes)


def test_a_run_that_was_stopped_in_its_last_step_may_be_best_there(service, config, tmp_path):
    """Its last evaluation was drawn, and never compared with the best."""
    settings = {"learning_rate": 0.02, "eval_share": 0.25, "keep_best": True}
    whole = sft.train(replace(config, **settings), service, quiet, quiet)
    stopped = replace(config, log_dir=str(tmp_path / "stopped"), **settings)
    sft.train(stopped, service, lambda step, num_steps, metrics: step < num_steps - 1, quiet)
    ended = sft.train(stopped, service, quiet, quiet)
    assert (ended.best_step, ended.step) == (whole.best_step, whole.step) == (3, 3)
    assert ended.metrics["loss"] == whole.metrics["loss"], "of the step before"


# ------------------------------------------------------------------------------ packing


def rendered(length):
    return Rendered(tokens=tuple(range(length)), weights=(0.0, *[1.0] * (length - 1)))


def test_packing_keeps_every_row_and_no_group_is_too_long():
    lengths = [5, 60, 33, 33, 34, 90, 10, 2, 2, 64]
    groups = sft.packed([rendered(length) for length in lengths], 100)
    sizes = [sum(len(one.tokens) for one in group) for group in groups]
    assert sorted(len(one.tokens) for group in groups for one in group) == sorted(lengths)
    assert max(sizes) <= 100
    assert len(groups) == 4  # 333 tokens


def test_packed_steps_are_fewer_and_no_row_sees_another(service, config, tmp_path):
    """All rows in one step have the same loss, packed or not: nothing crosses their borders."""
    whole = {"epochs": 1, "eval_share": 0, "max_length": 4096}
    packed = replace(config, log_dir=str(tmp_path / "packed"), pack=True, batch_size=1, **whole)
    plain = replace(config, log_dir=str(tmp_path / "plain"), batch_size=8, **whole)
    assert sft.train(packed, service, quiet, quiet).step == 1
    sft.train(plain, service, quiet, quiet)
    (one,), (other,) = curve(packed.log_dir), curve(plain.log_dir)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert one["num_tokens"] == other["num_tokens"]


# ------------------------------------------------------------------------------ plain text


def test_plain_text_is_learned_without_a_template(service, tmp_path):
    renderer = Renderer(service.create_sampling_client(base_model=MODEL).get_tokenizer())
    text = renderer.plain("Once upon a time")
    assert renderer.tokenizer.decode(list(text.tokens)) == "Once upon a time<|im_end|>"
    assert text.weights == (0.0, *[1.0] * (len(text.tokens) - 1))
    with pytest.raises(InvalidInputError, match="more than max_length 3"):
        renderer.plain("Once upon a time", 3)
    data = write(tmp_path / "text.jsonl", [{"text": f"Once {i} upon a time"} for i in range(10)])
    result = sft.train(
        sft.SftConfig(data=data, log_dir=str(tmp_path / "log"), rank=4, epochs=1),
        service,
        quiet,
        quiet,
    )
    assert result.metrics["held_out_loss"] > 0


# ------------------------------------------------------------------------------ callbacks


def test_callbacks_see_steps_evaluations_and_checkpoints(service, config):
    seen = []
    result = sft.train(
        replace(config, eval_share=0.25),
        service,
        on_step=lambda step, count, metrics: seen.append(("step", step, "loss" in metrics)),
        on_note=quiet,
        on_eval=lambda step, metrics: seen.append(("eval", step, "held_out_loss" in metrics)),
        on_save=lambda saved: seen.append(("save", saved.step, bool(saved.state_path))),
    )
    assert result.step == 3
    assert seen == [
        ("eval", 0, True),
        ("step", 0, True),
        ("step", 1, True),
        ("save", 2, True),
        ("eval", 2, True),
        ("step", 2, True),
        ("eval", 3, True),
        ("save", 3, True),
    ]


def test_a_callback_that_returns_false_ends_the_run_and_the_same_call_goes_on(service, config):
    stopped = sft.train(config, service, lambda step, count, metrics: step < 1, quiet)
    assert (stopped.step, stopped.interrupted) == (2, True)
    steps = []
    ended = sft.train(config, service, lambda step, *others: steps.append(step), quiet)
    assert steps == [2, 3]
    assert not ended.interrupted
