"""Conversations that are sampled to learn from: one answer, or several turns with an environment.

A task is a reward function, several with weights (`rewards.py`), or an environment.

An environment is a class. It is made with the row, `start` gives the first message or messages, and
`step` gets the model's answer and returns a `Turn`. A turn with a reply goes on, one without ends
the episode. Rewards add up. A tool is an environment that answers calls.

    class Game:
        def __init__(self, row): ...
        def start(self) -> str: ...
        def step(self, answer: str) -> Turn: ...  # or async def

An episode is one sequence of tokens: what the environment said is read, what the model said is
learned. Knows sampling clients and texts; gradients and loops are `rl.py`'s business.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinkex import APIFuture, ModelInput, SampleResponse, SamplingClient, SamplingParams
from tinkex.contract.routing import NOT_RECORDED
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes.data import Message
from tinkex.recipes.render import Renderer
from tinkex.recipes.rewards import JudgedAnswer, Rewards, Row, as_rewards, each, finite, told

__all__ = ["Environment", "Episode", "Player", "Question", "Task", "Turn", "as_task"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """An environment's reaction to an answer. Without a `reply` the episode is over."""

    reward: float = 0.0
    reply: str | Sequence[Message] | None = None
    """Text of the user, or messages, such as one with the role `tool`."""
    parts: Mapping[str, float] = field(default_factory=dict, repr=False)
    """What the reward is made of, by name: the mean of each is reported."""


class Environment(Protocol):
    """The other side of a conversation: it starts it and answers back."""

    def start(self) -> str | Sequence[Message]:
        """The first message or messages that the model reads. Depends on the row alone."""
        ...

    def step(self, answer: str) -> Turn | Awaitable[Turn]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A row to play, and its tokens up to where the model begins to speak."""

    tokens: list[int]
    row: Row
    line: int
    messages: tuple[Message, ...] = ()


@dataclass(kw_only=True, slots=True)
class Episode:
    """A conversation as it was sampled: tokens, log-probabilities, reward."""

    question: Question
    tokens: list[int]
    """Everything, the prompt included."""
    logprobs: list[float]
    """One per token; 0 where the model did not speak."""
    is_sampled: list[bool]
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, where it has several parts."""
    answers: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    environment: Any = None
    is_over: bool = False
    gaps: list[float] = field(default_factory=list)
    """log p(policy) - log p(reference) of each token, 0 where the model did not speak; empty: no
    reference was asked."""
    experts: NDArray[np.int64] | None = None
    """`routed_experts`, a row per token that a sampler has seen; None: they were not asked for."""

    @property
    def num_sampled(self) -> int:
        return sum(self.is_sampled)

    def of_sampled(self, values: Sequence[T]) -> list[T]:
        """Keep the values of the sampled tokens, of one value per token."""
        return [value for value, said in zip(values, self.is_sampled, strict=True) if said]

    @property
    def said(self) -> list[int]:
        """All tokens after the prompt, replies of the environment included."""
        return self.tokens[len(self.question.tokens) :]

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens that the model has sampled."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.is_sampled += [True] * len(tokens)

    def route(self, rows: NDArray[np.int64]) -> None:
        """Note where all tokens so far went; what an earlier turn has recorded stays."""
        # The experts under which a token was sampled count, not those of a later prefill.
        if (known := self.experts) is not None:
            recorded = (known != NOT_RECORDED).any(axis=(1, 2))
            rows[: len(known)][recorded] = known[recorded]
        self.experts = rows

    def read(self, tokens: Sequence[int]) -> None:
        """Add tokens of the environment: the model reads them and learns nothing of them."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.is_sampled += [False] * len(tokens)


# ------------------------------------------------------------------------------ tasks


class Task(Protocol):
    """Begins episodes and judges answers, all of a turn at once."""

    max_turns: int
    name: str
    """What judges the answers, in a few words."""

    def check(self, columns: Collection[str]) -> None:
        """Refuse rows of these columns, where what judges them wants others."""
        ...

    def begin(self, question: Question) -> Any:
        """The environment of one episode; None where there is none."""
        ...

    def judge(self, episodes: Sequence[Episode], answers: Sequence[str]) -> list[Turn]: ...


class RewardTask:
    """Episodes of one answer, judged by one reward function or the weighted sum of several."""

    max_turns = 1

    def __init__(self, rewards: Rewards) -> None:
        self._functions = as_rewards(rewards)
        self.name = told(self._functions)

    def check(self, columns: Collection[str]) -> None:
        for function in self._functions:
            function.check(columns)

    def begin(self, question: Question) -> None:
        return None

    def judge(self, episodes: Sequence[Episode], answers: Sequence[str]) -> list[Turn]:
        judged = _answers(episodes, answers)
        by_function = [function.rewards(judged) for function in self._functions]
        return [
            self._turn(answer, values)
            for answer, values in zip(judged, zip(*by_function, strict=True), strict=True)
        ]

    def _turn(self, answer: JudgedAnswer, values: Sequence[float | None]) -> Turn:
        # None says that a function does not apply to this answer; one of them must.
        applied = [
            (function, value)
            for function, value in zip(self._functions, values, strict=True)
            if value is not None
        ]
        if not applied:
            finite(None, answer)
        parts = {function.name: value for function, value in applied}
        reward = sum(function.weight * value for function, value in applied)
        return Turn(reward=reward, parts=parts if len(self._functions) > 1 else {})


class EnvironmentTask:
    """Several turns per episode, with an environment made for each."""

    def __init__(self, make: Callable[[Row], Environment], max_turns: int = 16) -> None:
        self._make = make
        self.max_turns = max_turns
        self.name = str(getattr(make, "__name__", type(make).__name__))

    def check(self, columns: Collection[str]) -> None:
        return None  # It is given whole rows.

    def begin(self, question: Question) -> Environment:
        try:
            return self._make(question.row)
        except Exception as exc:
            raise InvalidInputError(
                f"the environment of prompt {question.line} could not be made: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    def judge(self, episodes: Sequence[Episode], answers: Sequence[str]) -> list[Turn]:
        judged = _answers(episodes, answers)
        steps = [
            partial(episode.environment.step, answer)
            for episode, answer in zip(episodes, answers, strict=True)
        ]
        turns = each(judged, steps, "the environment failed")
        for turn, answer in zip(turns, judged, strict=True):
            if not isinstance(turn, Turn):
                raise InvalidInputError(
                    f"step() must return a Turn, got {type(turn).__name__} (prompt "
                    f"{answer.line}). Import it from tinkex.recipes.episodes."
                )
            finite(turn.reward, answer)
        return turns


def as_task(judge: Rewards, *, max_turns: int = 16) -> Task:
    """A task of a reward function, of several with weights, or of an environment's class."""
    if inspect.isclass(judge):
        missing = [name for name in ("start", "step") if not callable(getattr(judge, name, None))]
        if missing:
            raise ConfigError(f"{judge.__name__} is no environment: it has no {missing[0]}().")
        make: Any = judge
        return EnvironmentTask(make, max_turns)
    return RewardTask(judge)


