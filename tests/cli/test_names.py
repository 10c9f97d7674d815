"""Names of runs on the command line: train, extend, chat, go on from, list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def workshop(cli, tmp_path, monkeypatch, default_model_dir):
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "Arr!"}]}
        for q in ("Hello", "Bye")
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = {"prompt": "Hello", "chosen": "Arr!", "rejected": "Hi."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    return cli


def sft(cli, epochs: int):
    length = ("--epochs", epochs, "--batch-size", "2", "--eval-share", "0")
    return cli("train", "sft", "talk.jsonl", "--name", "pirate", "--rank", "2", *length)


def test_a_named_run_is_trained_extended_talked_to_and_trained_on(workshop):
    cli = workshop
    ran = sft(cli, 1)
    assert ran.code == 0, ran.err
    assert "chat pirate" in ran.err
    again = sft(cli, 1)
    assert "holds a finished run of 1 steps" in again.err
    assert sft(cli, 3).code == 0
    named = cli("chat", "pirate", "-p", "Hi", "--max-tokens", "4", "--seed", "1", "--json")
    folder = cli("chat", "runs/pirate", "-p", "Hi", "--max-tokens", "4", "--seed", "1", "--json")
    assert named.code == 0, named.err
    assert named.json == folder.json
    length = ("--epochs", "1", "--batch-size", "1", "--eval-share", "0")
    on = cli("train", "dpo", "pairs.jsonl", "--from", "pirate", "--name", "captain", *length)
    assert on.code == 0, on.err
    config = json.loads(Path("runs/captain/config.json").read_text())
    assert config["model"].startswith("tinker://")
    assert config["model"].endswith("step-000003")
    listed = {run["name"]: run for run in cli("run", "list", "--json").json["runs"]}
    assert listed["captain"]["state"] == "finished"
    assert listed["pirate"]["num_steps"] >= 1
    table = cli("run", "list")
    assert "captain" in table.out
    assert "captain" in cli("session", "list").out


def test_what_cannot_be_gone_on_from_is_told(workshop):
    ran = workshop("train", "sft", "talk.jsonl", "--from", "nobody")
    assert ran.code == 2
    assert "'nobody' is no run here" in ran.err
    ran = workshop("train", "sft", "talk.jsonl", "--from", "tinker://a/b/c", "--rank", "4")
    assert ran.code == 2
    assert "leave --model and --rank out" in ran.err


def test_pull_says_what_a_model_needs(workshop, default_model_dir):
    facts = workshop("pull", str(default_model_dir), "--json").json
    assert facts["folder"] == str(default_model_dir)
    assert 134e6 < facts["parameters"] < 136e6
    assert facts["memory_bytes"] == 4 * facts["parameters"]
    ran = workshop("pull", "no-such-model")
    assert ran.code == 1
    assert "Runs with a name: none" in ran.err


def test_the_shell_completes_runs_and_models(workshop):
    from tinkex.cli.completions import complete_model, complete_run

    assert sft(workshop, 1).code == 0
    assert [item.value for item in complete_run(None, None, "pi")] == ["pirate"]
    assert "tinkex/SmolLM2-135M-Instruct-Q4" in {
        item.value for item in complete_model(None, None, "tin")
    }
    assert [item.type for item in complete_run(None, None, "./")] == ["dir"]


def test_a_named_run_is_exported(workshop, tmp_path):
    cli = workshop
    assert sft(cli, 1).code == 0
    ran = cli("export", "pirate", "-o", str(tmp_path / "adapter"))
    assert ran.code == 0, ran.err
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert "is not a checkpoint" in cli("export", "nobody", "-o", str(tmp_path / "other")).err
