"""Which members of a pool a sample goes to.

Every member can sample every checkpoint. A prompt goes where the longest part of its beginning is
cached, unless that member has much more to do (`backlog`) than another one. The samples of one
prompt are dealt out to several members when that makes them more even: each sample draws by its own
number, so the tokens are the same.

Caches are guessed from what was sent: keys of blocks of tokens, each made of all tokens before it,
the weights and the tenant, because that is what an engine shares a prompt by.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinkex.engine.jobs import Event, Result, SampleJob, SampleResult, Tokens
from tinkex.server.fairness.backlog import Backlog
from tinkex.server.workers.worker import OnEvent, Worker

BLOCK = 64
"""Tokens of a prompt that are looked up together."""
MAX_BLOCKS = 1 << 17
"""Blocks that are remembered, the longest unused forgotten first."""
PATIENCE = 4
"""A cached token is worth waiting for this many tokens: prefill is cheaper than decoding."""
HAND = 4
"""Samples of one prompt that stay together: to decode four costs little more than to decode one."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Samples `first` to `first + count` of a job, for one member."""

    member: Worker
    first: int
    count: int


class Router:
    def __init__(self) -> None:
        self.backlog = Backlog()
        self._blocks: OrderedDict[int, frozenset[int]] = OrderedDict()

    def post(
        self, job: SampleJob, ready: Sequence[Worker], on_event: OnEvent | None
    ) -> asyncio.Future[Result]:
        """Send a sample to the best of the members, in parts to several of them."""
        if job.alone:  # one on trial takes one member with it, not several
            ready = [min(ready, key=self.backlog.of)]
        if len(ready) == 1:
            return self._send(job, ready[0], on_event)
        keys = list(_keys(job))
        deals = self.deal(job, keys, ready)
        self._remember(keys, [deal.member for deal in deals])
        if len(deals) == 1:
            return self._send(job, deals[0].member, on_event)
        parts = [
            self._send(_part(job, number, deal), deal.member, _moved(job, deal, on_event))
            for number, deal in enumerate(deals)
        ]
        return _whole(parts)

    def deal(self, job: SampleJob, keys: Sequence[int], ready: Sequence[Worker]) -> list[Deal]:
        """Give out samples, a few at a time, to whoever has the least to do by then."""
        to_do = [self.backlog.of(m) - PATIENCE * n for m, n in self._cached(keys, ready)]
        counts, length = [0] * len(ready), len(job.prompt)
        for start in range(0, job.num_samples, HAND):
            hand = min(HAND, job.num_samples - start)
            # Who has none of them yet reads the prompt first: time for these, and work for all.
            waits = [w + (0 if c else 2 * length) for w, c in zip(to_do, counts, strict=True)]
            best = min(range(len(ready)), key=waits.__getitem__)
            to_do[best] += (0 if counts[best] else length) + hand * _sample_cost(job)
            counts[best] += hand
        firsts = np.cumsum([0, *counts]).tolist()
        return [Deal(m, f, c) for m, f, c in zip(ready, firsts, counts, strict=False) if c]

    def _send(
        self, job: SampleJob, member: Worker, on_event: OnEvent | None
    ) -> asyncio.Future[Result]:
        answer = member.post(job, on_event)
        cost = len(job.prompt) + job.num_samples * _sample_cost(job)
        self.backlog.add(member, cost, answer)
        return answer

    def _cached(self, keys: Sequence[int], ready: Sequence[Worker]) -> Iterator[tuple[Worker, int]]:
        """Each member, and how many tokens of the prompt it was sent before."""
        for member in ready:
            num_blocks = 0
            for key in keys:
                if id(member) not in self._blocks.get(key, ()):
                    break
                num_blocks += 1
            yield member, num_blocks * BLOCK

    def _remember(self, keys: Sequence[int], members: Sequence[Worker]) -> None:
        sent = frozenset(map(id, members))
        for key in keys:
            self._blocks[key] = self._blocks.get(key, frozenset()) | sent
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)


def _sample_cost(job: SampleJob) -> int:
    """About how many tokens one sample is; one that gives no end counts as a short one."""
    return 256 if job.max_tokens is None else job.max_tokens


def _keys(job: SampleJob) -> Iterator[int]:
    key = hash((job.tenant, job.base_model, job.adapter_folder))
    tokens = np.ascontiguousarray(job.prompt)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end].tobytes()))
        yield key


# ------------------------------------------------------------------------------------ parts


def _part(job: SampleJob, number: int, deal: Deal) -> SampleJob:
    """Some of a job's samples; what is asked about the prompt, the first part answers."""
    part = replace(
        job,
        job_id=f"{job.job_id}/{number}",
        num_samples=deal.count,
        first_sample=job.first_sample + deal.first,
    )
    if number == 0:
        return part
    return replace(
        part,
        prompt_logprobs=False,
        prompt_logprobs_last_n=None,
        topk_prompt_logprobs=0,
        prompt_alt_tokens_k=0,
        target_prompt_logprobs=None,
    )


def _moved(job: SampleJob, deal: Deal, on_event: OnEvent | None) -> OnEvent | None:
    """Tell events of a part as those of the job."""
    if on_event is None:
        return None

    def tell(event: Event) -> None:
        event = replace(event, job_id=job.job_id)
        if isinstance(event, Tokens):
            event = replace(event, sample_index=event.sample_index + deal.first)
        on_event(event)

    return tell


def _whole(parts: list[asyncio.Future[Result]]) -> asyncio.Future[Result]:
    """A future of several parts: the first failure ends the others, as cancelling it does."""
    whole: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def cancel_rest() -> None:
        for part in parts:
            part.cancel()

    def note(part: asyncio.Future[Result]) -> None:
        if part.cancelled():
            whole.cancel()
        elif (error := part.exception()) is not None:
            if not whole.done():
                whole.set_exception(error)
        elif not whole.done() and all(other.done() for other in parts):
            whole.set_result(_joined([other.result() for other in parts]))
            return
        if whole.done():
            cancel_rest()

    for part in parts:
        part.add_done_callback(note)
    whole.add_done_callback(lambda _: cancel_rest())
    return whole


def _joined(results: Sequence[Result]) -> SampleResult:
    parts = [result for result in results if isinstance(result, SampleResult)]
    return replace(
        parts[0],
        sequences=tuple(sequence for part in parts for sequence in part.sequences),
        num_sampled_tokens=sum(part.num_sampled_tokens for part in parts),
        device_seconds=sum(part.device_seconds for part in parts),
        turns=tuple(turn for part in parts for turn in part.turns),
    )