def _answers(episodes: Sequence[Episode], texts: Sequence[str]) -> list[JudgedAnswer]:
    return [
        JudgedAnswer(
            text=text,
            row=episode.question.row,
            line=episode.question.line,
            tokens=episode.said,
            messages=episode.question.messages,
        )
        for episode, text in zip(episodes, texts, strict=True)
    ]


def first_messages(environment: Environment) -> tuple[Message, ...]:
    return _messages(environment.start())


def _messages(said: str | Sequence[Message]) -> tuple[Message, ...]:
    return ({"role": "user", "content": said},) if isinstance(said, str) else tuple(said)


# ------------------------------------------------------------------------------ playing


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """Samples episodes of one task."""

    task: Task
    renderer: Renderer
    max_tokens: int
    """Of one answer."""
    temperature: float = 1.0
    router_replay: bool = False
    """Ask of a mixture which experts its tokens passed, so that training takes the same."""

    def play(
        self, sampler: SamplingClient, questions: Sequence[Question], *, copies: int, seed: int
    ) -> list[list[Episode]]:
        """`copies` episodes of each question, all sampled at once, turn by turn."""
        groups = [[self._begin(question) for _ in range(copies)] for question in questions]
        everyone = [episode for group in groups for episode in group]
        futures = [
            self._sample(sampler, group[0], copies, seed + i) for i, group in enumerate(groups)
        ]
        self._take(everyone, [future.result() for future in futures])
        for turn in range(1, self.task.max_turns):
            live = [episode for episode in everyone if not episode.is_over]
            if not live:
                break
            again = [
                self._sample(sampler, episode, 1, seed + turn * 100_003 + i)
                for i, episode in enumerate(live)
            ]
            self._take(live, [future.result() for future in again])
        return groups

    def _sample(
        self, sampler: SamplingClient, episode: Episode, copies: int, seed: int
    ) -> APIFuture[SampleResponse]:
        prompt, params = ModelInput.from_ints(episode.tokens), self._params(seed)
        if not self.router_replay:
            return sampler.sample(prompt, copies, params)
        return sampler.sample(prompt, copies, params, routed_experts=True)

    def _begin(self, question: Question) -> Episode:
        environment = self.task.begin(question)
        if environment is not None and first_messages(environment) != question.messages:
            raise InvalidInputError(
                f"start() said two different things for prompt {question.line}; it must depend on "
                "the row alone, since the answers of a group are compared"
            )
        return Episode(
            question=question,
            tokens=list(question.tokens),
            logprobs=[0.0] * len(question.tokens),
            is_sampled=[False] * len(question.tokens),
            messages=list(question.messages),
            environment=environment,
        )

    def _params(self, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.renderer.stop,
            seed=seed,
        )

    def _take(self, episodes: Sequence[Episode], responses: Sequence[SampleResponse]) -> None:
        """Add one answer to each episode, and what its environment says to it."""
        answers = []
        pairs = [(response, sequence) for response in responses for sequence in response.sequences]
        for episode, (response, sequence) in zip(episodes, pairs, strict=True):
            prompt_experts, experts = response.prompt_routed_experts, sequence.routed_experts
            if self.router_replay and prompt_experts is not None and experts is not None:
                episode.route(np.concatenate([prompt_experts.array, experts.array]))
            episode.hear(list(sequence.tokens), list(sequence.logprobs or []))
            answers.append(self.renderer.text(sequence.tokens))
            episode.answers.append(answers[-1])
        turns = self.task.judge(episodes, answers)
        for episode, (_, sequence), answer, turn in zip(
            episodes, pairs, answers, turns, strict=True
        ):
            episode.reward += turn.reward
            for name, value in turn.parts.items():
                episode.parts[name] = episode.parts.get(name, 0.0) + value
            if turn.reply is None:
                episode.is_over = True
                continue
            replies = _messages(turn.reply)
            episode.read(self.renderer.between(episode.messages, answer, replies, sequence.tokens))
            episode.messages += [{"role": "assistant", "content": answer}, *replies]
