"""Reward functions are called by the names of their parameters, TRL's among them."""

from __future__ import annotations

import asyncio
import functools
import re

import pytest

from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes import rl
from tinkex.recipes.episodes import Episode, Question, as_task


def episode(row, text="x", line=7):
    prompt = row.get("prompt", row.get("messages"))
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    question = Question(tokens=[1, 2], row=row, line=line, messages=messages)
    return Episode(
        question=question,
        tokens=[1, 2, *map(ord, text)],
        logprobs=[0.0] * (2 + len(text)),
        is_sampled=[False] * 2 + [True] * len(text),
    )


def judged(reward, rows, texts):
    episodes = [episode(row, text) for row, text in zip(rows, texts, strict=True)]
    return as_task(reward).judge(episodes, texts)


ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def test_a_trl_reward_gets_prompts_and_completions_by_name():
    """H5: it was called by position, with the answers as prompts and the rows as completions."""
    seen = {}

    def reward_func(prompts, completions, **kwargs):
        seen.update(prompts=prompts, completions=completions, kwargs=kwargs)
        return [float(len(completion)) for completion in completions]

    turns = judged(reward_func, ROWS, ["2", "four"])
    assert [turn.reward for turn in turns] == [1.0, 4.0]
    assert seen["prompts"] == ["1 + 1?", "2 + 2?"]
    assert seen["completions"] == ["2", "four"]
    assert seen["kwargs"] == {
        "answer": ["2", "4"],
        "completion_ids": [[50], [102, 111, 117, 114]],
    }


def test_a_trl_reward_gets_messages_where_the_prompts_are_messages():
    def format_reward(completions, **kwargs):
        return [float(completion[0]["content"] == "2") for completion in completions]

    def says(prompts, completions):
        return [float(len(prompt[-1]["content"])) for prompt in prompts]

    assert [turn.reward for turn in judged(format_reward, CHATS, ["2", "4"])] == [1.0, 0.0]
    assert [turn.reward for turn in judged(says, CHATS, ["2", "4"])] == [6.0, 6.0]


def test_a_column_can_be_asked_for_by_its_name():
    def exact(completions, answer, **kwargs):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def one(completion, answer):
        return float(completion == answer)

    async def three(prompt, completion, *, answer, row, tolerance=0.5):
        assert row["prompt"] == prompt
        return float(completion == answer) + tolerance

    assert [turn.reward for turn in judged(exact, ROWS, ["2", "5"])] == [1.0, 0.0]
    assert [turn.reward for turn in judged(one, ROWS, ["2", "5"])] == [1.0, 0.0]
    assert [turn.reward for turn in judged(three, ROWS, ["2", "5"])] == [1.5, 0.5]


def test_a_row_without_a_column_that_others_have_gives_none():
    def reward(completions, answer):
        return [0.0 if a is None else 1.0 for a in answer]

    rows = [{"prompt": "Hi"}, *ROWS]
    assert [turn.reward for turn in judged(reward, rows, ["a", "b", "c"])] == [0.0, 1.0, 1.0]


def test_our_own_forms_get_texts_and_rows_whatever_the_prompts_are():
    def batched(completions, rows):
        assert rows == CHATS
        return [float(len(text)) for text in completions]

    assert [turn.reward for turn in judged(batched, CHATS, ["a", "bb"])] == [1.0, 2.0]
    assert [t.reward for t in judged(lambda text, row: len(row), ROWS, ["a", "b"])] == [2.0, 2.0]
    partial = functools.partial(lambda weight, text, row: weight * len(text), 3)
    assert [turn.reward for turn in judged(partial, ROWS, ["a", "bb"])] == [3.0, 6.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions, anser: [], r"'anser'.*completions, prompts, rows.*\(answer, prompt\)"),
        (lambda completion, trainer_state: 0, "'trainer_state'.*completion, prompt, row"),
        (lambda prompts, rows: 0, r"no parameter for the answer\. Call it `completion`"),
        (lambda row, completed: 0, "no parameter for the answer"),
        (lambda: 0, "no parameter for the answer"),
        (lambda a, b, c: 0, "no parameter for the answer"),
        (
            lambda text, answer: 0,
            "would get the answer and the whole row, but 'answer' is a column",
        ),
        (max, "max does not say which parameters it has"),
        ([], "empty list of rewards"),
        ([(len, float("nan"))], "weight of a reward must be a finite number"),
        ([(lambda completion: 1.0, "0.2")], "weight of a reward must be a finite number.*'0.2'"),
        ([(lambda completion: 1.0, 1, 2)], "with a weight is .function, weight., got"),
        ([(Episode, 1.0)], "Episode is a class"),
    ],
)
def test_a_parameter_that_nothing_stands_for_is_refused_with_what_there_is(reward, message):
    with pytest.raises(ConfigError, match=message):
        as_task(reward).check({"prompt", "answer"})


