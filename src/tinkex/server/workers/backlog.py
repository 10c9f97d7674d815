"""How much the members of a pool have to do: tokens that were posted and have not ended."""

from __future__ import annotations

import asyncio
from collections import Counter

from tinkex.engine.jobs import Result
from tinkex.server.work.queue import take_from
from tinkex.server.workers.worker import Worker


class Backlog:
    def __init__(self) -> None:
        self._num_tokens: Counter[int] = Counter()

    def of(self, member: Worker) -> int:
        return self._num_tokens[id(member)]

    def add(self, member: Worker, num_tokens: int, answer: asyncio.Future[Result]) -> None:
        """Count the tokens of a job until it has its answer."""
        key = id(member)
        self._num_tokens[key] += num_tokens
        answer.add_done_callback(lambda _: take_from(self._num_tokens, key, num_tokens))
