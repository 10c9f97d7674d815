"""A sample job in the making: its samples, what was drawn for each, and the result.

Data, and what is told of it while it grows. Which of them run is the scheduler's business, what is
drawn the sampler's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinkex.engine import jobs
from tinkex.engine.lora.adapter import Adapter, AdapterSpan, LoraBatch
from tinkex.engine.sample.prompt_scores import PromptScores, empty_topk
from tinkex.engine.sample.scheduler import Chunk, Seq
from tinkex.engine.sample.stopping import StopWatch


@dataclass(eq=False, slots=True)
class RunningJob:
    job: jobs.SampleJob
    adapter: Adapter | None
    emit: jobs.Emit
    max_tokens: int
    stop_ids: frozenset[int]
    scores: PromptScores | None
    samples: list[Sample] = field(default_factory=list)
    num_open: int = 0
    prompt_experts: NDArray[np.int64] | None = None
    told_to_wait: bool = False
    device_s: float = 0.0
    began_at: float = 0.0
    drew_at: float = 0.0
    """When it first ran, and when its first token was drawn; seconds of the epoch."""

    def lead(self) -> Sample:
        """The first sample, from which the others fork when its prompt is done."""
        leader, *followers = self.samples
        leader.followers = list(followers)
        return leader

    def say_it_waits(self, room: str, num_before: int) -> None:
        """Tell once why the job does not start, unless some of it ran already."""
        if self.told_to_wait or any(sample.num_sampled for sample in self.samples):
            return
        self.told_to_wait = True
        before = f", {num_before} before it" if num_before else ""
        text = f"waits for {room} in the sampler{before}"
        self.emit(jobs.Progress(job_id=self.job.job_id, text=text))

    def say_it_runs(self) -> None:
        """Take back what was told about waiting."""
        if self.told_to_wait:
            self.told_to_wait = False
            self.emit(jobs.Progress(job_id=self.job.job_id, text="sampling"))

    @property
    def divergence(self) -> str:
        """The error text for logits that are not finite."""
        adapted = "an adapter of " if self.adapter is not None else ""
        return (
            f"the logits of {adapted}{self.job.base_model} are not finite: it has diverged. Sample "
            "from an earlier checkpoint, and train on from there with a lower learning rate."
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Sample(Seq):
    request: RunningJob
    index: int
    key: int
    watch: StopWatch | None = None
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[list[int], list[float]]] = field(default_factory=list)
    reason: Literal["length", "stop"] | None = None
    experts: NDArray[np.int64] | None = None
    """Those its own tokens passed, when it has ended and they were asked for."""
    since_s: float | None = None
    """The pass clock when it first ran."""

    @property
    def job_id(self) -> str:
        return self.request.job.job_id

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    def take(self, token: int, logprob: float) -> None:
        """Append what was drawn, tell it to whoever listens, and note when it is the last one."""
        request = self.request
        if not request.drew_at:
            request.drew_at = time.time()
        if request.max_tokens > 0:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if request.job.stream:
                self._stream(token, logprob)
            if token in request.stop_ids or (self.watch and self.watch.seen(token)):
                self.reason = "stop"
        if self.reason is None and self.num_sampled >= request.max_tokens:
            self.reason = "length"

    def _stream(self, token: int, logprob: float) -> None:
        self.request.emit(
            jobs.Tokens(
                job_id=self.job_id,
                sample_index=self.index,
                tokens=np.array([token], np.int32),
                logprobs=np.array([logprob], np.float32),
            )
        )

    def start_again(self) -> None:
        """Have nothing in any cache; what was drawn stays, the prompt is scored again."""
        # Once it has drawn, its prompt is scored; only the first sample scores at all.
        scores = None if self.index or self.num_sampled else self.request.scores
        self.num_reusable = self.num_prompt if scores is None else scores.first_computed - 1
        self.blocks, self.followers, self.num_cached, self.state = [], [], 0, -1


def owner_of(seq: Seq) -> Sample:
    assert isinstance(seq, Sample)
    return seq


def sample_of(chunk: Chunk) -> Sample:
    return owner_of(chunk.seq)


def lora_of(owners: Sequence[tuple[Seq, int]]) -> LoraBatch | None:
    """Which rows belong to which adapter: each to its own job's, whatever versions are equal."""
    spans, row = [], 0
    for adapter, group in groupby(owners, key=lambda owner: owner_of(owner[0]).request.adapter):
        stop = row + sum(length for _, length in group)
        if adapter is not None:
            spans.append(AdapterSpan(row, stop, adapter))
        row = stop
    return LoraBatch(spans) if spans else None


def result_of(request: RunningJob) -> jobs.SampleResult:
    sequences = tuple(_sequence(sample) for sample in request.samples)
    leader = request.samples[0]
    return jobs.SampleResult(
        sequences=sequences,
        prompt_routed_experts=request.prompt_experts,
        prompt_cache_hit_tokens=leader.num_hit,
        num_prompt_tokens=leader.num_prompt,
        num_sampled_tokens=sum(len(sequence.tokens) for sequence in sequences),
        device_seconds=request.device_s,
        turns=_turns(request),
        **(request.scores.result() if request.scores is not None else {}),
    )


def _turns(request: RunningJob) -> tuple[jobs.DeviceTurn, ...]:
    leader = request.samples[0]
    num_computed = leader.num_prompt - leader.num_hit
    prefill = jobs.DeviceTurn("prefill", request.began_at, request.drew_at, num_computed)
    if not request.max_tokens:  # its prompt was scored, and nothing drawn
        return (prefill,)
    num_steps = max(sample.num_sampled for sample in request.samples)
    return prefill, jobs.DeviceTurn("decode", request.drew_at, time.time(), num_steps)


def _sequence(sample: Sample) -> jobs.SampledTokens:
    assert sample.reason is not None
    k = sample.request.job.topk_sample_logprobs
    topk = _stacked(sample.topk[: sample.num_sampled], k) if k else None
    return jobs.SampledTokens(
        tokens=np.array(sample.tokens[sample.num_prompt :], np.int32),
        logprobs=np.array(sample.logprobs, np.float32),
        stop_reason=sample.reason,
        topk=topk,
        routed_experts=sample.experts,
    )


def _stacked(rows: Sequence[tuple[list[int], list[float]]], k: int) -> jobs.TopK:
    """Alternatives of k cells a token; a vocabulary that has fewer tokens leaves the last empty."""
    topk = empty_topk(len(rows), k)
    if rows:  # a job that only scores its prompt samples no token
        width = len(rows[0][0])
        topk.token_ids[:, :width] = [ids for ids, _ in rows]
        topk.logprobs[:, :width] = [values for _, values in rows]
    return topk
