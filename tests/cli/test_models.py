"""sample, chat, train, export, import, download, push, doctor: table, JSON and a failure (R30)."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import tinkex

pytestmark = pytest.mark.usefixtures("default_model_dir")  # The toy model speaks its tokens.


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_sample_prints_the_text_and_nothing_else_on_stdout(cli):
    ran = cli("sample", "Hello", "--max-tokens", "8", "--seed", "1")
    assert ran.code == 0, ran.err
    again = cli("sample", "Hello", "--max-tokens", "8", "--seed", "1")
    assert again.out == ran.out


def test_sample_as_table_and_json(cli, saved):
    options = ("Hello", "-n", "2", "--max-tokens", "4", "--raw", "-m", saved.sampler_path)
    table = cli("sample", *options)
    assert "Stop" in table.out
    shown = cli("sample", *options, "--json").json
    assert shown["model"] == saved.sampler_path
    assert [s["num_tokens"] for s in shown["sequences"]] == [
        min(4, s["num_tokens"]) for s in shown["sequences"]
    ]


def test_sample_reads_the_prompt_from_stdin(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    from_stdin = cli("sample", "-", "--seed", "3", "--max-tokens", "6")
    assert from_stdin.out == cli("sample", "Hello", "--seed", "3", "--max-tokens", "6").out


def test_sample_from_an_unknown_checkpoint_fails(cli):
    ran = cli("sample", "Hello", "-m", "tinker://nobody:train:0/sampler_weights/x")
    assert (ran.code, ran.out) == (1, "")
    assert "nobody:train:0" in ran.err


def test_chat_streams_an_answer(cli, saved):
    ran = cli("chat", saved.sampler_path, "-p", "Hello", "--max-tokens", "6", "--seed", "2")
    assert ran.code == 0, ran.err
    shown = cli("chat", "-p", "Hello", "--max-tokens", "6", "--json").json
    assert [m["role"] for m in shown["messages"]] == ["user", "assistant"]


def test_chat_goes_on_until_an_empty_line(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n\nnever asked\n"))
    shown = cli("chat", "--system", "Be brief.", "--max-tokens", "4", "--json").json
    said = [m["content"] for m in shown["messages"] if m["role"] != "assistant"]
    assert said == ["Be brief.", "Hello", "Again"]


def test_chat_with_an_unknown_checkpoint_fails(cli):
    assert cli("chat", "tinker://nobody:train:0/weights/x", "-p", "Hello").code == 1


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(12)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": 3}\n')
    return path


SFT = ("--batch-size", "4", "--epochs", "2", "--rank", "4", "--learning-rate", "0.01")


def test_train_sft_reports_bad_rows_and_where_the_weights_are(cli, data):
    ran = cli("train", "sft", data, *SFT, "--log-dir", "log")
    assert ran.code == 0, ran.err
    assert "line 13: needs 'messages', 'conversations', 'prompt' and 'completion'" in ran.err
    assert "tinker://" in ran.out
    shown = cli("train", "sft", data, *SFT, "--json", "--log-dir", "log2").json
    assert shown["steps"] == 6
    assert shown["interrupted"] is False
    assert (data.parent / "log2" / "metrics.jsonl").read_text().count("\n") == 7


def test_a_run_that_failed_before_its_first_step_leaves_the_folder_free(cli, data):
    bad = data.with_name("bad.jsonl")
    bad.write_text('{"a": 1}\n')
    assert "line 1: needs 'messages'" in cli("train", "sft", bad, "--log-dir", "log").err
    assert cli("train", "sft", data, "--model", "", "--log-dir", "log").code == 1
    assert cli("train", "sft", data, *SFT, "--log-dir", "log").code == 0


def test_every_file_has_a_log_folder_of_its_own(cli, data):
    other = data.with_name("other.jsonl")
    other.write_text(data.read_text())
    for file in (data, other):
        assert cli("train", "sft", file, *SFT).code == 0
    assert (data.parent / "runs" / "sft-other" / "metrics.jsonl").exists()


def test_the_help_shows_the_defaults_of_the_recipe(cli):
    shown = " ".join(cli("train", "sft", "--help").out.split())
    assert "LoRA rank. [default: 32]" in shown
    assert "Passes over the data. [default: 3.0]" in shown


def test_train_sft_without_data_fails(cli):
    ran = cli("train", "sft", "nowhere.jsonl")
    assert ran.code == 1
    assert "There is no file nowhere.jsonl" in ran.err


def test_ctrl_c_ends_training_with_130_and_a_checkpoint(cli, data, monkeypatch):
    from tinkex.runs.run_log import RunLog

    real = RunLog.metrics

    def press_after_two(self, step, values):
        real(self, step, values)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunLog, "metrics", press_after_two)
    ran = cli("train", "sft", data, *SFT, "--log-dir", "log", "--json")
    assert ran.code == 130
    assert ran.json["steps"] == 3
    assert "Stopping after this step" in ran.err
    assert "Resume with: " in ran.err
    assert cli("run", "info", ran.json["state_path"], "--json").json["state"] == "stopped"
    monkeypatch.setattr(RunLog, "metrics", real)
    told = ran.err.split("Resume with: tinkex ")[1].split("\n")[0]
    monkeypatch.chdir("/")  # the data is where it was
    resumed = cli(*told.replace("log", f"{data.parent}/log").split(), "--json")
    assert resumed.json["steps"] == 6
    assert "Resuming from step 3" in resumed.err
    rest = tinkex.RestClient(base_url=os.environ["TINKER_BASE_URL"])
    run = rest.get_training_run_by_tinker_path(resumed.json["state_path"]).result()
    assert [segment.step for segment in run.segments or ()] == [0, 3]


@pytest.mark.parametrize("steps", [0, 3])
def test_ctrl_c_twice_says_how_far_it_is_saved(cli, data, monkeypatch, steps):
    from tinkex.runs.run_log import RunLog

    real = RunLog.metrics

    def press_twice(self, step, values):
        real(self, step, values)
        if step == steps:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunLog, "metrics", press_twice)
    ran = cli("train", "sft", data, *SFT, "--save-every", "2", "--log-dir", "log")
    assert ran.code == 130
    assert "Aborted" not in ran.err
    if steps == 0:
        assert "Stopped before the first checkpoint. The same command starts again." in ran.err
        return
    assert "Stopped at once. The first 2 steps are saved." in ran.err
    assert "Resume with: tinkex train resume log" in ran.err
    assert cli("run", "info", "log", "--json").json["state"] == "stopped"


def test_only_a_run_that_train_began_is_resumed_and_a_near_name_is_told(cli, data):
    assert cli("train", "sft", data, *SFT, "--name", "orders").code == 0
    ran = cli("train", "resume", "order")
    assert (ran.code, "Did you mean orders?" in ran.err) == (1, True)
    (data.parent / "runs" / "orders" / "command.json").unlink()
    ran = cli("train", "resume", "orders")
    assert (ran.code, "does not say how its run was started" in ran.err) == (1, True)


def test_a_resumed_run_goes_on_from_what_its_names_meant_when_it_began(cli, data, monkeypatch):
    """`--from orders` is another checkpoint since `orders` was trained on; it was refused."""
    from tinkex.runs.run_log import RunLog

    assert cli("train", "sft", data, *SFT, "--name", "orders").code == 0
    real = RunLog.metrics

    def press(self, step, values):
        real(self, step, values)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "metrics", press)
        ran = cli("train", "sft", data, "--batch-size", "4", "--from", "orders", "--name", "more")
    assert ran.code == 130, ran.err
    assert cli("train", "sft", data, *SFT, "--name", "orders", "--epochs", "3").code == 0
    resumed = cli("train", "resume", "more", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] > 1


def test_train_dpo(cli, tmp_path):
    rows = [{"prompt": f"Q{i}", "chosen": "yes sir", "rejected": "no way"} for i in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--batch-size", "2", "--epochs", "1", "--rank", "4")
    assert "Accuracy" in cli("train", "dpo", path, *options, "--log-dir", "a").out
    shown = cli("train", "dpo", path, *options, "--log-dir", "b", "--json").json
    assert shown["metrics"]["accuracy"] in (0.0, 0.5, 1.0)
    failed = cli("train", "dpo", path, "--beta", "-1")
    assert failed.code == 1
    assert "beta must be above 0" in failed.err


REWARDS = """
def prompts():
    return [{"prompt": f"Count to {i}", "n": i} for i in range(4)]

