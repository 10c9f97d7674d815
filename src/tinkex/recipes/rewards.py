"""Reward functions: called by the names of their parameters, one of them or several with weights.

A function that takes `completions` judges all answers of a step in one call, one that takes
`completion` judges one answer. Either may be `async`, and gets what its parameters name:

    def reward(completion: str, row: dict) -> float: ...
    async def reward(completion: str, answer: str) -> float: ...  # `answer`, a column of the rows
    def reward(completions: list[str], rows: list[dict]) -> list[float]: ...
    def reward(prompts, completions, **kwargs) -> list[float]: ...  # as TRL calls it

A name that nothing stands for is refused before anything is sampled. Knows answers as texts and
rows as mappings; sampling and gradients are the business of others.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes.data import Message

__all__ = ["JudgedAnswer", "Reward", "RewardFunction", "Rewards", "as_rewards", "told"]

Row: TypeAlias = Mapping[str, Any]
Reward: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = Reward | Sequence[Reward | tuple[Reward, float]]
T = TypeVar("T")

_ONE = ("completion", "prompt", "row", "completion_ids")
_ALL = ("completions", "prompts", "rows", "completion_ids")
_PROMPT_FIELDS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that have a parameter of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswer:
    """An answer to be rewarded, and the question it answers."""

    text: str
    row: Row
    line: int
    tokens: Sequence[int] = ()
    messages: tuple[Message, ...] = ()
    """The prompt as messages."""

    @property
    def is_conversational(self) -> bool:
        """Whether the row gives its prompt as messages; TRL's forms follow the data."""
        return "messages" in self.row or isinstance(self.row.get("prompt"), list)

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        if self.is_conversational:
            return [dict(message) for message in self.messages]
        return self.messages[-1]["content"] if self.messages else str(self.row.get("prompt", ""))

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The answer in the form of its prompt: text, or a list of one message."""
        if self.is_conversational:
            return [{"role": "assistant", "content": self.text}]
        return self.text


class RewardFunction:
    """A reward function with its weight, and the arguments that its parameters name."""

    def __init__(self, function: Reward, weight: float = 1.0) -> None:
        if not callable(function):
            raise ConfigError(f"A reward must be a function, got {function!r}.")
        if inspect.isclass(function):
            raise ConfigError(
                f"{function.__name__} is a class; several rewards with weights are functions. "
                "An environment stands alone, and adds its rewards up itself."
            )
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise ConfigError(f"The weight of a reward must be a finite number, got {weight!r}.")
        self.function, self.weight = function, float(weight)
        inner = getattr(function, "func", function)  # of a functools.partial
        self.name = str(getattr(inner, "__name__", type(inner).__name__))
        try:
            self._parameters = inspect.signature(function).parameters
        except ValueError as exc:
            raise ConfigError(
                f"{self.name} does not say which parameters it has; wrap it in a function."
            ) from exc
        named = {name for name, p in self._parameters.items() if p.kind in _NAMED}
        self.is_batched = "completions" in named
        self._is_by_name = self.is_batched or "completion" in named
        if not self._is_by_name:
            self._check_positions()

    def check(self, columns: Collection[str]) -> None:
        """Refuse parameters that are neither known names nor columns of the rows.

        Raises:
            ConfigError: It names the parameter, and what there is.
        """
        if not self._is_by_name:
            self._check_second(columns)
            return
        known = _ALL if self.is_batched else _ONE
        for name, parameter in self._parameters.items():
            if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty:
                if name not in known and name not in columns:
                    raise ConfigError(
                        f"{self.name}() has a parameter '{name}', and nothing of that name can be "
                        f"had: {', '.join(known)}, and the columns of the rows "
                        f"({', '.join(sorted(columns)) or 'none'})."
                    )

    def rewards(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        """The reward of each answer; None where the function says that it does not apply.

        Raises:
            InvalidInputError: It failed, or gave something else than finite numbers.
        """
        self.check({name for answer in answers for name in answer.row})
        values = self._all_at_once(answers) if self.is_batched else self._one_by_one(answers)
        return [
            None if value is None else finite(value, answer)
            for value, answer in zip(values, answers, strict=True)
        ]

    def _check_positions(self) -> None:
        """Functions without `completion` are called as (answer, row), whatever the names."""
        names = list(self._parameters)
        if not names or names[0] in (*_ONE, *_ALL):
            fits = False
        else:
            try:
                inspect.signature(self.function).bind("answer", {})
                fits = True
            except TypeError:
                fits = False
        if not fits:
            raise ConfigError(
                f"{self.name}({', '.join(names)}) has no parameter for the answer. Call it "
                f"`completion` to judge one answer (with it: {', '.join(_ONE[1:])}), or "
                f"`completions` to judge all of a step (with it: {', '.join(_ALL[1:])}); columns "
                "of the rows can be had by their names."
            )

    def _check_second(self, columns: Collection[str]) -> None:
        """Refuse (text, answer) where the rows have an `answer`: it would be the whole row."""
        names = list(self._parameters)
        if len(names) > 1 and names[1] != "row" and names[1] in columns:
            raise ConfigError(
                f"{self.name}({', '.join(names)}) would get the answer and the whole row, but "
                f"'{names[1]}' is a column of the rows. Call the first parameter `completion` to "
                "get columns by their names, or the second `row`."
            )

    def _arguments(self, columns: Sequence[str], known: Mapping[str, Any], read: Any) -> Any:
        """The keyword arguments: known names and columns that are asked for, all with **kwargs."""
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values())
        extra = [name for name in columns if name not in _PROMPT_FIELDS and name not in known]
        wanted = {name: known[name] for name in known if name in self._parameters or takes_all}
        return wanted | {
            name: read(name) for name in extra if name in self._parameters or takes_all
        }

    def _one_by_one(self, answers: Sequence[JudgedAnswer]) -> list[Any]:
        def call(answer: JudgedAnswer) -> Any:
            if not self._is_by_name:
                return self.function(answer.text, answer.row)
            known = {
                "completion": answer.text,
                "prompt": answer.prompt,
                "row": answer.row,
                "completion_ids": list(answer.tokens),
            }
            return self.function(**self._arguments(columns, known, answer.row.get))

        columns = _columns(answers)
        calls = [partial(call, answer) for answer in answers]
        return each(answers, calls, "the reward function failed")

    def _all_at_once(self, answers: Sequence[JudgedAnswer]) -> list[Any]:
        # With `rows` it is our own form, whose answers are texts; TRL's follow the data.
        is_ours = "rows" in self._parameters
        known: dict[str, Any] = {
            "prompts": [answer.prompt for answer in answers],
            "completions": [a.text if is_ours else a.completion for a in answers],
            "completion_ids": [list(answer.tokens) for answer in answers],
        }
        if is_ours:
            known["rows"] = [answer.row for answer in answers]
        arguments = self._arguments(
            _columns(answers), known, lambda name: [answer.row.get(name) for answer in answers]
        )
        try:
            rewards = self.function(**arguments)
            values = list(finished(rewards) if inspect.isawaitable(rewards) else rewards)
        except Exception as exc:
            raise InvalidInputError(
                f"the reward function failed on a batch of {len(answers)} answers: "
                f"{type(exc).__name__}: {exc}"
            ) from exc
        if len(values) != len(answers):
            raise InvalidInputError(
                f"the reward function returned {len(values)} rewards for {len(answers)} answers"
            )
        return values


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def as_rewards(rewards: Rewards) -> list[RewardFunction]:
    """Reward functions of one function, or of a list of them, each alone or as (function, weight).

    Names are made unique, because the mean of each is reported by its name.
    """
    given = list(rewards) if isinstance(rewards, Sequence) else [rewards]
    if not given:
        raise ConfigError("An empty list of rewards: nothing would be learned.")
    for one in given:
        if isinstance(one, tuple) and len(one) != 2:
            raise ConfigError(f"A reward with a weight is (function, weight), got {one!r}.")
    functions = [
        RewardFunction(*one) if isinstance(one, tuple) else RewardFunction(one) for one in given
    ]
    taken: set[str] = set()
    for function in functions:
        name, number = function.name, 1
        while function.name in taken:
            number += 1
            function.name = f"{name}_{number}"
        taken.add(function.name)
    return functions


def told(functions: Sequence[RewardFunction]) -> str:
    """The rewards of a run in a few words, with their weights: `right, short=0.2`."""
    return ", ".join(
        function.name if function.weight == 1 else f"{function.name}={function.weight:g}"
        for function in functions
    )


def _columns(answers: Sequence[JudgedAnswer]) -> list[str]:
    """The columns of the rows in their order; a row without one of them gives None."""
    return list(dict.fromkeys(name for answer in answers for name in answer.row))


def each(
    answers: Sequence[JudgedAnswer], calls: Sequence[Callable[[], Any]], failed: str
) -> list[Any]:
    """Make the call of each answer. Awaitable results run together; a failure names its row."""

    def error(answer: JudgedAnswer, exc: Exception) -> InvalidInputError:
        return InvalidInputError(
            f"{failed} on prompt {answer.line} with the answer {answer.text[:80]!r}: "
            f"{type(exc).__name__}: {exc}"
        )

    results: list[Any] = []
    for answer, call in zip(answers, calls, strict=True):
        try:
            results.append(call())
        except Exception as exc:
            raise error(answer, exc) from exc
    waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        ended = finished(_gathered([results[index] for index in waiting]))
        for index, value in zip(waiting, ended, strict=True):
            if isinstance(value, Exception):
                raise error(answers[index], value) from value
            results[index] = value
    return results


async def _gathered(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*waiting, return_exceptions=True)


async def _awaited(waiting: Awaitable[T]) -> T:
    return await waiting


def finished(waiting: Awaitable[T] | Coroutine[Any, Any, T]) -> T:
    """Run to the end in the loop of the rewards: the caller may be inside one (a notebook)."""
    future = asyncio.run_coroutine_threadsafe(_awaited(waiting), _loop(os.getpid()))
    try:
        return future.result()
    finally:
        future.cancel()  # A second Ctrl-C does not wait for a slow reward.


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of all rewards of a process, on a thread of its own.

    One for all steps: the connections of a client that a reward keeps belong to its loop. A fork
    has no threads, so it begins another.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tinkex-rewards", daemon=True).start()
    return loop


def finite(value: Any, answer: JudgedAnswer) -> float:
    """The reward as a number.

    Raises:
        InvalidInputError: It is none, or not finite.
    """
    try:
        number = None if value is None else float(value)
        if number is not None and math.isfinite(number):
            return number
        reason = f"a reward must be a finite number, got {number}"
    except (TypeError, ValueError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
    raise InvalidInputError(
        f"the reward function failed on prompt {answer.line} with the answer "
        f"{answer.text[:80]!r}: {reason}"
    )
