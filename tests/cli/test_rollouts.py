"""`tinkex run rollouts` reads the answers of a run from its folder."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def folder(tmp_path):
    lines = [
        {
            "step": step,
            "group": 0,
            "prompt": "What is 1 + 1?",
            "text": f"It is {reward}.",
            "tokens": [1, 2],
            "logprobs": [-0.1, -0.2],
            "reward": reward,
            "advantage": reward - 0.5,
        }
        for step in range(3)
        for reward in (0.0, 1.0)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rollouts.jsonl").write_text(text + '{"step": 3, "cut sho')
    return tmp_path


def test_answers_are_shown_with_their_rewards(cli, folder):
    shown = cli("run", "rollouts", str(folder), "--limit", "2").out
    assert shown.count("prompt  What is 1 + 1?") == 2
    assert "reward 1  advantage +0.5" in shown


def test_best_and_worst_come_first_and_steps_count_from_the_end(cli, folder):
    best = cli("run", "rollouts", str(folder), "--best", "--limit", "3", "--json").json
    assert [one["reward"] for one in best] == [1.0, 1.0, 1.0]
    worst = cli("run", "rollouts", str(folder), "--worst", "--limit", "1", "--json").json
    assert worst[0]["reward"] == 0.0
    last = cli("run", "rollouts", str(folder), "--step", "-1", "--json").json
    assert {one["step"] for one in last} == {2}
    found = cli("run", "rollouts", str(folder), "--contains", "1.0", "--json").json
    assert {one["text"] for one in found} == {"It is 1.0."}


def test_a_folder_of_no_run_is_named(cli, tmp_path):
    ran = cli("run", "rollouts", str(tmp_path))
    assert ran.code == 1
    assert "is neither the name nor the folder of a run" in ran.err
    (tmp_path / "config.json").write_text('{"log_dir": "."}')
    assert "kept no answers" in cli("run", "rollouts", str(tmp_path)).err
    assert cli("run", "rollouts", str(tmp_path), "--best", "--worst").code == 2