def reward(completion, row):
    return float(len(completion) % 2)

def broken(completion, row):
    return 1 / 0
"""
RL = ("--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--max-tokens", "6")


def test_train_rl(cli, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    table = cli("train", "rl", "rewards.py:reward", *RL, "--log-dir", "a")
    assert table.code == 0, table.err
    assert "Reward" in table.out
    shown = cli("train", "rl", "rewards.py:reward", *RL, "--log-dir", "b", "--json").json
    assert 0 <= shown["metrics"]["reward"] <= 1
    assert "Nothing was learned" not in table.err


def test_train_takes_the_flags_that_people_know(cli, tmp_path):
    rows = [{"instruction": f"Say {i}", "input": "", "output": "aye"} for i in range(6)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    (tmp_path / "eval.jsonl").write_text('{"text": "Once upon a time"}\n')
    flags = "--lr 1e-2 --warmup 1 --schedule cosine --weight-decay 0.1 --clip 1 --accumulate 2"
    more = "--eval-data eval.jsonl --pack true --rank 4 --epochs 2 --batch-size 2 --max-length 64"
    ran = cli("train", "sft", "alpaca.json", *flags.split(), *more.split(), "--log-dir", "a")
    assert ran.code == 0, ran.err
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["learning_rate"] == 0.01
    assert (config["warmup"], config["clip"], config["accumulate"]) == (1.0, 1.0, 2)
    assert "Held-out loss" in ran.out
    auto = cli("train", "sft", "alpaca.json", "--lr", "auto", "--rank", "4", "--log-dir", "b")
    assert "Learning rate 0.00132, from the size of the model" in auto.err
    both = cli("train", "sft", "alpaca.json", "--eval-data", "eval.jsonl", "--eval-share", "0.5")
    assert (both.code, "takes the place of --eval-share" in both.err) == (2, True)
    wrong = cli("train", "sft", "alpaca.json", "--lr", "fast")
    assert (wrong.code, "'fast' is neither a number nor 'auto'" in wrong.err) == (2, True)
    missing = cli("train", "sft", "alpaca.json", "--eval-data", "none.jsonl", "--log-dir", "c")
    assert (missing.code, "There is no file none.jsonl" in missing.err) == (1, True)


def test_train_rl_adds_up_weighted_rewards_and_names_each(cli, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "trl.py").write_text(
        "def short(prompts, completions, **kwargs):\n"
        "    assert prompts[0].startswith('Count to') and len(kwargs['n']) == len(prompts)\n"
        "    return [-len(completion) for completion in completions]\n"
    )
    two = ("--reward", "rewards.py:reward=0.5", "--reward", "trl.py:short")
    ran = cli("train", "rl", *two, *RL, "--log-dir", "a", "--json")
    assert ran.code == 0, ran.err
    found = ran.json["metrics"]
    expected = 0.5 * found["rewards/reward"] + found["rewards/short"]
    assert found["reward"] == pytest.approx(expected)
    wrong = cli("train", "rl", "--reward", "rewards.py:reward=much", *RL)
    assert wrong.code == 2
    assert "'much' is no weight" in wrong.err
    assert "Name a reward" in cli("train", "rl", *RL).err


def test_a_reward_file_may_have_dataclasses(tmp_path):
    """With annotations as texts it did not load: its module was nowhere to be looked up."""
    from tinkex.cli.reward_files import load_reward

    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "@dataclass",
    ]
    lines += ["class Judge:", "    scale: float = 2.0", "    def __call__(self, completion):"]
    lines += ["        return self.scale", "reward = Judge()"]
    (tmp_path / "rewards.py").write_text("\n".join(lines))
    _, reward, weight = load_reward(f"{tmp_path}/rewards.py:reward=0.5")
    assert (reward(completion="Hi"), weight) == (2.0, 0.5)


def test_train_rl_says_when_no_answer_was_better_than_another(cli, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS.replace("len(completion) % 2", "1"))
    ran = cli("train", "rl", "rewards.py:reward", *RL)
    assert ran.code == 0
    assert "Nothing was learned" in ran.err


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("rewards.py", 2, "write FILE.py:FUNCTION"),
        ("rewards.py:nothing", 2, "has no function 'nothing'"),
        ("missing.py:reward", 2, "There is no file missing.py"),
        ("rewards.py:broken", 1, "the reward function failed on prompt"),
        ("syntax.py:reward", 1, "does not load: SyntaxError"),
    ],
)
def test_train_rl_with_a_wrong_reward_says_what_is_wrong(cli, tmp_path, function, code, words):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "syntax.py").write_text("def reward(:")
    ran = cli("train", "rl", function, *RL, "--log-dir", "a")
    assert ran.code == code
    assert words in ran.err


def test_checkpoint_download(cli, saved, tmp_path):
    shown = cli("checkpoint", "download", saved.state_path, "-o", "there", "--json").json
    folder = tmp_path / shown["destination"]
    assert (folder / "adapter_config.json").is_file()
    assert shown["file_size_bytes"] > 0
    again = cli("checkpoint", "download", saved.state_path, "-o", "there")
    assert again.code == 1
    assert "exists" in again.err
    forced = cli("checkpoint", "download", saved.state_path, "-o", "there", "--force")
    assert "Destination" in forced.out


def test_checkpoint_push_hf_of_something_that_is_no_adapter_fails(cli, saved):
    """The toy engine's checkpoints are no PEFT adapters, and the hub must never see one."""
    ran = cli("checkpoint", "push-hf", saved.state_path, "-r", "me/x")
    assert ran.code == 1
    assert "is not a PEFT adapter" in ran.err


