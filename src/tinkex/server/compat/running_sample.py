"""Run one request of a foreign API as a sample: whole, or token by token.

Who waits for whom: a whole answer waits for its promise; a stream reads a queue that the worker's
events fill. Either way, a caller who goes away cancels the sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request

from tinkex.engine.jobs import Event, ModelInfo, Tokens
from tinkex.errors import InvalidInputError
from tinkex.server.compat.model_names import SampleTarget
from tinkex.server.jobs.validation import check_length
from tinkex.server.process.off_loop import off_loop
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.server.work.futures import Outcome
from tinkex.store import User
from tinkex.types import SampleRequest, SampleResponse
from tinkex.wire import json_codec, results
from tinkex.wire.generation import PROTOBUF

GONE_CHECK_S = 1.0
MAX_TOLD = 1_000_000
"""Most tokens and logprobs that one answer tells by number: each is an object of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """A sample to run, in the sampler's own terms."""

    target: SampleTarget
    info: ModelInfo
    prompt: Sequence[int]
    params: Mapping[str, Any]
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0

    def sample_request(self) -> SampleRequest:
        """The request to `/asample` that says the same.

        Raises:
            InvalidInputError: It is longer than the model can read, or cannot be had.
        """
        check_length(self.prompt, "prompt", self.info)  # before millions of tokens are looked at
        target = self.target
        where = (
            {"base_model": target.base_model}
            if target.model_path is None
            else {"model_path": target.model_path, "base_model": target.base_model}
        )
        body = {
            **where,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(self.prompt)}]},
            "sampling_params": dict(self.params),
            "num_samples": self.num_samples,
            "prompt_logprobs": self.prompt_logprobs,
            "topk_prompt_logprobs": self.topk_prompt,
            "topk_sample_logprobs": self.topk_sample,
        }
        return json_codec.read(SampleRequest, body)


@dataclass(frozen=True, slots=True)
class NewTokens:
    index: int
    tokens: list[int]
    logprobs: list[float]

    def first(self, number: int) -> NewTokens:
        if number == len(self.tokens):
            return self
        return NewTokens(self.index, self.tokens[:number], self.logprobs[:number])


@dataclass(slots=True)
class RunningSample:
    """A sample under way. Iterate for its tokens; `result` is there when the iteration ends."""

    service: Service
    user: User
    spec: SampleSpec
    request: Request
    result: SampleResponse | None = field(default=None, init=False)

    async def whole(self) -> SampleResponse:
        """The finished sample; nothing is passed on while it runs."""
        promise, task, _ = await self.service.samples.stream(
            self.user, self.spec.sample_request(), None
        )
        try:
            while (outcome := await promise.wait(GONE_CHECK_S, self.service.stopping)) is None:
                await self._check_both_sides()
            return await off_loop(len(outcome.payload), _read, outcome)
        finally:
            task.cancel()

    async def _check_both_sides(self) -> None:
        """Nobody else looks, as long as no line of an answer was sent."""
        self._check_server()
        if await self.request.is_disconnected():
            raise ApiError(499, "The client went away.")

    def _check_server(self) -> None:
        if self.service.stopping.is_set():
            raise ApiError(503, "The server is stopping; try again in a moment.")

    async def tokens(self) -> AsyncIterator[NewTokens]:
        """Tokens while they are made, several at a time when they come faster than they are read.

        Raises:
            ApiError: The sample failed; also before the first token, so that a refusal can still
                be an answer of its own.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def take(event: Event) -> None:
            if isinstance(event, Tokens):  # their protocols have no word for progress
                events.put_nowait(event)

        promise, task, _ = await self.service.samples.stream(
            self.user, self.spec.sample_request(), take
        )
        promise.on_settle = lambda _: events.put_nowait(None)
        try:
            waiting: list[Event | None] = [await self._first(events)]
            while True:
                while not events.empty():
                    waiting.append(events.get_nowait())
                for new in _merged(waiting):
                    yield new
                if waiting[-1] is None:
                    break
                waiting = [await events.get()]
            assert promise.outcome is not None
            outcome = promise.outcome
            self.result = await off_loop(len(outcome.payload), _read, outcome)
        finally:
            task.cancel()

    async def _first(self, events: asyncio.Queue[Event | None]) -> Event | None:
        """Wait for something to say. A stream that has begun is watched by its response."""
        watch = asyncio.ensure_future(
            self.request.receive()
        )  # the body was read: only an end comes
        watch.add_done_callback(lambda done: None if done.cancelled() else events.put_nowait(None))
        try:
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), GONE_CHECK_S)
                except TimeoutError:
                    self._check_server()
                    continue
                if watch.done() and watch.result()["type"] == "http.disconnect":
                    raise ApiError(499, "The client went away.")
                return event
        finally:
            watch.cancel()


def _merged(events: Sequence[Event | None]) -> list[NewTokens]:
    """The tokens of each answer, in one piece: whoever lags behind catches up."""
    merged: dict[int, NewTokens] = {}
    for event in events:
        if isinstance(event, Tokens):
            new = merged.setdefault(event.sample_index, NewTokens(event.sample_index, [], []))
            new.tokens.extend(event.tokens.tolist())
            new.logprobs.extend(event.logprobs.tolist())
    return list(merged.values())


def _read(outcome: Outcome) -> SampleResponse:
    if outcome.ok:
        return results.decode(SampleResponse, outcome.payload, PROTOBUF)
    if outcome.category == "user":
        raise InvalidInputError(outcome.error)
    if outcome.category == "cancelled":
        raise ApiError(499, outcome.error)
    raise ApiError(500, outcome.error)


def check_told(num_tokens: int, topk: int) -> None:
    """Refuse to tell more tokens by number than an answer can hold.

    Raises:
        InvalidInputError: With what to ask for less of.
    """
    if num_tokens * (1 + topk) > MAX_TOLD:
        raise InvalidInputError(
            f"{num_tokens} tokens x {1 + topk} logprobs are more than the {MAX_TOLD} that one "
            "answer tells; ask for fewer answers, tokens (max_tokens) or logprobs at a time",
            path="logprobs",
        )


def prompt_scores(response: SampleResponse, prompt: Sequence[int]) -> list[float | None]:
    """The logprob of every prompt token; None for the first, which follows nothing."""
    given = response.prompt_logprobs
    if given is None:
        return [None] * len(prompt)
    return [None if value is None or np.isnan(value) else float(value) for value in given]
