"""Names of runs on the command line: train, extend, chat, go on from, list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinkex.cli.names import resolve
from tinkex.cli.state import State
from tinkex.contract.models import DEFAULT_MODEL
from tinkex.runs import names


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
    runs = cli("run", "list", "--json").json["runs"]
    listed = {run["name"]: run for run in reversed(runs)}  # the newest of a name
    assert listed["captain"]["state"] == "finished"
    assert listed["pirate"]["num_steps"] >= 1
    logged = [json.loads(s) for s in Path("runs/pirate/metrics.jsonl").read_text().splitlines()]
    assert listed["pirate"]["loss"] == pytest.approx(logged[-1]["loss"]), "as the run showed it"
    table = cli("run", "list")
    assert "captain" in table.out
    assert "captain" in cli("session", "list").out


def test_a_run_by_its_name_is_a_teacher_and_what_a_kl_is_measured_to(workshop, tmp_path):
    cli = workshop
    assert sft(cli, 1).code == 0
    (tmp_path / "ask.jsonl").write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    few = ("--steps", "1", "--prompts-per-step", "1", "--max-tokens", "4", "--rank", "2")
    ran = cli("train", "distill", "ask.jsonl", "--teacher", "pirate", "--name", "pupil", *few)
    assert ran.code == 0, ran.err
    config = json.loads(Path("runs/pupil/config.json").read_text())
    assert config["teacher"].startswith("tinker://")
    (tmp_path / "short.py").write_text(
        "def prompts():\n    return [{'prompt': 'Hello'}, {'prompt': 'Bye'}]\n\n"
        "def reward(text, row):\n    return -len(text)\n"
    )
    to = ("--kl-to", "runs/pirate", "--name", "brief", "--group-size", "2")
    ran = cli("train", "rl", "short.py:reward", *to, *few)
    assert ran.code == 0, ran.err
    config = json.loads(Path("runs/brief/config.json").read_text())
    assert config["kl_to"].startswith("tinker://")
    told = {run["name"]: run for run in cli("run", "list", "--json").json["runs"]}
    logged = [json.loads(s) for s in Path("runs/brief/metrics.jsonl").read_text().splitlines()]
    (reward,) = [record["reward"] for record in logged if "reward" in record]
    assert told["brief"]["reward"] == pytest.approx(reward), "the loss of RL says little"
    assert told["pirate"]["reward"] is None
    table = cli("run", "list").out
    assert f"reward {reward:.3g}" in table
    assert f"loss {told['pirate']['loss']:.3g}" in table


def test_what_another_model_stands_in_for_is_asked_of_the_hub_and_told(
    workshop, tmp_path, monkeypatch
):
    from tinkex.engine.model import base_model

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(base_model, "_not_on_hub", {})
    asked = []

    def fail(name):
        asked.append(name)
        raise base_model.ModelNotFoundError("no route")

    monkeypatch.setattr(base_model, "_from_hub", fail)
    facts = workshop("pull", "HuggingFaceTB/SmolLM2-135M-Instruct", "--json").json
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert "stands in for HuggingFaceTB/SmolLM2-135M-Instruct" in facts["note"]
    assert "(no route)" in facts["note"]


def test_what_cannot_be_gone_on_from_is_told(workshop):
    ran = workshop("train", "sft", "talk.jsonl", "--from", "nobody")
    assert ran.code == 1
    assert "'nobody' is neither a checkpoint" in ran.err
    ran = workshop("train", "sft", "talk.jsonl", "--from", "tinker://a/b/c", "--rank", "4")
    assert ran.code == 2
    assert "leave --model and --rank out" in ran.err


def test_pull_says_what_a_model_needs(workshop, default_model_dir):
    facts = workshop("pull", str(default_model_dir), "--json").json
    assert facts["folder"] == str(default_model_dir)
    assert 134e6 < facts["parameters"] < 136e6
    from tinkex.engine.torch.survey import OVERHEAD_BYTES

    # Weights, adapter with its optimizer, one row, 16 samples: docs/does-it-fit.md rounds to 5 GB.
    assert 4.4e9 < facts["memory_bytes"] < 4.6e9
    assert facts["memory_bytes"] > 4 * facts["parameters"] + OVERHEAD_BYTES
    told = workshop("pull", str(default_model_dir)).out
    assert "needs about 4.2 GB on a CPU, 3.1 GB on a GPU, to train and sample" in told
    ran = workshop("pull", "no-such-model")
    assert ran.code == 1
    assert "no-such-model" in ran.err
    talked = workshop("chat", "no-such-model", "-p", "hello")
    assert talked.code == 1


def test_the_shell_completes_runs_and_models(workshop):
    from tinkex.cli.completions import complete_model, complete_run

    assert sft(workshop, 1).code == 0
    assert [item.value for item in complete_run(None, None, "pi")] == ["pirate"]
    assert "tinkex/SmolLM2-135M-Instruct-Q4" in {
        item.value for item in complete_model(None, None, "tin")
    }
    assert [item.type for item in complete_run(None, None, "./")] == ["dir"]


def test_the_shell_completes_checkpoints_of_this_machine_and_starts_no_server(
    workshop, tmp_path, monkeypatch, start_server
):
    """`workshop` has a server of its own; here are the files of a private one that has ended."""
    from tinkex import ServiceClient
    from tinkex.cli.completions import complete_checkpoint, complete_model

    folder = tmp_path / "home" / "local"
    folder.mkdir(parents=True)
    with start_server(folder, "--engine", "toy") as base_url:
        with ServiceClient(base_url=base_url) as service:
            training = service.create_lora_training_client(rank=4, base_model=DEFAULT_MODEL)
            path = training.save_state("one").result().path
    for name in ("TINKER_BASE_URL", "TINKEX_LOCAL_ENGINE", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    assert [item.value for item in complete_checkpoint(None, None, "tinker://")] == [path]
    assert [item.value for item in complete_model(None, None, path[:30])] == [path]
    assert not (tmp_path / "home" / "local-server.log").exists()
    assert "COMP_WORDBREAKS" in workshop("completion", "bash").out


def test_a_named_run_is_exported(workshop, tmp_path):
    cli = workshop
    assert sft(cli, 1).code == 0
    ran = cli("export", "pirate", "-o", str(tmp_path / "adapter"))
    assert ran.code == 0, ran.err
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    refused = cli("export", "nobody", "-o", str(tmp_path / "other")).err
    assert "'nobody' is neither a checkpoint" in refused
    assert "Runs here: pirate" in refused


def test_a_name_that_only_the_server_has_is_told_to_who_misspells_it(workshop, saved):
    """A run of Python, or one renamed, has no folder of its name; private servers take any base."""
    cli = workshop
    assert cli("run", "rename", saved.run_id, "parrot-run").code == 0
    refused = cli("export", "parot-run", "-o", "other").err
    assert "Did you mean parrot-run?" in refused
    from tinkex.cli.commands import pull

    with pytest.raises(pull.ModelNotFoundError, match="Did you mean parrot-run"):
        pull.fetch("parot-run", State())


@pytest.mark.parametrize("name", ["two words", "50%", "lr 1e-3 #2?", "sft/one"])
def test_a_run_of_any_name_is_shown_and_renamed(workshop, saved, name):
    cli = workshop
    assert cli("run", "rename", saved.run_id, name).code == 0
    assert cli("run", "info", name, "--json").json["training_run_id"] == saved.run_id
    ran = cli("run", "rename", name, "plain")
    assert (ran.code, "plain" in ran.out) == (0, True), ran.err
    missed = cli("run", "info", "two  wrods")
    assert missed.code == 1
    assert "List them with `tinkex run list`" in missed.err


def test_a_misspelt_name_is_refused_in_the_words_of_the_server(workshop, tmp_path, start_server):
    """The answer of the OpenAI route was shown as JSON, and cut."""
    with start_server(tmp_path, "--engine", "toy", "--model", DEFAULT_MODEL) as base_url:
        ran = workshop("chat", "pirat", "-p", "Hi", "--base-url", base_url)
    assert ran.code == 1
    assert ran.err.startswith("Error: The model 'pirat' does not exist here.")
    assert "`tinkex checkpoint name` gave it." in ran.err


def test_a_name_with_a_slash_is_told_to_be_taken_for_a_model_of_the_hub(workshop, saved):
    assert workshop("run", "rename", saved.run_id, "sft/one").code == 0
    refused = workshop("export", "sft/one", "-o", "other").err
    assert 'tinkex run rename "sft/one" NAME' in refused


@pytest.mark.parametrize(
    "command",
    [
        ("sft", "no.jsonl"),
        ("dpo", "no.jsonl"),
        ("rl", "short.py:reward", "--prompts", "no.jsonl"),
        ("distill", "no.jsonl", "--teacher", "x"),
    ],
    ids=lambda command: command[0],
)
def test_a_missing_file_is_told_before_a_model_is_fetched(workshop, tmp_path, command, monkeypatch):
    from tinkex.cli.commands import pull

    (tmp_path / "short.py").write_text("def reward(text, row):\n    return 0\n")
    fetched = []
    monkeypatch.setattr(pull, "prepare", lambda state, model: fetched.append(model))
    ran = workshop("train", *command)
    assert "There is no file no.jsonl" in ran.err
    assert fetched == []


def test_a_folder_of_somebody_else_sends_no_key_to_a_server_that_it_names(
    tmp_path, monkeypatch, cli
):
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "config.json").write_text('{"log_dir": "x", "model": "m"}')
    saved = {"step": 1, "state_path": "tinker://r/weights/1", "sampler_path": ""}
    (folder / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
    (folder / "server.json").write_text('{"server": "https://other.invalid"}')
    ran = cli("chat", str(folder), "-p", "Hi")
    assert ran.code != 0
    assert "name it: --base-url https://other.invalid" in ran.err
    state = State()
    names.remember("mine", folder)
    resolve(state, str(folder))
    assert state.base_url == "https://other.invalid", "a recipe of this machine named it"
