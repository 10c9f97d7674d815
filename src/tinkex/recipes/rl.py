"""Reinforcement learning with groups: sample several answers, reward them, learn the better ones.

Copy this file and change it. An answer's advantage is its reward minus the mean reward of the
answers to the same prompt, so no value model is needed (GRPO). The reward is any Python function:

    def reward(completion: str, row: dict) -> float: ...  # or async def
"""

from __future__ import annotations

import asyncio
import inspect
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tinkex import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient
from tinkex.chat.detokenizer import pieces_of
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes.data import load_prompts, split_off
from tinkex.recipes.loop import (
    DEFAULT_MODEL,
    OnNote,
    OnStep,
    Result,
    Schedule,
    batch_at,
    check_positive,
    check_share,
    finish,
    learning_rate_at,
    note_if_finished,
    open_training,
    print_step,
    save,
    stop_between_steps,
    usable,
)
from tinkex.recipes.render import Renderer
from tinkex.recipes.rollouts import Rollout, RolloutLog
from tinkex.recipes.run_log import RunLog, make_trackers, plot

Reward = Callable[[str, Mapping[str, Any]], float | Awaitable[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RlConfig:
    log_dir: str
    model: str = DEFAULT_MODEL
    rank: int = 32
    learning_rate: float = 2e-4
    schedule: Schedule = "constant"
    steps: int = 60
    prompts_per_step: int = 8
    group_size: int = 8
    """Answers sampled per prompt."""
    max_tokens: int = 64
    temperature: float = 1.0
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    eval_share: float = 0.1
    """Share of the prompts held out; at most 32."""
    eval_every: int = 20
    save_every: int = 20
    seed: int = 0
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "rank", "learning_rate", "steps", "prompts_per_step", "max_tokens")
        check_positive(self, "temperature", "eval_every", "save_every")
        check_share(self)
        if self.group_size < 2:
            raise ConfigError(
                f"group_size must be at least 2, got {self.group_size}: "
                "an answer is judged against the others of its group."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    tokens: list[int]
    row: Mapping[str, Any]
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    question: Question
    tokens: list[int]
    logprobs: list[float]
    reward: float


def train(
    config: RlConfig,
    service: ServiceClient,
    reward: Reward,
    prompts: str | Iterable[Mapping[str, Any]],
    on_step: OnStep = print_step,
    on_note: OnNote = print,
) -> Result:
    """Run, or resume, one RL run. Ctrl-C ends it after the current step, with a checkpoint."""
    loaded = load_prompts(prompts)
    trackers = make_trackers(config.trackers, config.log_dir, asdict(config))
    # A constant learning rate does not depend on the length, so a finished run may be prolonged.
    may_change = frozenset({"steps"} if config.schedule == "constant" else ())
    log = RunLog(config.log_dir, asdict(config), may_change=may_change, trackers=trackers)
    training, start = open_training(
        service, log, model=config.model, rank=config.rank, seed=config.seed
    )
    renderer = Renderer(training.get_tokenizer())
    questions = usable(
        loaded,
        lambda row: Question(tokens=renderer.prompt(row.messages), row=row.row, line=row.line),
    )
    on_note(loaded.report())
    questions, held_out = split_off(questions, config.eval_share, at_most=32)
    note_if_finished(on_note, log, start, config.steps)
    rollouts = RolloutLog(config.log_dir, start_step=start)

    metrics: dict[str, float] = {}
    with stop_between_steps(on_note) as stop:
        for step in range(start, config.steps):
            began = time.monotonic()
            metrics = {}
            sampler = training.save_weights_and_get_sampling_client()
            if held_out and step % config.eval_every == 0:
                metrics["held_out_reward"] = evaluate(sampler, held_out, renderer, reward, config)
            batch = batch_at(questions, config.prompts_per_step, step, config.seed)
            groups = sample_groups(sampler, batch, renderer, reward, config, step)
            rollouts.write(to_look_at(groups, renderer, step))

            data = [datum for group in groups for datum in group_data(group)]
            rate = learning_rate_at(step, config.steps, config.learning_rate, config.schedule)
            gap: dict[str, float] = {}
            if data:  # All answers of all groups equally good: there is nothing to learn from.
                forward_backward = training.forward_backward(data, config.loss_fn)
                optim_step = training.optim_step(AdamParams(learning_rate=rate))
                answered = forward_backward.result().metrics
                optim_step.result()
                gap = {
                    name.split(":")[0]: value
                    for name, value in answered.items()
                    if "gap" in name or "kl" in name
                }

            rewards = [answer.reward for group in groups for answer in group]
            num_tokens = sum(len(answer.tokens) for group in groups for answer in group)
            metrics |= {
                "reward": statistics.fmean(rewards),
                "reward_std": statistics.pstdev(rewards),
                "groups_with_signal": sum(len(set(_rewards(group))) > 1 for group in groups)
                / len(groups),
                "answer_tokens": num_tokens / len(rewards),
                "learning_rate": rate,
                "tokens_per_s": num_tokens / (time.monotonic() - began),
                **gap,
            }
            log.metrics(step, metrics)
            on_step(step, config.steps, metrics)
            if stop.requested:
                return finish(training, log, step + 1, interrupted=True, metrics=metrics)
            if (step + 1) % config.save_every == 0:
                save(training, log, step + 1)

    if held_out:
        sampler = training.save_weights_and_get_sampling_client()
        metrics["held_out_reward"] = evaluate(sampler, held_out, renderer, reward, config)
        log.metrics(config.steps, {"held_out_reward": metrics["held_out_reward"]})
    result = finish(training, log, config.steps, interrupted=False, metrics=metrics)
    if not any(record.get("groups_with_signal") for record in log.read_metrics()):
        on_note(
            "Nothing was learned: in every group all answers got the same reward. Reward partly "
            "right answers, or ask something the model gets right now and then."
        )
    plot(log, {"reward": "mean reward", "held_out_reward": "held-out reward"}, "RL: mean reward")
    return result


def sample_groups(
    sampler: SamplingClient,
    batch: Sequence[Question],
    renderer: Renderer,
    reward: Reward,
    config: RlConfig,
    step: int,
) -> list[list[Answer]]:
    """A group of answers for each question, sampled all at once, then rewarded."""
    futures = [
        sampler.sample(
            ModelInput.from_ints(question.tokens),
            num_samples=config.group_size,
            sampling_params=SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                stop=renderer.stop,
                # A seed of its own for every question of every step, the same after a resume.
                seed=(config.seed * 1_000_003 + step) * 10_007 + index,
            ),
        )
        for index, question in enumerate(batch)
    ]
    return [
        [
            Answer(
                question=question,
                tokens=list(sequence.tokens),
                logprobs=list(sequence.logprobs or []),
                reward=judge(reward, renderer.text(sequence.tokens), question),
            )
            for sequence in future.result().sequences
        ]
        for future, question in zip(futures, batch, strict=True)
    ]


def evaluate(
    sampler: SamplingClient,
    questions: Sequence[Question],
    renderer: Renderer,
    reward: Reward,
    config: RlConfig,
) -> float:
    """Mean reward of the greedy answers to questions that are not trained on."""
    params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0, stop=renderer.stop)
    futures = [
        sampler.sample(ModelInput.from_ints(question.tokens), 1, params) for question in questions
    ]
    return statistics.fmean(
        judge(reward, renderer.text(future.result().sequences[0].tokens), question)
        for future, question in zip(futures, questions, strict=True)
    )


