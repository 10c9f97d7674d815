"""On-policy distillation on the toy engine: the student comes closer to its teacher."""

from __future__ import annotations

import json

import pytest

from tinkex import ServiceClient
from tinkex.errors import ConfigError
from tinkex.recipes import distill
from tinkex.recipes.episodes import Episode, Question

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PROMPTS = [{"prompt": f"Tell me {i}"} for i in range(8)]


def quiet(*args):
    """Neither progress nor notes."""


@pytest.fixture
def service(toy_server, default_model_dir):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def config(folder, teacher, **changes):
    return distill.DistillConfig(
        log_dir=str(folder),
        teacher=teacher,
        rank=4,
        learning_rate=0.05,
        prompts_per_step=4,
        max_tokens=6,
        eval_share=0.25,
        eval_every=5,
        **changes,
    )


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_tokens_advantage_is_how_much_likelier_it_is_for_the_teacher():
    """That the KL falls by it, on a real model, is what examples/distillation.py asserts."""
    question = Question(tokens=[1], row={}, line=1)
    one = Episode(
        question=question,
        tokens=[1, 2, 3],
        logprobs=[0.0, -1.0, -2.0],
        is_sampled=[False, True, True],
        gaps=[0.0, -1.0 - -3.0, -2.0 - -0.5],  # the teacher's: -3.0 and -0.5
    )
    (datum,) = distill.distill_data([one])
    assert datum.loss_fn_inputs["advantages"].tolist() == [-1.75, 1.75]  # around their mean
    assert datum.loss_fn_inputs["logprobs"].tolist() == [-1.0, -2.0]


def test_answers_are_logged_with_what_the_teacher_thinks(service, tmp_path):
    distill.train(config(tmp_path, MODEL, steps=2), service, PROMPTS, quiet, quiet)
    told = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(told) == 2 * 4 * 2
    assert told[0]["reward"] == pytest.approx(0, abs=1e-6)  # it is its own teacher
    assert [line["step"] for line in metrics(tmp_path) if "held_out_kl" in line] == [0, 2]


def test_a_student_that_is_its_own_teacher_has_nothing_to_learn(service, tmp_path):
    result = distill.train(config(tmp_path, MODEL, steps=1), service, PROMPTS, quiet, quiet)
    assert metrics(tmp_path)[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert result.step == 1


def test_a_teacher_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="A teacher is needed"):
        config(tmp_path, "")
