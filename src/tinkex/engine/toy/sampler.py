"""The toy's sample jobs: who waits for whom, and how one is generated.

A step samples one whole job. Of those that wait, the oldest of the tenant who had the fewest tokens
goes first. Not thread-safe: it is called by the loop's thread.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinkex.engine import jobs
from tinkex.engine.reports import attempt, cancelled, tell
from tinkex.engine.sample.checks import check_sample_job
from tinkex.engine.sample.rng import fresh_seed, sample_key, uniform
from tinkex.engine.toy.cache import PrefixCache
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.model import ToyAdapter
from tinkex.engine.toy.sampling import draw, ends_with_stop, log_softmax, prompt_scores, stack, top
from tinkex.errors import InvalidInputError


class _Waiting(NamedTuple):
    order: int
    job: jobs.SampleJob
    weights: ToyAdapter
    emit: jobs.Emit


class ToySampler:
    """See `loop.compute.RunningSamples`."""

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self._prefixes = PrefixCache()
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant; none is empty
        self._order = itertools.count()
        # Start-time fair queueing: tokens of each tenant, and where a tenant that is new begins.
        self._spent: dict[str, float] = {}
        self._floor = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    # ------------------------------------------------------------------------------- in and out

    def add(self, job: jobs.SampleJob, weights: ToyAdapter, emit: jobs.Emit) -> None:
        """Queue a job.

        Raises:
            InvalidInputError: The job does not fit the model. Nothing is queued.
        """
        check_sample_job(job, self.config.vocab_size)
        room = self._room(job)
        max_tokens = room if job.max_tokens is None else job.max_tokens
        if max_tokens > room or room < 0:
            raise InvalidInputError(
                f"prompt of {len(job.prompt)} + max_tokens {max_tokens} exceed the context of "
                f"{self.config.max_context_length}",
                path="max_tokens",
            )
        queue = self._waiting.setdefault(job.tenant, deque())
        queue.append(_Waiting(next(self._order), job, weights, emit))

    def _room(self, job: jobs.SampleJob) -> int:
        """The most tokens that fit behind the prompt."""
        return self.config.max_context_length - len(job.prompt)

    @property
    def next_alone(self) -> str:
        """The next job, if it is on trial; others act as if they shared their passes."""
        job = self._waiting[self._next_tenant()][0].job
        return job.job_id if job.alone else ""

    def step(self, *, look_ahead: bool) -> None:
        _, job, weights, emit = self._take(self._next_tenant())
        while job.prompt[0] == self.config.hang_token:
            time.sleep(1)
        attempt(job, emit, partial(self._sample, job, weights, emit))

    def _next_tenant(self) -> str:
        return min(self._waiting, key=lambda tenant: (self._had(tenant), self._waiting[tenant][0]))

    def _take(self, tenant: str) -> _Waiting:
        waiting = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        job = waiting.job
        self._floor = self._had(tenant)
        cost = len(job.prompt) + job.num_samples * (job.max_tokens or 256)
        self._spent[tenant] = self._floor + cost
        return waiting

    def _had(self, tenant: str) -> float:
        return max(self._spent.get(tenant, 0.0), self._floor)

    def cancel(self, job_id: str) -> bool:
        for tenant, queue in self._waiting.items():
            for waiting in queue:
                if waiting.job.job_id == job_id:
                    queue.remove(waiting)
                    if not queue:
                        del self._waiting[tenant]
                    tell(waiting.emit, cancelled(job_id))
                    return True
        return False

    def cancel_all(self) -> None:
        for waiting in self._clear():
            tell(waiting.emit, cancelled(waiting.job.job_id))

    def fail_all(self, message: str) -> None:
        for waiting in self._clear():
            job_id = waiting.job.job_id
            tell(waiting.emit, jobs.Failed(job_id=job_id, message=message, category="server"))

    def _clear(self) -> list[_Waiting]:
        queues, self._waiting = self._waiting, {}
        return [waiting for queue in queues.values() for waiting in queue]

    # ------------------------------------------------------------------------------- generation

    def _sample(
        self, job: jobs.SampleJob, weights: ToyAdapter, emit: jobs.Emit
    ) -> jobs.SampleResult:
        began_at, started = time.time(), time.perf_counter()
        max_tokens = self._room(job) if job.max_tokens is None else job.max_tokens
        seed = job.seed if job.seed is not None else self._free_seed(job)
        sequences = tuple(
            _generate(job, weights, sample_key(seed, job.first_sample + i), max_tokens)
            for i in range(job.num_samples)
        )
        num_steps = max(len(s.tokens) for s in sequences)
        result = jobs.SampleResult(
            sequences=sequences,
            num_prompt_tokens=len(job.prompt),
            num_sampled_tokens=sum(len(s.tokens) for s in sequences),
            turns=(jobs.DeviceTurn("decode", began_at, time.time(), num_steps),),
            prompt_cache_hit_tokens=self._prefixes.hits(
                f"{job.tenant}\0{job.adapter_folder or ''}", job.prompt
            ),
            device_seconds=time.perf_counter() - started,
            **prompt_scores(job, weights, seed),
        )
        for event in _token_events(job.job_id, result) if job.stream else ():
            tell(emit, event)
        return result

    def _free_seed(self, job: jobs.SampleJob) -> int:
        """The seed of a job that names none."""
        if not self.config.deterministic:
            return fresh_seed()
        return int.from_bytes(np.asarray(job.prompt).tobytes()[-8:], "little")


def _generate(
    job: jobs.SampleJob, weights: ToyAdapter, key: int, max_tokens: int
) -> jobs.SampledTokens:
    ends, stops = job.stop_tokens, job.stop_strings
    if ends is None:
        ends = () if stops else (2,)
    tokens: list[int] = []
    logprobs: list[float] = []
    topk: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
    reason: Literal["length", "stop"] = "length"
    context = int(job.prompt[-1])
    while len(tokens) < max_tokens and reason == "length":
        row = weights.row(context)
        context, logprob, logprobs_V = draw(row, job, uniform(key, len(tokens)))
        tokens.append(context)
        logprobs.append(logprob)
        if job.topk_sample_logprobs:
            dense_V = log_softmax(row.dense()) if logprobs_V is None else logprobs_V
            topk.append(top(dense_V, job.topk_sample_logprobs))
        if context in ends or (stops and ends_with_stop(tokens, stops)):
            reason = "stop"
    return jobs.SampledTokens(
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        stop_reason=reason,
        topk=stack(topk, job.topk_sample_logprobs) if job.topk_sample_logprobs else None,
    )


def _token_events(job_id: str, result: jobs.SampleResult) -> Iterator[jobs.Tokens]:
    """An event for every sampled token, positions ascending over all samples."""
    for t in range(max(len(sequence.tokens) for sequence in result.sequences)):
        for i, sequence in enumerate(result.sequences):
            if t < len(sequence.tokens):
                tokens, logprobs = sequence.tokens[t : t + 1], sequence.logprobs[t : t + 1]
                yield jobs.Tokens(job_id=job_id, sample_index=i, tokens=tokens, logprobs=logprobs)
