"""Which member of a pool a sample goes to.

Every member can sample every checkpoint. A prompt goes where the longest part of its beginning is
cached, unless that member's line is much longer than the shortest one; without such a member, to
the shortest line. A line is what was posted there and has not ended, in tokens. Caches are guessed
from what was sent: keys of blocks of tokens, each made of all tokens before it, the weights and the
tenant, because that is what an engine shares a prompt by.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from tinkex.engine.jobs import Result, SampleJob
from tinkex.server.workers.worker import OnEvent, Worker

BLOCK = 64
"""Tokens of a prompt that are looked up together."""
MAX_BLOCKS = 1 << 17
"""Blocks that are remembered, the longest unused forgotten first."""
PATIENCE = 4.0
"""A cached token is worth waiting for this many tokens: prefill is cheaper than decoding."""


class Router:
    def __init__(self) -> None:
        self._lines: Counter[int] = Counter()
        self._blocks: OrderedDict[int, frozenset[int]] = OrderedDict()

    def line(self, member: Worker) -> int:
        """Tokens that were posted to a member and have not ended."""
        return self._lines[id(member)]

    def post(
        self, job: SampleJob, ready: Sequence[Worker], on_event: OnEvent | None
    ) -> asyncio.Future[Result]:
        """Send a sample to the best of the members."""
        keys = list(_keys(job)) if len(ready) > 1 else []
        member = self._choose(keys, ready)
        self._remember(keys, member)
        return self._send(job, member, on_event)

    def _send(
        self, job: SampleJob, member: Worker, on_event: OnEvent | None
    ) -> asyncio.Future[Result]:
        cost, key = cost_of(job), id(member)
        self._lines[key] += cost
        future = member.post(job, on_event)

        def ended(_: asyncio.Future[Result]) -> None:
            self._lines[key] -= cost
            if self._lines[key] <= 0:
                del self._lines[key]

        future.add_done_callback(ended)
        return future

    def _choose(self, keys: Sequence[int], ready: Sequence[Worker]) -> Worker:
        shortest = min(ready, key=self.line)
        by_id = {id(member): member for member in ready}
        holders, num_cached = frozenset(by_id), 0
        for key in keys:
            deeper = holders & self._blocks.get(key, frozenset())
            if not deeper:
                break
            holders, num_cached = deeper, num_cached + BLOCK
        if not num_cached:
            return shortest
        cached = min((by_id[holder] for holder in holders), key=self.line)
        worth_it = self.line(cached) - self.line(shortest) <= PATIENCE * num_cached
        return cached if worth_it else shortest

    def _remember(self, keys: Sequence[int], member: Worker) -> None:
        for key in keys:
            self._blocks[key] = self._blocks.get(key, frozenset()) | {id(member)}
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)


def cost_of(job: SampleJob) -> int:
    """About how many tokens a sample is; one that gives no end counts as a short one."""
    return len(job.prompt) + job.num_samples * (job.max_tokens or 256)


def _keys(job: SampleJob) -> Iterator[int]:
    key = hash((job.tenant, job.base_model, job.adapter_folder))
    tokens = np.ascontiguousarray(job.prompt)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end].tobytes()))
        yield key
