"""Tasks and episodes: rewards in every form, several turns, and what of them is learned."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tinkex import ServiceClient
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes import rl
from tinkex.recipes.episodes import Episode, Player, Question, Turn, as_task
from tinkex.recipes.render import Renderer

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


def quiet(*args):
    """Neither progress nor notes."""


def episode(row=None, line=7):
    question = Question(tokens=[1], row=row or {}, line=line)
    return Episode(question=question, tokens=[1], logprobs=[0.0], is_sampled=[False])


# ------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", None])
def test_a_reward_that_is_no_number_names_the_prompt_and_the_answer(value):
    task = as_task(lambda completion, row: value)
    with pytest.raises(InvalidInputError, match="reward function failed on prompt 7 .* 'said'"):
        task.judge([episode()], ["said"])


def test_async_rewards_of_a_turn_run_at_the_same_time():
    """Each waits until all have begun: one after the other they would wait for ever."""
    begun = []

    async def reward(completion, row):
        begun.append(completion)
        while len(begun) < 3:
            await asyncio.sleep(0)
        return len(completion)

    turns = as_task(reward).judge([episode()] * 3, ["a", "bb", "ccc"])
    assert [turn.reward for turn in turns] == [1, 2, 3]


async def test_rewards_may_be_async_inside_a_running_loop():
    async def reward(completion, row):
        return row["worth"]

    assert as_task(reward).judge([episode({"worth": 2})], ["x"])[0].reward == 2


def test_an_async_reward_that_fails_names_its_own_row():
    async def reward(completion, row):
        return 1 / row["n"]

    with pytest.raises(InvalidInputError, match="prompt 2 with the answer 'b': ZeroDivisionError"):
        as_task(reward).judge([episode({"n": 1}, 1), episode({"n": 0}, 2)], ["a", "b"])


def test_a_batched_reward_gets_all_answers_in_one_call():
    calls = []

    def reward(completions, rows):
        calls.append(len(completions))
        return [len(text) * row["worth"] for text, row in zip(completions, rows, strict=True)]

    turns = as_task(reward).judge([episode({"worth": 1}), episode({"worth": 2})], ["ab", "cd"])
    assert calls == [2]
    assert [turn.reward for turn in turns] == [2, 4]
    with pytest.raises(InvalidInputError, match="returned 1 rewards for 2 answers"):
        as_task(lambda completions, rows: [1.0]).judge([episode()] * 2, ["a", "b"])


# ------------------------------------------------------------------------------ environments


class Echo:
    """Says the answer's length, twice; then the episode is worth the number of turns."""

    def __init__(self, row):
        self.row, self.turns = row, 0

    def start(self):
        return [{"role": "user", "content": self.row["prompt"]}]

    def step(self, answer):
        self.turns += 1
        return Turn(reward=1.0, reply=f"{len(answer)}." if self.turns < 3 else None)


@pytest.fixture
def service(toy_server, default_model_dir):
    with ServiceClient(base_url=toy_server) as client:
        yield client


@pytest.fixture
def renderer(service):
    return Renderer(service.create_sampling_client(base_model=MODEL).get_tokenizer())


def play(service, renderer, environment, *, copies=2, max_turns=16):
    task = as_task(environment, max_turns=max_turns)
    player = Player(task=task, renderer=renderer, max_tokens=5)
    row = {"prompt": "Say something"}
    messages = ({"role": "user", "content": row["prompt"]},)
    question = Question(tokens=renderer.prompt(messages), row=row, line=1, messages=messages)
    sampler = service.create_sampling_client(base_model=MODEL)
    return player.play(sampler, [question], copies=copies, seed=3)[0]


def test_rewards_of_an_episode_add_up_and_its_turns_end(service, renderer):
    for one in play(service, renderer, Echo):
        assert one.reward == 3.0
        assert len(one.answers) == 3
        assert one.num_sampled <= 15


def test_an_episode_reads_as_its_conversation_does(service, renderer):
    """Turn by turn it is what rendering the whole conversation gives, answers as sampled."""
    one = play(service, renderer, Echo, copies=1)[0]
    told = str(renderer.tokenizer.decode(one.tokens))
    assert told.startswith(str(renderer.tokenizer.decode(one.question.tokens)))
    for answer in one.answers[:-1]:
        assert f"<|im_start|>user\n{len(answer)}.<|im_end|>\n<|im_start|>assistant\n" in told
    assert told.count("<|im_start|>assistant\n") == 3


def test_what_the_environment_says_is_read_and_never_learned(service, renderer):
    one = play(service, renderer, Echo, copies=1)[0]
    datum = rl.datum_of(one, [0.5] * len(one.tokens))
    advantages = datum.loss_fn_inputs["advantages"].tolist()
    assert [bool(a) for a in advantages] == one.is_sampled[1:]
    assert sum(map(bool, advantages)) == one.num_sampled < len(advantages)
    logprobs = datum.loss_fn_inputs["logprobs"].tolist()
    assert all(q <= 0 for q in logprobs)
    assert all(q == 0 for q, said in zip(logprobs, one.is_sampled[1:], strict=True) if not said)


def test_an_answer_cut_short_is_ended_before_the_reply(renderer):
    messages = [{"role": "user", "content": "Hi"}]
    reply = [{"role": "user", "content": "Go on"}]
    cut = renderer.tokenizer.encode("Aye", add_special_tokens=False)
    ended = [*cut, *renderer.stop]
    between = renderer.between(messages, "Aye", reply, cut)
    assert [*ended, *renderer.between(messages, "Aye", reply, ended)] == [*cut, *between]