def judge(reward: Reward, text: str, question: Question) -> float:
    """Call the user's function, and name the row when it goes wrong."""
    try:
        given = reward(text, question.row)
        value = float(asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given)
        if not math.isfinite(value):
            raise ValueError(f"a reward must be a finite number, got {value}")
        return value
    except Exception as exc:
        raise InvalidInputError(
            f"the reward function failed on prompt {question.line} with the answer {text[:80]!r}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


async def _awaited(reward: Awaitable[float]) -> float:
    return await reward


def group_data(group: Sequence[Answer]) -> list[Datum]:
    """Training examples of one group; none when every answer got the same reward."""
    rewards = _rewards(group)
    if len(set(rewards)) == 1:
        return []
    mean = statistics.fmean(rewards)
    return [_datum(answer, answer.reward - mean) for answer in group if answer.tokens]


def to_look_at(
    groups: Sequence[Sequence[Answer]], renderer: Renderer, step: int
) -> Iterator[Rollout]:
    """The answers of a step as the console shows them."""
    for number, group in enumerate(groups):
        mean = statistics.fmean(_rewards(group))
        for answer in group:
            yield Rollout(
                step=step,
                group=number,
                prompt=str(renderer.tokenizer.decode(answer.question.tokens)),
                text=renderer.text(answer.tokens),
                tokens=answer.tokens,
                pieces=pieces_of(renderer.tokenizer, answer.tokens),
                logprobs=answer.logprobs,
                reward=answer.reward,
                advantage=answer.reward - mean,
                snapshot=f"step-{step:06d}",
            )


def _datum(answer: Answer, advantage: float) -> Datum:
    prompt = answer.question.tokens
    tokens = prompt + answer.tokens
    before = [0.0] * (len(prompt) - 1)  # The prompt is given, not chosen: it earns nothing.
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + answer.logprobs,
            "advantages": before + [advantage] * len(answer.tokens),
        },
    )


def _rewards(group: Sequence[Answer]) -> list[float]:
    return [answer.reward for answer in group]
