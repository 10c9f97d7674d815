"""The recipes on the toy engine: they learn, and a resumed run repeats the undisturbed one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from tinkex import APIFuture, ServiceClient
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes import dpo, get_lr, rl, sft
from tinkex.recipes.batches import batch_at
from tinkex.recipes.episodes import Episode
from tinkex.recipes.learning_rate import learning_rate_at
from tinkex.recipes.server_tracker import ServerTracker
from tinkex.runs.run_log import RunLog

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def service(toy_server):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def quiet(*args):
    """Neither progress nor notes."""


@pytest.fixture
def sft_config(tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": "aye aye captain"} for i in range(10)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sft.SftConfig(
        data=str(path),
        log_dir=str(tmp_path / "log"),
        rank=4,
        learning_rate=0.02,
        batch_size=3,
        epochs=2,
        eval_every=2,
        save_every=2,
    )


def curve(folder):
    return [
        {k: v for k, v in record.items() if k not in ("time", "tokens_per_s")}
        for record in map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    ]


def test_sft_learns_and_leaves_a_complete_log(service, sft_config):
    result = sft.train(sft_config, service, quiet, quiet)
    losses = [record["loss"] for record in curve(sft_config.log_dir) if "loss" in record]
    assert losses[-1] < losses[0]
    log = RunLog(sft_config.log_dir, asdict(sft_config))
    assert log.last.state_path == result.state_path
    assert (log.folder / "loss.png").exists()


class KilledError(Exception):
    """Stands for a crash: nothing is saved on the way out."""


def test_a_crashed_sft_run_resumes_exactly(service, sft_config, tmp_path):
    undisturbed = replace(sft_config, log_dir=str(tmp_path / "other"))
    sft.train(undisturbed, service, quiet, quiet)

    def crash(step, num_steps, metrics):
        if step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        sft.train(sft_config, service, crash, quiet)
    sft.train(sft_config, service, quiet, quiet)
    assert curve(sft_config.log_dir) == curve(undisturbed.log_dir)


def test_a_finished_run_started_again_trains_no_further(service, sft_config):
    first = sft.train(sft_config, service, quiet, quiet)
    before = curve(sft_config.log_dir)
    notes = []
    assert sft.train(sft_config, service, quiet, notes.append).state_path == first.state_path
    assert curve(sft_config.log_dir) == before
    assert "holds a finished run" in notes[-1]


def test_a_finished_run_started_again_makes_no_run_on_the_server(service, sft_config):
    runs = service.create_rest_client().list_training_runs
    first = sft.train(sft_config, service, quiet, quiet)
    before = runs(limit=1).result().cursor.total_count
    again = sft.train(sft_config, service, quiet, quiet)
    assert again == first
    assert runs(limit=1).result().cursor.total_count == before
    longer = sft.train(replace(sft_config, epochs=4), service, quiet, quiet)
    assert longer.step > first.step
    assert runs(limit=1).result().cursor.total_count == before, "a longer run is the same run"


def test_a_finished_run_whose_checkpoint_is_gone_says_so(service, sft_config):
    done = sft.train(sft_config, service, quiet, quiet)
    rest = service.create_rest_client()
    rest.delete_checkpoint_from_tinker_path(done.sampler_path).result()
    with pytest.raises(ConfigError, match="start over in another log folder") as refused:
        sft.train(sft_config, service, quiet, quiet)
    assert done.sampler_path in str(refused.value)
    assert "Error code" not in str(refused.value)


def test_other_settings_in_the_same_folder_are_refused(service, sft_config):
    sft.train(sft_config, service, quiet, quiet)
    with pytest.raises(ConfigError, match="rank=4, now 8"):
        sft.train(replace(sft_config, rank=8), service, quiet, quiet)


def test_a_run_of_another_server_says_how_to_go_on(service, sft_config):
    sft.train(sft_config, service, quiet, quiet)
    lost = '{"step": 2, "state_path": "tinker://gone:train:0/weights/x", "sampler_path": null}\n'
    (Path(sft_config.log_dir) / "checkpoints.jsonl").write_text(lost)
    with pytest.raises(ConfigError, match="start over in another log folder"):
        sft.train(sft_config, service, quiet, quiet)


def test_what_is_held_out_is_never_trained_on(service, tmp_path):
    """R34: accuracy and reward are also shown on rows the run has not seen."""
    asked = []

    def reward(text, row):
        asked.append(row["prompt"])
        return float(len(text) % 2)

    config = replace(rl_config(tmp_path), eval_share=0.2, steps=10, eval_every=100)
    rl.train(config, service, reward, PROMPTS, quiet, quiet)
    counts = {row["prompt"]: asked.count(row["prompt"]) for row in PROMPTS}
    assert counts["Count to 0"] == 2  # Once before and once after.
    assert min(count for name, count in counts.items() if name != "Count to 0") >= 4


def test_rows_that_are_too_long_are_reported(service, sft_config):
    notes = []
    with open(sft_config.data, "a") as file:
        file.write(json.dumps({"prompt": "long", "completion": "word " * 200}) + "\n")
    sft.train(replace(sft_config, max_length=100), service, quiet, notes.append)
    assert notes[0].splitlines()[0].endswith(": 10 usable rows, 1 not usable")
    assert "line 11" in notes[0]
    assert "more than max_length 100" in notes[0]


def parity(text, row):
    return float(len(text) % 2)


PROMPTS = [{"prompt": f"Count to {i}"} for i in range(5)]


def rl_config(folder, **changes):
    return rl.RlConfig(
        log_dir=str(folder),
        rank=4,
        learning_rate=0.02,
        steps=4,
        prompts_per_step=2,
        group_size=4,
        max_tokens=6,
        save_every=2,
        **changes,
    )


def test_a_crashed_rl_run_resumes_exactly(service, tmp_path):
    rl.train(rl_config(tmp_path / "a"), service, parity, PROMPTS, quiet, quiet)

    def crash(step, num_steps, metrics):
        if step == 2:
            raise KilledError

    with pytest.raises(KilledError):
        rl.train(rl_config(tmp_path / "b"), service, parity, PROMPTS, crash, quiet)
    rl.train(rl_config(tmp_path / "b"), service, parity, PROMPTS, quiet, quiet)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_rl_raises_the_reward_of_what_it_can_do(service, tmp_path):
    """One token is worth a point; the toy model learns to say it."""

    def reward(text, row):
        return float("a" in text)

    config = replace(
        rl_config(tmp_path), steps=25, group_size=8, learning_rate=0.05, eval_share=0.2
    )
    result = rl.train(config, service, reward, PROMPTS, quiet, quiet)
    rewards = [record["reward"] for record in curve(tmp_path) if "reward" in record]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    held_out = {r["step"]: r["held_out_reward"] for r in curve(tmp_path) if "held_out_reward" in r}
    assert list(held_out) == [0, 20, 25]
    assert held_out[25] == result.metrics["held_out_reward"]


def episode(question, tokens, logprobs, reward):
    length = len(question.tokens)
    return Episode(
        question=question,
        tokens=question.tokens + tokens,
        logprobs=[0.0] * length + logprobs,
        is_sampled=[False] * length + [True] * len(tokens),
        reward=reward,
    )


def test_answers_of_equal_reward_teach_nothing():
    question = rl.Question(tokens=[1, 2], row={}, line=1)
    assert list(rl.group_data([episode(question, [3], [-1.0], 1.0)] * 3)) == []


def test_an_answers_advantage_is_its_reward_above_the_groups_mean():
    question = rl.Question(tokens=[1, 2], row={}, line=1)
    group = [episode(question, [3, 4], [-1.0, -2.0], reward) for reward in (1.0, 0.0)]
    first, second = rl.group_data(group)
    assert first.model_input.to_ints() == [1, 2, 3]
    assert first.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4]
    assert first.loss_fn_inputs["advantages"].tolist() == [0.0, 0.5, 0.5]
    assert second.loss_fn_inputs["advantages"].tolist() == [0.0, -0.5, -0.5]
    assert first.loss_fn_inputs["logprobs"].tolist() == [0.0, -1.0, -2.0]


@pytest.mark.parametrize("share", [1, 2, -0.1, float("nan")])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(sft_config, share):
    with pytest.raises(ConfigError, match="eval_share must be at least 0 and below 1"):
        replace(sft_config, eval_share=share)


def test_a_group_of_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        replace(rl_config(tmp_path), group_size=1)


def test_dpo_prefers_the_chosen_answers_and_resumes_exactly(service, tmp_path):
    rows = [{"prompt": f"Q{i}", "chosen": "aye sir", "rejected": "no way"} for i in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(name):
        return dpo.DpoConfig(
            data=str(path),
            log_dir=str(tmp_path / name),
            rank=4,
            learning_rate=0.02,
            batch_size=2,
            epochs=2,
            eval_share=0.34,
            eval_every=2,
            save_every=2,
        )

    result = dpo.train(config("a"), service, quiet, quiet)
    assert curve(tmp_path / "a")[0]["margin"] == pytest.approx(0, abs=1e-5)
    trained = [record for record in curve(tmp_path / "a") if "accuracy" in record]
    assert trained[-1]["accuracy"] == 1.0
    assert [r["step"] for r in curve(tmp_path / "a") if "held_out_accuracy" in r] == [2, 4]
    assert result.metrics["held_out_accuracy"] == 1.0
    assert 0 < result.metrics["held_out_loss"] < math.log(2)

    def crash(step, num_steps, metrics):
        if step == 3:
            raise KilledError

    with pytest.raises(KilledError):
        dpo.train(config("b"), service, crash, quiet)
    dpo.train(config("b"), service, quiet, quiet)
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_every_row_comes_once_per_epoch_in_an_order_that_the_seed_decides():
    rows = list(range(10))
    seen = [row for step in range(5) for row in batch_at(rows, 4, step, seed=1)]
    assert sorted(seen[:10]) == rows
    assert sorted(seen[10:]) == rows
    assert seen[:10] != seen[10:]
    assert batch_at(rows, 4, 3, seed=1) == batch_at(rows, 4, 3, seed=1)


def test_the_linear_schedule_ends_at_a_tenth():
    assert learning_rate_at(0, 10, 1.0, "linear") == 1.0
    assert learning_rate_at(9, 10, 1.0, "linear") == pytest.approx(0.1)
    assert learning_rate_at(9, 10, 1.0, "constant") == 1.0


def test_the_console_draws_what_a_recipe_measures(service, sft_config, toy_server):
    """Without a word from the user; what the server measures itself is not drawn twice."""
    result = sft.train(sft_config, service, quiet, quiet)
    run_id = result.state_path.removeprefix("tinker://").split("/")[0]
    curves = httpx.get(f"{toy_server}/console/api/runs/{run_id}").json()["curves"]
    logged = [record for record in curve(sft_config.log_dir) if "loss" in record]
    assert curves["loss"]["values"] == pytest.approx([record["loss"] for record in logged])
    assert curves["held_out_loss"]["steps"][0] == 0
    assert [name for name in curves if name.startswith("learning_rate")] == ["learning_rate"]


def test_the_server_knows_the_settings_of_a_recipes_run(service, sft_config, tmp_path):
    """H6: it knew base model and rank, and Compare called different runs alike."""
    result = sft.train(replace(sft_config, learning_rate="auto"), service, quiet, quiet)
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(result.state_path).result()
    assert run.name == "log"
    assert run.settings["recipe"] == "sft"
    assert run.settings["learning_rate"] == pytest.approx(get_lr(MODEL))
    assert run.settings["batch_size"] == 3
    assert run.settings["data"] == sft_config.data


def test_a_run_on_a_checkpoint_tells_the_rank_of_the_checkpoint(service, sft_config, tmp_path):
    """It told the default, 32, whatever the checkpoint had."""
    result = sft.train(sft_config, service, quiet, quiet)
    further = sft.SftConfig(
        data=sft_config.data, log_dir=str(tmp_path / "further"), model=result.state_path, epochs=0.5
    )
    result = sft.train(further, service, quiet, quiet)
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(result.state_path).result()
    assert run.settings["rank"] == run.lora_rank == sft_config.rank != further.rank


def test_a_resumed_recipe_is_one_run_on_the_server(service, sft_config, toy_server):
    sft.train(sft_config, service, lambda step, *others: step < 3, quiet)
    result = sft.train(sft_config, service, quiet, quiet)
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(result.state_path).result()
    assert run.continues.step == 4
    page = httpx.get(f"{toy_server}/console/api/runs/{run.training_run_id}").json()
    assert page["curves"]["loss"]["steps"][-2:] == [4, 5]


def test_a_resumed_run_keeps_the_name_that_its_user_gave_it(service, sft_config):
    """It took the name of its folder again, and the commands that named it missed it."""
    stopped = sft.train(sft_config, service, lambda step, *others: step < 3, quiet)
    rest = service.create_rest_client()
    run_id = rest.get_training_run_by_tinker_path(stopped.state_path).result().training_run_id
    rest.describe_run(run_id, name="caps", note="mine").result()
    result = sft.train(sft_config, service, quiet, quiet)
    run = rest.get_training_run_by_tinker_path(result.state_path).result()
    assert (run.name, run.note) == ("caps", "mine")


def test_a_server_that_draws_nothing_does_not_stop_a_run():
    class Hosted:
        num_asked = 0

        def log_metrics(self, metrics, step):
            self.num_asked += 1
            future = APIFuture()
            future.set_exception(ConfigError("404"))
            return future

    hosted = Hosted()
    tracker = ServerTracker(hosted)
    for step in range(5):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    assert hosted.num_asked == 1


def test_rl_writes_down_what_was_said_and_what_it_earned(service, tmp_path):
    config = rl_config(tmp_path / "log")
    rl.train(config, service, parity, PROMPTS, quiet, quiet)
    lines = [json.loads(x) for x in (tmp_path / "log" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == config.steps * config.prompts_per_step * config.group_size
    for line in lines:
        assert "".join(line["pieces"]).strip().startswith(line["text"])
        assert len(line["pieces"]) == len(line["tokens"]) == len(line["logprobs"])
        assert line["reward"] == parity(line["text"], {})
    group = [line["advantage"] for line in lines if (line["step"], line["group"]) == (0, 0)]
    assert sum(group) == pytest.approx(0)


def test_ones_own_server_shows_what_was_sampled_without_a_flag(service, tmp_path, toy_server):
    """M6: its page said that this server keeps no answers, with a file of them on the same disk."""
    result = rl.train(rl_config(tmp_path / "log"), service, parity, PROMPTS, quiet, quiet)
    run_id = result.state_path.removeprefix("tinker://").split("/")[0]
    run = service.create_rest_client().get_training_run(run_id).result()
    assert run.settings["rewards"] == "parity"
    shown = httpx.get(f"{toy_server}/console/api/runs/{run_id}/rollouts?step=0").json()
    lines = [json.loads(x) for x in (tmp_path / "log" / "rollouts.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["step"] == 0]
    assert sorted(one["tokens"] for one in shown["answers"]) == sorted(
        line["tokens"] for line in first
    )


def test_a_loss_that_is_no_number_does_not_end_a_run_for_its_picture(service):
    training = service.create_lora_training_client(base_model=MODEL, rank=4)
    tracker = ServerTracker(training)
    tracker.log(1, {"loss": math.nan, "reward": 1.0, "kl": math.inf})
    tracker.close()
    with pytest.raises(InvalidInputError, match=r"metrics.loss: must be a finite number, got nan"):
        training.log_metrics({"loss": math.nan})
    with pytest.raises(InvalidInputError, match=r"metrics: a name of an entry must be a text of"):
        training.log_metrics({"a" * 101: 1.0})