def test_turns_are_bounded(service, renderer):
    class Endless(Echo):
        def step(self, answer):
            return Turn(reply="again")

    assert len(play(service, renderer, Endless, copies=1, max_turns=2)[0].answers) == 2


def test_environments_that_break_the_protocol_are_named(service, renderer):
    class NoTurn(Echo):
        def step(self, answer):
            return 1.0

    class Fickle(Echo):
        def start(self):
            return "something else"

    class Deaf:
        def start(self):
            return "Hi"

    with pytest.raises(InvalidInputError, match=r"step\(\) must return a Turn, got float"):
        play(service, renderer, NoTurn)
    with pytest.raises(InvalidInputError, match="two different things for prompt 1"):
        play(service, renderer, Fickle)
    with pytest.raises(ConfigError, match=r"Deaf is no environment: it has no step\(\)"):
        as_task(Deaf)


# ------------------------------------------------------------------------------ the loop


PROMPTS = [{"prompt": f"Count to {i}", "kind": "odd" if i % 2 else "even"} for i in range(6)]


def config(folder, **changes):
    base = rl.RlConfig(
        log_dir=str(folder),
        rank=4,
        learning_rate=0.02,
        steps=2,
        prompts_per_step=2,
        group_size=4,
        max_tokens=5,
        eval_share=0.0,
    )
    return replace(base, **changes)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def parity(completion, row):
    return float(len(completion) % 2)


def test_an_environment_trains_and_its_turns_are_counted(service, tmp_path):
    rl.train(config(tmp_path), service, Echo, PROMPTS, quiet, quiet)
    assert [line["turns"] for line in metrics(tmp_path)] == [3.0, 3.0]
    assert [line["reward"] for line in metrics(tmp_path)] == [3.0, 3.0]


def test_kl_to_the_base_begins_at_zero_and_grows(service, tmp_path):
    changes = {"kl_to": "base", "steps": 6, "learning_rate": 0.1}
    rl.train(config(tmp_path, **changes), service, parity, PROMPTS, quiet, quiet)
    kl = [line["kl"] for line in metrics(tmp_path)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert max(kl) > 1e-4


def test_the_penalty_takes_off_what_the_reference_finds_unlikely():
    question = Question(tokens=[1], row={}, line=1)
    one = Episode(
        question=question,
        tokens=[1, 2, 3],
        logprobs=[0.0, -1.0, -1.0],
        is_sampled=[False, True, True],
        reward=1.0,
        gaps=[0.0, 1.0, -1.0],
    )
    (datum,) = rl.with_penalty([[one]], coef=0.5)[0]
    assert datum.loss_fn_inputs["advantages"].tolist() == [-0.5, 0.5]
    assert rl.kl_of([one]) == pytest.approx(0.5431, abs=1e-4)
    assert rl.kl_of([replace(one, gaps=[0.0, 0.0, 0.0])]) == 0.0


def test_rewards_are_told_by_group_and_by_a_field_of_the_rows(service, tmp_path):
    def by_kind(completion, row):
        return 1.0 if row["kind"] == "odd" else 0.0

    changes = {"reward_by": "kind", "steps": 3}
    rl.train(config(tmp_path, **changes), service, by_kind, PROMPTS, quiet, quiet)
    told = [line for line in metrics(tmp_path) if "reward/odd" in line and "reward/even" in line]
    for line in told:
        assert (line["reward/odd"], line["reward/even"]) == (1.0, 0.0)
        assert (line["reward_worst_group"], line["reward_best_group"]) == (0.0, 1.0)
    assert told


def test_a_batch_is_left_when_the_policy_has_moved_too_far(service, tmp_path):
    """Each of four updates moves it; with a bound of next to nothing the later ones are left."""
    changes = {"updates_per_step": 4, "prompts_per_step": 4, "steps": 1, "learning_rate": 0.3}
    free = config(tmp_path / "free", **changes)
    bound = config(tmp_path / "bound", **changes, max_policy_kl=1e-9)
    for each in (free, bound):
        rl.train(each, service, parity, PROMPTS, quiet, quiet)
    updates = [metrics(tmp_path / name)[0]["updates"] for name in ("free", "bound")]
    assert updates[1] < updates[0] <= 4


def test_a_run_stops_at_a_reward_that_is_good_enough_and_stays_stopped(service, tmp_path):
    notes = []
    changes = {"eval_share": 0.2, "eval_every": 1, "stop_at_reward": 1.0, "steps": 5}
    stopping = config(tmp_path, **changes)
    one = rl.train(stopping, service, lambda completion, row: 1.0, PROMPTS, quiet, notes.append)
    assert one.step == 0
    assert any("held_out_reward has reached 1" in note for note in notes)
    again = rl.train(stopping, service, lambda completion, row: 1.0, PROMPTS, quiet, notes.append)
    assert again.step == 0
    assert "holds a finished run" in notes[-2] + notes[-1]


def test_every_metric_of_a_run_is_explained(service, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "api" / "metrics.md").read_text(encoding="utf-8")
    changes = {"kl_to": "base", "reward_by": "kind", "eval_share": 0.2}
    rl.train(config(tmp_path, **changes), service, parity, PROMPTS, quiet, quiet)
    told = {name for line in metrics(tmp_path) for name in line} - {"step", "time"}
    assert {name for name in told if f"`{name}`" not in page and "reward/" not in name} == set()
