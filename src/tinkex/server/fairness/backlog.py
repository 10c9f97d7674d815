"""How much the members of a pool have to do: tokens that were posted and have not ended."""

from __future__ import annotations

import asyncio
from collections import Counter

from tinkex.engine.jobs import Result
from tinkex.server.fairness.line import take_from


class Backlog:
    def __init__(self) -> None:
        self._num_tokens: Counter[int] = Counter()

    def of(self, member: object) -> int:
        return self._num_tokens[id(member)]

    def add(self, member: object, num_tokens: int, answer: asyncio.Future[Result]) -> None:
        """Count the tokens of a job until it has its answer."""
        key = id(member)
        self._num_tokens[key] += num_tokens
        answer.add_done_callback(lambda _: take_from(self._num_tokens, key, num_tokens))
