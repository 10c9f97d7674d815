"""Generate tokens for many jobs at once over one base model: continuous batching.

A job becomes one sequence per sample; all samples of a job fork from one prefilled prompt. Each
`step` runs one forward pass over whatever the scheduler chose, of any mix of adapters, draws the
next tokens and reports them. Where decode steps are replayed graphs, `step` launches the next pass
before it reads what the last one drew, so the device does not wait for the host; a sample that
turns out to have ended has then computed one token for nothing. The sampler owns the KV memory of
its base model and nothing else: it is given the adapter weights with the job, and called by one
thread only. Jobs wait for KV memory in the order they came; see `scheduler` for who yields to whom.

Shapes: T tokens of a pass, N rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import jobs
from tinkex.engine.collectives.group import on_every_rank
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.model import packed_weights
from tinkex.engine.model.decoder import DecoderLike
from tinkex.engine.model.mixture import Routing
from tinkex.engine.numerics import routed_experts
from tinkex.engine.numerics.memory_in_use import give_back
from tinkex.engine.numerics.row_filling import exactly
from tinkex.engine.reports import cancelled
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.expert_pages import unrecorded
from tinkex.engine.sample.intake import Intake
from tinkex.engine.sample.memory import SamplerMemory, pack_weights
from tinkex.engine.sample.paged import slots_of
from tinkex.engine.sample.pass_clock import PassClock
from tinkex.engine.sample.preemption import Preemption
from tinkex.engine.sample.rng import uniform_table
from tinkex.engine.sample.running_jobs import (
    RunningJob,
    Sample,
    lora_of,
    owner_of,
    result_of,
    sample_of,
)
from tinkex.engine.sample.sampling_math import Settings, draw, top_sampled
from tinkex.engine.sample.scheduler import Chunk, Scheduler, Seq
from tinkex.engine.sample.stopping import Detokenize
from tinkex.errors import InvalidInputError

log = logging.getLogger(__name__)
_LOGIT_CELLS = 1 << 24
"""Most logits made at once when a prompt is scored (64 MiB in fp32)."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The tokens that one pass drew for its samples, perhaps still being computed."""

    samples: list[Sample]
    tokens_N: Tensor
    """On the device, for the pass that follows."""
    wait: Callable[[], tuple[Tensor, ...]]
    """Gives them on the host with logprobs (float64, [2, N]), then top ids and logprobs if anyone
    asked."""


