"""`tinkex quickstart` and `tinkex serve`: what a newcomer sees, on the toy engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
from process_settings import settings_restored

from tinkex.recipes.persona import QUESTIONS_TO_SHOW, rows
from tinkex.runs.run_log import RunLog


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("default_model_dir")
def test_quickstart_shows_answers_loss_and_the_next_command(cli, tmp_path):
    ran = cli("quickstart", "--epochs", "0.4")
    assert ran.code == 0, ran.err
    for question in QUESTIONS_TO_SHOW:
        assert question in ran.out
    assert "Held-out loss" in ran.out
    assert "in 5 steps, " in ran.out
    assert "Next: tinkex chat quickstart" in ran.err
    folder = tmp_path / "quickstart"
    assert (folder / "loss.png").exists()
    assert (folder / "adapter" / "adapter_config.json").exists()
    shown = cli("quickstart", "--epochs", "0.4", "--json").json
    assert (shown["steps"], shown["steps_now"]) == (5, 0)
    again = cli("quickstart", "--epochs", "0.4")
    assert "in 5 steps of an earlier run; --fresh trains anew." in again.out
    assert [a["question"] for a in shown["answers"]] == list(QUESTIONS_TO_SHOW)


@pytest.mark.usefixtures("default_model_dir")
def test_ctrl_c_saves_and_the_same_command_goes_on(cli, tmp_path, monkeypatch):
    real = RunLog.metrics

    def press(self, step, values):
        real(self, step, values)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunLog, "metrics", press)
    stopped = cli("quickstart", "--epochs", "0.4", "--folder", "mine")
    assert stopped.code == 130
    assert "Resume: tinkex quickstart --folder mine" in stopped.err
    monkeypatch.setattr(RunLog, "metrics", real)
    resumed = cli("quickstart", "--epochs", "0.4", "--folder", "mine")
    assert "in 5 steps, 3 of them now, " in resumed.out
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(6))


@pytest.mark.usefixtures("default_model_dir")
@pytest.mark.parametrize("field", ["state_path", "seed"])
def test_a_run_that_cannot_go_on_is_refused_before_any_model_is_asked(cli, tmp_path, field):
    """Its checkpoint is on another server, or it was made with other settings."""
    assert cli("quickstart", "--epochs", "0.1").code == 0
    folder = tmp_path / "quickstart"
    file = folder / ("checkpoints.jsonl" if field == "state_path" else "config.json")
    text = file.read_text()
    gone = "00000000-0000-0000-0000-000000000000:train:0"
    changed = re.sub(r"[0-9a-f-]{36}:train:0", gone, text).replace('"seed": 0', '"seed": 1')
    assert changed != text
    file.write_text(changed)
    refused = cli("quickstart", "--epochs", "0.1")
    assert refused.code == 1
    assert str(folder.name) in refused.err
    assert "log folder" in refused.err
    assert "Asking the untrained model" not in refused.err
    file.write_text(text)
    assert "of an earlier run" in cli("quickstart", "--epochs", "0.1").out


def test_fresh_never_deletes_a_folder_that_is_not_its_own(cli, tmp_path):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "thesis.txt").write_text("years of work")
    ran = cli("quickstart", "--fresh")
    assert ran.code == 1
    assert (tmp_path / "quickstart" / "thesis.txt").exists()


def test_all_shown_questions_but_the_first_are_new_to_the_model():
    """A person sees what was learned, not what was memorised."""
    trained = {row["messages"][0]["content"] for row in rows()}
    assert [question in trained for question in QUESTIONS_TO_SHOW] == [True, False, False, False]


def test_every_row_is_a_question_and_a_pirates_answer():
    asked = [row["messages"][0]["content"] for row in rows()]
    assert len(asked) == len(set(asked)) == 102
    for row in rows():
        question, answer = (message["content"] for message in row["messages"])
        assert question[-1] in "?.!"
        assert answer[-1] in "!"
        assert answer.split()[0].strip(",!?") in {
            "Arr",
            "Aye",
            "Ahoy",
            "Captain",
            "Fair",
            "I",
            "Why",
        }


def test_serve_says_where_it_listens_on_the_first_line_of_stdout(tmp_path):
    command = [sys.executable, "-m", "tinkex.cli", "serve", "--engine", "toy", "--port", "0"]
    child = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert json.loads(child.stdout.readline())["base_url"].startswith("http://127.0.0.1:")
    finally:
        child.terminate()
        child.wait(timeout=200)
        child.stdout.close()


def test_serve_refuses_to_be_open_to_the_world(cli, tmp_path):
    with settings_restored():
        ran = cli("serve", "--host", "0.0.0.0", "--data-dir", tmp_path)
    assert ran.code == 1
    assert "no api key is set" in ran.err
