"""`tinkex train ... --dry-run`: what a run would take, and nothing is trained or kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkex import ServiceClient

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"Say {i}", "completion": "aye"} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def runs(toy_server):
    """How many runs the server has."""

    def count() -> int:
        with ServiceClient(base_url=toy_server) as service:
            rest = service.create_rest_client()
            return rest.list_training_runs(limit=1).result().cursor.total_count

    return count


def test_a_dry_run_counts_and_makes_nothing(cli, rows, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = runs()
    ran = cli("train", "sft", rows, "--batch-size", "4", "--name", "dry", "--dry-run")
    assert ran.code == 0, ran.err
    assert "Trained tokens" in ran.out
    assert runs() == before
    assert not (tmp_path / "runs").exists()
    assert cli("train", "resume", "dry").code != 0, "nobody remembers it"
    told = cli("--format", "json", "train", "sft", rows, "--batch-size", "4", "--dry-run").json
    assert told["plan"]["num_steps"] == 9
    assert told["plan"]["training_tokens"] > 0
    assert "budgets" in told["estimate"]


def test_a_budget_that_a_run_would_pass_is_told(cli, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    user = cli("--format", "json", "budget", "set", "user", "local", "tokens=50")
    assert user.code == 0, user.err
    try:
        ran = cli("train", "sft", rows, "--dry-run")
        assert ran.code == 0, ran.err
        assert "it would not fit" in ran.out
    finally:
        assert cli("budget", "remove", "user", "local").code == 0


def test_reinforcement_learning_is_bounded(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def prompts():\n    return [{'prompt': 'hi'}] * 5\n\n"
        "def judge(completion):\n    raise SystemExit('a dry run judges nothing')\n"
    )
    ran = cli("train", "rl", f"{reward}:judge", "--steps", "2", "--dry-run")
    assert ran.code == 0, ran.err
    assert "at most" in ran.out