def test_checkpoint_push_hf(cli, saved, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        "tinkex.client.service.downloads.push_to_hub",
        lambda folder, repo_id, **options: pushed.append((repo_id, options)),
    )
    shown = cli("checkpoint", "push-hf", saved.state_path, "-r", "me/x", "--public", "--json").json
    assert shown == {"checkpoint_path": saved.state_path, "repo_id": "me/x", "public": True}
    options = ("--revision", "dev", "--ignore-pattern", "*.md", "--no-model-card")
    table = cli("checkpoint", "push-hf", saved.state_path, "-r", "me/x", *options)
    assert "dev" in table.out
    assert pushed[1][1]["ignore_patterns"] == ["*.md"]
    assert pushed[1][1]["model_card"] is False


def test_export_and_import_bring_the_same_weights_back(cli, saved):
    exported = cli("export", saved.state_path, "-o", "adapter", "--json").json
    assert exported["format"] == "peft"
    imported = cli("import", "adapter", "--name", "home", "--json").json
    assert imported["tinker_path"].endswith("/weights/home")
    samples = [
        cli("sample", "Hello", "-m", path, "--seed", "5", "--max-tokens", "8").out
        for path in (saved.state_path, imported["tinker_path"])
    ]
    assert samples[0] == samples[1]
    assert "Destination" in cli("export", saved.state_path, "-o", "again").out
    assert "Checkpoint" in cli("import", "again").out