class Sampler:
    """All running sample jobs of one base model."""

    def __init__(
        self,
        decoder: DecoderLike,
        config: SamplerConfig | None = None,
        detokenizer: Callable[[], Detokenize] | None = None,
    ) -> None:
        self.decoder, self.group = decoder, decoder.group
        config = config or SamplerConfig()
        # All ranks of a group have as many blocks as the one with the least memory.
        self.config = replace(config, kv_bytes=self.group.smallest(config.kv_bytes))
        memory = SamplerMemory.of(decoder, self.config)
        self.cache, self.states, self._experts = memory.cache, memory.states, memory.experts
        limits = replace(self.config, max_running=memory.max_running)
        self.scheduler = Scheduler(limits, memory.blocks, memory.state_pool)
        self._preemption = Preemption(self.scheduler.config)
        self._attend, self._graphs = memory.attention(decoder, exact=self.config.exact)
        # Passes have as many rows on all ranks: all have packed copies, or none counts on them.
        is_packed = self.group.all_true(pack_weights(decoder, self.config))
        self._fewest_rows = packed_weights.FEWEST_ROWS if is_packed else 1
        self._intake = Intake(decoder.config, kv_tokens=memory.num_tokens, detokenizer=detokenizer)
        self._requests: dict[str, RunningJob] = {}
        self._settings: tuple[list[Sample], Settings] | None = None
        self._unread: _Drawn | None = None
        self._pass_clock = PassClock()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def next_alone(self) -> str:
        return self.scheduler.next_trial

    # ------------------------------------------------------------------------------- in and out

    def add(
        self,
        job: jobs.SampleJob,
        adapter: Adapter | None,
        emit: jobs.Emit,
        version: str | None = None,
    ) -> None:
        """Queue a job. `emit` gets its `Tokens` and its end from within `step`.

        Jobs of equal `version` (by default the adapter's folder) share prefixes, so it must
        change whenever the weights do, and nobody may choose it for weights of their own.

        Raises:
            InvalidInputError: The job does not fit the model or the KV memory. Nothing is queued.
        """
        if self.group.size > 1 and job.seed is None:  # all ranks draw the same tokens
            job = replace(job, seed=secrets.randbits(63))
        with self.group.call(self, "follow", job, adapter, version):
            self._add(job, adapter, emit, version)

    def follow(self, job: jobs.SampleJob, adapter: Adapter | None, version: str | None) -> None:
        """Queue a job whose events only the leader emits."""
        self._add(job, adapter, lambda event: None, version)

    def _add(
        self, job: jobs.SampleJob, adapter: Adapter | None, emit: jobs.Emit, version: str | None
    ) -> None:
        if job.job_id in self._requests:
            raise InvalidInputError(f"a job {job.job_id!r} is running already", path="job_id")
        version = job.adapter_folder or "" if version is None else version
        request = self._intake.request(job, adapter, emit, version)
        self._requests[job.job_id] = request
        self.scheduler.add(request.lead())

    @on_every_rank
    def cancel(self, job_id: str) -> bool:
        """Drop a job and free its memory now. False when it is not here (any more)."""
        request = self._requests.pop(job_id, None)
        if request is None:
            return False
        for sample in request.samples:
            self.scheduler.remove(sample)
        request.emit(cancelled(job_id))
        return True

    def cancel_all(self) -> None:
        for job_id in list(self._requests):
            self.cancel(job_id)

    @on_every_rank
    def fail_all(self, message: str) -> None:
        """End every job after an error of the device; the sampler is empty afterwards."""
        self._unread = None
        for request in list(self._requests.values()):
            self._fail(request, message, "server")

    def _fail(self, request: RunningJob, message: str, category: Literal["user", "server"]) -> None:
        del self._requests[request.job.job_id]
        pool = self.scheduler.pool
        for sample in request.samples:
            # Numbers that are not finite may stand there, and a mask does not help: 0 times one of
            # them is not 0. So nobody is to find these blocks by their prefix, and those that no
            # other sequence holds are zeroed.
            blocks = list(sample.blocks)
            pool.unpublish(blocks)
            self.scheduler.remove(sample)
            self.cache.scrub([block for block in blocks if not pool.is_held(block)])
        request.emit(jobs.Failed(job_id=request.job.job_id, message=message, category=category))

    # ------------------------------------------------------------------------------------- pass

    @on_every_rank
    @torch.inference_mode()
    def step(self, *, look_ahead: bool = True) -> int:
        """Run one forward pass; returns how many tokens it computed.

        Its tokens are reported before this returns or, where the pass is a replayed graph and
        `look_ahead` is true, by the next step.
        """
        self._pass_clock.begin()
        with exactly(self.config.exact and self.decoder.ops.fills_rows):
            num_tokens, shortage = self.group.attempt(lambda: self._step(look_ahead), lambda: None)
        self._pass_clock.end()
        if num_tokens is None:
            self._preempt_all(shortage)
        elif (config := self._preemption.passed()) is not None:
            self.scheduler.config = config
        return num_tokens or 0

    def _preempt_all(self, shortage: str) -> None:
        """Begin again after a pass that found no memory, from what was drawn until then."""
        self._unread = self._settings = None
        config, is_blamed = self._preemption.failed()
        log.warning("a sampling pass found no memory, smaller ones follow: %s", shortage)
        if is_blamed:
            request = self._preemption.to_blame(self._requests.values())
            text, job_id = self._preemption.text(shortage, request), request.job.job_id
            del self._requests[job_id]
            request.emit(jobs.Failed(job_id=job_id, message=text, category="server"))
        give_back()
        # What the failed pass wrote is not known, so nothing in the caches counts any more.
        before = self.scheduler
        states = None if before.states is None else before.states.emptied()
        self.scheduler = Scheduler(config, before.pool.emptied(), states)
        self.scheduler.num_preempted = before.num_preempted + len(before.running)
        for request in self._requests.values():
            is_new = not any(sample.num_sampled or sample.reason for sample in request.samples)
            for sample in request.samples:
                sample.start_again()
            left = [sample for sample in request.samples if sample.reason is None]
            for sample in [request.lead()] if is_new else left:
                self.scheduler.add(sample)

    def _step(self, look_ahead: bool) -> int:
        # A pass that nobody waits for would show its trouble in the next one, which is another's.
        look_ahead = look_ahead and not self.scheduler.has_trial
        last, self._unread = self._unread, None
        if last is not None:
            self._pass_clock.among(len(last.samples))
            ahead = self._replay_ahead(last) if look_ahead else None
            self._read(last)
            if ahead is not None:
                chunks, self._unread = ahead
                for chunk in chunks:
                    if chunk.seq.blocks:  # it did not end with the token just read
                        self.scheduler.done(chunk)
                return len(chunks)
        chunks = self.scheduler.plan()
        self._preemption.planned(chunks)
        self._pass_clock.among(len(chunks))
        if self.states is not None:  # before the pass, which goes on from there
            self.states.copy(self.scheduler.take_restores())
        if self.scheduler.waiting:
            self._tell_who_waits()
        if not chunks:
            assert not self.scheduler, "sequences wait, but none can run"
            return 0
        # Rows of one adapter lie together; longer sequences first, as attention groups them.
        chunks.sort(key=lambda c: (c.seq.version, c.seq.folder, c.length, -c.start))
        if (logits_NV := self._replay(chunks)) is not None:
            for chunk in chunks:
                self.scheduler.done(chunk)
            drawn = self._draw([sample_of(chunk) for chunk in chunks], logits_NV)
            if look_ahead:
                self._unread = drawn
            else:
                self._read(drawn)
            return len(chunks)
        hidden_TD = self._forward(chunks)
        # Before anyone is forked: a follower shares what its leader has in the cache by now.
        for chunk in chunks:
            self.scheduler.done(chunk)
        if self.states is not None:
            self.states.copy(self.scheduler.take_saves())
        self._score_prompts(chunks, hidden_TD)
        sampled = self._sample(chunks, hidden_TD)
        self.group.finish()  # before anybody hears of it
        if sampled is not None:
            self._read(sampled)
        return len(hidden_TD)

    def _tell_who_waits(self) -> None:
        """Say once to each job that found no room why it does not start."""
        room = "memory for keys and values"
        places = self.scheduler.config.max_running
        if len(self.scheduler.running) >= places:
            room = f"one of {places} places"
        for place, seq in enumerate(self.scheduler.waiting):
            owner_of(seq).request.say_it_waits(room, place)

    def _replay(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits of a pass in which every sequence decodes one token, from a recorded graph."""
        if self._graphs is None or not all(sample_of(chunk).num_sampled for chunk in chunks):
            return None
        if not all(chunk.length == 1 and chunk.completes for chunk in chunks):
            return None  # a preempted sequence is being prefilled again
        return self._graphs.run(chunks, lora_of([(chunk.seq, 1) for chunk in chunks]))

    def _replay_ahead(self, last: _Drawn) -> tuple[list[Chunk], _Drawn] | None:
        """Launch the pass after `last`, whose tokens only the device knows yet.

        None when it has to be planned with those tokens known: someone could be admitted, or
        memory is short, or no graph fits.
        """
        assert self._graphs is not None
        rows = [
            row
            for row, sample in enumerate(last.samples)
            # One token of each is drawn and not read: who has no more than that left is done.
            if sample.blocks and sample.num_sampled + 1 < sample.request.max_tokens
        ]
        samples = [last.samples[row] for row in rows]
        chunks = self.scheduler.plan_ahead(samples)
        if not chunks:
            return None
        lora = lora_of([(sample, 1) for sample in samples])
        logits_NV = self._graphs.run(chunks, lora, (last.tokens_N, rows))
        if logits_NV is None:
            return None
        return chunks, self._draw(samples, logits_NV, num_unread=1)

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            if (sample := sample_of(chunk)).since_s is None:
                sample.since_s = self._pass_clock.read_s()
                sample.request.began_at = sample.request.began_at or time.time()
            stop = chunk.start + chunk.length
            tokens += chunk.seq.tokens[chunk.start : stop]
            positions += range(chunk.start, stop)
        num_rows = len(tokens)
        if num_rows < self._fewest_rows:
            tokens += [tokens[-1]] * (self._fewest_rows - num_rows)
            positions += [positions[-1]] * (self._fewest_rows - num_rows)
        self._attend.begin(chunks)
        inputs_2T = self.decoder.ops.send((tokens, positions))
        routing = None if self._experts is None else Routing()
        hidden_TD = self.decoder.forward(
            inputs_2T[0],
            inputs_2T[1],
            self._attend,
            lora_of([(c.seq, c.length) for c in chunks]),
            routing=routing,
        )
        if self._experts is not None and routing is not None:
            slots = slots_of(chunks, self.config.block_size)
            self._experts.write(self.decoder.ops.send(slots), routing)
        return hidden_TD[:num_rows]

    def _head(self, hidden_ND: Tensor, owners: Sequence[tuple[Seq, int]]) -> Tensor:
        """Logits of rows that belong, in order, to `owners` (sequence, number of rows)."""
        return self.decoder.head(hidden_ND, lora_of(owners))

    def _score_prompts(self, chunks: Sequence[Chunk], hidden_TD: Tensor) -> None:
        offset = 0
        for chunk in chunks:
            seq, first = sample_of(chunk), offset
            offset += chunk.length
            scores = seq.request.scores
            if scores is None or seq.index or seq.num_reusable >= seq.num_prompt:
                continue
            rows = scores.rows(chunk.start, chunk.start + chunk.length)
            step = max(1, _LOGIT_CELLS // self.decoder.config.vocab_size)
            for start in range(rows.start, rows.stop, step):
                part = range(start, min(start + step, rows.stop))
                at = first + part.start - chunk.start
                logits_NV = self._head(hidden_TD[at : at + len(part)], [(seq, len(part))])
                scores.add(self.decoder.ops, part, logits_NV)
            if seq.num_cached >= seq.num_prompt:
                # All is scored: from now on the prefix cache may serve this prompt as any other.
                seq.num_reusable = seq.num_prompt

    def _sample(self, chunks: Sequence[Chunk], hidden_TD: Tensor) -> _Drawn | None:
        """Draw the next token of every sequence whose last token was in this pass."""
        samples: list[Sample] = []
        rows: list[int] = []
        owners: list[tuple[Seq, int]] = []
        copies: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        row_of_sample: list[int] = []
        last = -1
        for chunk in chunks:
            last += chunk.length
            seq = sample_of(chunk)
            if not chunk.completes:
                continue
            forks = self.scheduler.fork(seq) if seq.followers else []
            copies += [fork.copy for fork in forks if fork.copy is not None]
            states += [fork.state for fork in forks if fork.state is not None]
            # All draw from one row of logits: numbers of their own make them differ.
            for sample in (seq, *(fork.seq for fork in forks)):
                samples.append(owner_of(sample))
                row_of_sample.append(len(rows))
            rows.append(last)
            owners.append((seq, 1))
        self.cache.copy_blocks(copies)
        if self._experts is not None:
            self._experts.copy_blocks(copies)
        if self.states is not None:
            self.states.copy(states)
        if not samples:
            return None
        # The head is the widest product of all: only rows that draw go through it, each once.
        if len(rows) < len(hidden_TD):
            hidden_TD = hidden_TD[torch.tensor(rows, device=hidden_TD.device)]
        logits_NV = self._head(hidden_TD, owners)
        if len(samples) > len(rows):
            logits_NV = logits_NV[torch.tensor(row_of_sample, device=logits_NV.device)]
        return self._draw(samples, logits_NV)

    def _draw(self, samples: list[Sample], logits_NV: Tensor, num_unread: int = 0) -> _Drawn:
        """Draw a token for each sample, of which `num_unread` drawn before are not read yet."""
        for sample in samples:
            if sample.since_s is None:  # forked from a prompt that another one prefilled
                sample.since_s = self._pass_clock.read_s()
        settings = self._settings_of(samples)
        positions = [sample.num_sampled + num_unread for sample in samples]
        table = uniform_table([sample.key for sample in samples], positions)
        uniform_N3 = self.decoder.ops.send(table)
        tokens_N, logprobs_N = draw(logits_NV, settings, uniform_N3)
        # Ranks may round differently: all take what the leader drew. One tensor, so that one copy
        # brings both to the host; float64 holds every token id exactly.
        wanted = [self.group.broadcast(torch.stack((tokens_N.double(), logprobs_N.double())))]
        if widest := max(sample.request.job.topk_sample_logprobs for sample in samples):
            wanted += top_sampled(logits_NV, settings, widest)
        return _Drawn(samples, tokens_N, self.decoder.ops.fetch(*wanted))

    def _read(self, drawn: _Drawn) -> None:
        """Wait for what was drawn, the only wait for the device in a step, and hand it out."""
        drawn_2N, *top = drawn.wait()
        ids_NK, values_NK = (x.tolist() for x in top) if top else ([], [])
        for row, (sample, token, logprob) in enumerate(
            zip(drawn.samples, *drawn_2N.tolist(), strict=True)
        ):
            if sample.reason is not None or self._requests.get(sample.job_id) != sample.request:
                continue  # It ended, or its job did, while this was being computed.
            if k := sample.request.job.topk_sample_logprobs:
                sample.topk.append((ids_NK[row][:k], values_NK[row][:k]))
            self._accept(sample, int(token), logprob)

    def _settings_of(self, samples: list[Sample]) -> Settings:
        """The batch's settings; decoding mostly asks for the same samples as the step before."""
        if self._settings is None or self._settings[0] != samples:
            settings = Settings.of(
                [sample.request.job for sample in samples],
                self.decoder.config.vocab_size,
                self.decoder.ops,
            )
            self._settings = (samples, settings)
        return self._settings[1]

    def _accept(self, sample: Sample, token: int, logprob: float) -> None:
        """Append a drawn token to its sample, and end the sample if it is complete."""
        request = sample.request
        request.say_it_runs()
        if math.isnan(logprob):
            self._fail(request, request.divergence, "user")
            return
        sample.take(token, logprob)
        if sample.reason is not None:
            self._end(sample)

    def _end(self, sample: Sample) -> None:
        """Free what a sample held; the last one of a job ends the job."""
        request = sample.request
        if request.job.routed_experts:
            self._note_experts(sample)
        self.scheduler.remove(sample)
        request.num_open -= 1
        assert sample.since_s is not None
        request.device_s += self._pass_clock.read_s() - sample.since_s
        if request.num_open == 0:
            # Before it is forgotten: a job whose result cannot be made must still have an end.
            done = jobs.Done(job_id=request.job.job_id, result=result_of(request))
            del self._requests[request.job.job_id]
            request.emit(done)

    def _note_experts(self, sample: Sample) -> None:
        """Keep the experts of an ended sample, before its pages go; the first has the prompt's."""
        assert self._experts is not None
        num_prompt, num_tokens = sample.num_prompt, len(sample.tokens)
        if sample.index == 0:
            prompt_TLk = self._experts.read(sample.blocks, 0, num_prompt)
            sample.request.prompt_experts = routed_experts.pack(prompt_TLk)
        own_TLk = self._experts.read(sample.blocks, num_prompt, max(num_tokens - 1, num_prompt))
        if num_tokens > num_prompt:
            own_TLk = np.concatenate([own_TLk, unrecorded(own_TLk)])
        sample.experts = routed_experts.pack(own_TLk)