def test_a_wrong_parameter_is_refused_before_a_run_is_made(tmp_path):
    """No server is there: nothing was asked of one."""
    config = rl.RlConfig(log_dir=str(tmp_path / "run"), steps=1)
    with pytest.raises(ConfigError, match="'solution'.*answer, prompt"):
        rl.train(config, None, lambda completions, solution: [], ROWS)
    assert not (tmp_path / "run").exists()


def test_rewards_by_a_field_that_no_prompt_has_are_refused(tmp_path):
    config = rl.RlConfig(log_dir=str(tmp_path / "run"), reward_by="kind")
    with pytest.raises(ConfigError, match="no prompt has a field 'kind'; they have answer, prompt"):
        rl.train(config, None, lambda completion: 1.0, ROWS)


def test_weighted_rewards_add_up_and_are_told_by_name():
    def length(completions, **kwargs):
        return [len(completion) for completion in completions]

    async def right(completion, answer):
        await asyncio.sleep(0)
        return 1.0 if completion == answer else 0.0

    task = as_task([(length, 0.5), right, (lambda completion, row: -1.0, 2)])
    episodes = [episode(ROWS[0], "2"), episode(ROWS[1], "four")]
    for one, turn in zip(episodes, task.judge(episodes, ["2", "four"]), strict=True):
        one.reward, one.parts = turn.reward, dict(turn.parts)
    assert [one.reward for one in episodes] == [0.5 + 1 - 2, 2.0 + 0 - 2]
    metrics = rl.reward_metrics([episodes])
    assert metrics["rewards/length"] == 2.5
    assert metrics["rewards/right"] == 0.5
    assert metrics["rewards/<lambda>"] == -1.0


def test_a_task_says_in_few_words_what_judges():
    def right(completion, row):
        return 1.0

    assert as_task([right, (right, 0.25)]).name == "right, right_2=0.25"
    assert as_task(right).name == "right"


def test_what_an_async_reward_keeps_from_step_to_step_stays_usable():
    """The client of a judge, kept by a module: its loop was closed after the first step."""
    loops = []

    async def judge(completion):
        loops.append(asyncio.get_running_loop())
        return 1.0

    for _ in range(3):
        judged(judge, ROWS, ["a", "b"])
    assert len(set(loops)) == 1
    assert loops[0].is_running()


def test_rewards_of_one_name_are_told_apart():
    task = as_task([lambda completion: 1.0, lambda completion: 2.0])
    (turn,) = task.judge([episode(ROWS[0])], ["x"])
    assert turn.parts == {"<lambda>": 1.0, "<lambda>_2": 2.0}


def test_a_reward_that_does_not_apply_counts_for_nothing():
    """TRL's rewards of several tasks return None for rows of the others."""

    def math_only(completions, answer):
        return [None if a == "4" else 1.0 for a in answer]

    def other(completions, answer):
        return [None, 0.25]

    turns = judged([math_only, (other, 2)], ROWS, ["2", "4"])
    assert [turn.reward for turn in turns] == [1.0, 0.5]
    assert [dict(turn.parts) for turn in turns] == [{"math_only": 1.0}, {"other": 0.25}]
    with pytest.raises(
        InvalidInputError, match=re.escape("prompt 7 with the answer '4': a reward must be a f")
    ):
        judged(math_only, ROWS, ["2", "4"])