def test_an_adapter_of_links_is_imported(cli, saved, tmp_path):
    """As the Hugging Face cache keeps one."""
    cli("export", saved.state_path, "-o", "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert "Checkpoint" in cli("import", "snapshot").out


def test_export_into_a_folder_in_use_fails(cli, saved, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    ran = cli("export", saved.state_path, "-o", "mine")
    assert ran.code == 1
    assert (tmp_path / "mine" / "precious.txt").exists()
    assert "give --force" in ran.err
    assert cli("export", saved.state_path, "-o", "mine", "--to", "merged").code == 1
    # --force replaces the folder only once there is something to put there: a toy cannot be merged.
    assert cli("export", saved.state_path, "-o", "mine", "--to", "merged", "--force").code == 1
    assert (tmp_path / "mine" / "precious.txt").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("-o", "x", "--base", "y"),
        ("-o", "x", "--type", "f16"),
        ("-o", "x", "--to", "gguf"),
        ("-o", "x.gguf"),
    ],
)
def test_export_options_that_do_not_go_together_are_wrong_usage(cli, saved, options):
    assert cli("export", saved.state_path, *options).code == 2


def test_import_of_something_that_is_no_adapter_fails(cli, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no adapter_config.json" in cli("import", "empty").err
    (tmp_path / "empty" / "adapter_config.json").write_text('{"r": 4}')
    ran = cli("import", "empty", "--base-model", "tinkex/SmolLM2-135M-Instruct-Q4")
    assert ran.code == 1
    assert ran.err.startswith("Error: ")


def test_doctor(cli):
    table = cli("doctor", "--tokens", "8")
    assert max(map(len, table.out.splitlines())) <= 100, "to be read, in a pipe too"
    assert table.code == 0, table.out + table.err
    assert "logprobs tinkex/SmolLM2-135M-Instruct-Q4" in table.out
    shown = cli("doctor", "--no-models", "--json").json
    assert shown["ok"] is True
    assert {"python", "server", "disk", "gpu"} <= {f["check"] for f in shown["findings"]}


def test_doctor_of_a_dead_server_is_1_and_still_shows_the_machine(cli, monkeypatch):
    monkeypatch.setenv("TINKEX_CLIENT_RETRY_WINDOW_S", "0")
    monkeypatch.setenv("TINKEX_CLIENT_MAX_RETRIES", "0")
    ran = cli("--base-url", "http://127.0.0.1:9", "doctor", "--json")
    assert ran.code == 1
    findings = {f["check"]: f for f in ran.json["findings"]}
    assert findings["server"]["verdict"] == "fail"
    assert findings["python"]["verdict"] == "ok"


def test_the_gap_between_sampler_and_trainer_has_a_verdict():
    from tinkex.cli.commands.doctor import compare

    same = compare([-1.0, -2.0], [-1.0, -2.0])
    assert (same.verdict, str(same)) == ("ok", "equal to the bit over 2 tokens")
    apart = compare([-1.0, -2.0], [-1.5, -1.0])
    assert (apart.mean, apart.max, apart.verdict) == (0.75, 1.0, "fail")
    assert compare([-1.0], [-1.05]).verdict == "warn"


def test_sample_names_the_model_it_took_and_speaks_to_a_person(cli):
    ran = cli("sample", "hi", "--max-tokens", "2", "--json")
    assert ran.json["model"] == "tinkex/SmolLM2-135M-Instruct-Q4"
    ran = cli("sample", "hi", "--max-tokens", "100000000")
    assert ran.code == 1
    assert ran.err.startswith("Error: sampling_params.max_tokens: a prompt of")
    ran = cli("chat", "-p", "hi", "--temperature", "nan")
    assert ran.err == "Error: temperature: must be a finite number, got nan\n"


@pytest.mark.parametrize("command", [["sample", "hi"], ["chat", "-p", "hi"]])
def test_a_question_does_not_wait_for_transformers(toy_server, default_model_dir, command):
    """Importing it takes seconds, and the tokenizer of the default model needs none of it."""
    script = (
        "import sys; from tinkex.cli.app import run; code = run(sys.argv[1:]); "
        "sys.exit(code or sum(name in sys.modules for name in ('transformers', 'torch')))"
    )
    args = [*command, "--max-tokens", "8", "--seed", "1", "--base-url", toy_server]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    env["TINKEX_CACHE"] = str(default_model_dir.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env=env, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
