"""A deterministic engine without torch: the whole `jobs.Engine`, microseconds per call.

It trains and samples a bigram table (`toy/model.py`), so server and SDK tests see losses that fall,
checkpoints that restore and samples that repeat, without a model on disk. Equal jobs in equal order
give equal bits. One thread runs everything but the writing of checkpoints, which another one does;
with artificial latency, jobs of one adapter wait for each other and jobs of different adapters do
not. It knows nothing of tensors, devices or HTTP.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.models import MAX_RANK
from tinkex.engine import jobs
from tinkex.engine.exchange import gradient_file
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.metrics import Tally
from tinkex.engine.optim.shards import deal
from tinkex.engine.reports import cancelled, failure, tell
from tinkex.engine.sample.checks import check_sample_job
from tinkex.engine.sample.rng import fresh_seed, sample_key, uniform
from tinkex.engine.toy import checkpoint
from tinkex.engine.toy.agenda import Agenda, Due
from tinkex.engine.toy.cache import PrefixCache, Recent
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.losses import evaluate
from tinkex.engine.toy.model import ToyAdapter, pack_gradients, unpack_gradients
from tinkex.engine.toy.sampling import draw, ends_with_stop, log_softmax, prompt_scores, stack, top
from tinkex.engine.train.data import Limits, loss_of, read_datum
from tinkex.errors import InvalidInputError, ModelNotFoundError, NotSupportedError

log = logging.getLogger(__name__)

_Entry = tuple[float, jobs.Job, jobs.Emit, jobs.Event | None] | str | None
"""What the engine's thread is told: a job and when it came, an event and when it is to be told, the
id of a job to cancel; None, the last one: the engine is closed."""


class ToyEngine:
    """See `jobs.Engine`. `close` ends the thread; jobs still waiting fail as cancelled."""

    def __init__(self, config: ToyConfig | None = None) -> None:
        self.config = config or ToyConfig()
        self.heartbeat = Heartbeat()
        self._limits = Limits(
            vocab_size=self.config.vocab_size, max_length=self.config.max_context_length
        )
        self._adapters: dict[str, ToyAdapter] = {}
        self._snapshots: Recent[str, ToyAdapter] = Recent(self.config.num_snapshots)
        self._bases: dict[str, ToyAdapter] = {}
        self._prefixes = PrefixCache()
        self._agenda = Agenda()
        self._lane_free_at: dict[str, float] = {}
        self._device_free_at = 0.0
        self._slots: list[float] = [0.0] * self.config.max_running  # a heap: when each is free
        self._live: dict[str, jobs.Emit] = {}
        self._inbox: SimpleQueue[_Entry] = SimpleQueue()
        self._door = threading.Lock()
        self._closed = False
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="toy-engine-disk")
        self._thread = threading.Thread(target=self._loop, name="toy-engine", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------- jobs.Engine

    def submit(self, job: jobs.Job, emit: jobs.Emit) -> None:
        with self._door:
            if not self._closed:
                self._inbox.put((time.monotonic(), job, emit, None))
                return
        emit(jobs.Failed(job_id=job.job_id, message="engine closed", category="cancelled"))

    def cancel(self, job_id: str) -> None:
        self._inbox.put(job_id)

    def close(self) -> None:
        with self._door:
            self._closed = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    # ---------------------------------------------------------------------------------- thread

    def _loop(self) -> None:
        while self._take_in():
            if (due := self._agenda.take()) is not None:
                self._attend(due)
        self._drop(list(self._live))
        self._disk.shutdown()

    def _take_in(self) -> bool:
        """Note what has come; when nothing is due, wait for it. False: the engine is closed."""
        entries: list[_Entry] = []
        if not self._agenda.is_due:
            try:
                entries.append(self._inbox.get(timeout=self._agenda.idle_s()))
            except Empty:
                return True
        while not self._inbox.empty():
            entries.append(self._inbox.get())
        for entry in entries:
            if isinstance(entry, tuple):
                self._plan(*entry)
        self._drop([entry for entry in entries if isinstance(entry, str)])
        return None not in entries

    def _plan(self, at: float, job: jobs.Job, emit: jobs.Emit, event: jobs.Event | None) -> None:
        """An event is told at its time; a job that has come runs after those before it."""
        if event is None:
            lane = getattr(job, "adapter_id", "")
            at = max(at, self._lane_free_at.get(lane, 0.0)) + self.config.latency_s
            if (pass_s := self._pass_s(job)) > 0:
                at = self._device_free_at = max(at, self._device_free_at) + pass_s
            if lane:
                self._lane_free_at[lane] = at
            self._live[job.job_id] = emit
        self._agenda.add(at, job, emit, event)

    def _pass_s(self, job: jobs.Job) -> float:
        token_s = self.config.train_token_latency_s
        if token_s == 0 or not isinstance(job, jobs.TrainJob):
            return 0.0
        return token_s * sum(len(datum.tokens) for datum in job.data)

    def _drop(self, job_ids: list[str]) -> None:
        """End these jobs as cancelled, those that have no end yet."""
        if job_ids:
            self._agenda.forget(set(job_ids))
        for job_id in job_ids:
            if (emit := self._live.pop(job_id, None)) is not None:
                tell(emit, cancelled(job_id))

    def _attend(self, due: Due) -> None:
        if due.event is not None:
            self._finish(due.emit, due.event)
        else:
            with self.heartbeat.work(due.job.job_id):
                self._attempt(due, partial(self._run, due))

    def _attempt(self, due: Due, action: Callable[[], jobs.Result | None]) -> None:
        """Run something for a job and tell how it ended; None means that it goes on elsewhere."""
        try:
            result = action()
        except Exception as exc:
            self._finish(due.emit, failure(due.job.job_id, exc))
        else:
            for at, event in self._events(due, result) if result is not None else ():
                if self.config.token_latency_s == 0:
                    self._finish(due.emit, event)
                else:
                    self._inbox.put((at, due.job, due.emit, event))

    def _events(self, due: Due, result: jobs.Result) -> list[tuple[float, jobs.Event]]:
        """A result and when it is told, sampled tokens first and each at its time."""
        job, at, token_s = due.job, due.at, self.config.token_latency_s
        events: list[tuple[float, jobs.Event]] = []
        if isinstance(job, jobs.SampleJob) and (job.stream or token_s > 0):
            assert isinstance(result, jobs.SampleResult)
            starts = [self._start(at, len(s.tokens)) for s in result.sequences]
            if job.stream:
                for place, event in _token_events(job.job_id, result):
                    events.append((starts[event.sample_index] + token_s * (place + 1), event))
            ends = zip(starts, result.sequences, strict=True)
            at = max([at, *(start + token_s * len(s.tokens) for start, s in ends)])
        return [*events, (at, jobs.Done(job_id=job.job_id, result=result))]

    def _start(self, at: float, num_tokens: int) -> float:
        """When a sample of that length begins, and has a slot until it ends."""
        if not self._slots:
            return at
        at = max(at, heapq.heappop(self._slots))
        heapq.heappush(self._slots, at + self.config.token_latency_s * num_tokens)
        return at

    def _finish(self, emit: jobs.Emit, event: jobs.Event) -> None:
        if isinstance(event, jobs.Tokens) or self._live.pop(event.job_id, None) is not None:
            tell(emit, event)

    def _run(self, due: Due) -> jobs.Result | None:
        match job := due.job:
            case jobs.SampleJob():
                return self._sample(job)
            case jobs.TrainJob():
                return self._train(job)
            case jobs.CreateAdapterJob():
                return self._create(job)
            case jobs.LoadAdapterJob():
                return self._load(job)
            case jobs.SaveAdapterJob():
                return self._save(job, due)
            case jobs.DropAdapterJob():
                self._adapters.pop(job.adapter_id, None)
                if self._lane_free_at.get(job.adapter_id, 0.0) <= time.monotonic():
                    self._lane_free_at.pop(job.adapter_id, None)  # nothing waits behind us
                return jobs.AdapterResult()
            case jobs.OptimJob():
                metrics = self._adapter(job.adapter_id).optim_step(job.params)
                return jobs.OptimResult(metrics=metrics)
            case jobs.ShareGradientJob():
                return self._share(job)
            case jobs.AddGradientJob():
                return self._add(job)
            case jobs.MeetingJob():
                raise NotSupportedError("a toy meets nobody; its gradients go through files")
            case jobs.LoadModelJob():
                self._base(job.base_model)
                return jobs.AdapterResult()
            case jobs.DescribeModelJob():
                return self._describe(job.base_model)
        raise AssertionError(f"no engine runs a {type(job).__name__}")

    # --------------------------------------------------------------------------------- models

    def _describe(self, base_model: str) -> jobs.ModelInfo:
        known = self.config.models
        if known is not None and base_model not in known:
            raise ModelNotFoundError(
                f"no base model {base_model!r}; known: {', '.join(sorted(known))}"
            )
        return jobs.ModelInfo(
            base_model=base_model,
            arch="toy",
            vocab_size=self.config.vocab_size,
            max_context_length=self.config.max_context_length,
            tokenizer_id=base_model,
            eos_token_ids=(2,),
        )

    def _base(self, base_model: str) -> ToyAdapter:
        """The untrained adapter of a base model. There is nothing to load, so it says nothing."""
        if base_model not in self._bases:
            self._describe(base_model)
            self._bases[base_model] = self._fresh(base_model, jobs.LoraSpec(rank=1))
        return self._bases[base_model]

    def _fresh(self, base_model: str, lora: jobs.LoraSpec, optimizer: str = "adamw") -> ToyAdapter:
        return ToyAdapter(base_model, self.config.vocab_size, lora, optimizer)

    def _adapter(self, adapter_id: str) -> ToyAdapter:
        if (adapter := self._adapters.get(adapter_id)) is None:
            raise ModelNotFoundError(
                f"no adapter {adapter_id!r} is loaded; create it or load a checkpoint into it first"
            )
        return adapter

    # ------------------------------------------------------------------------------- adapters

    def _create(self, job: jobs.CreateAdapterJob) -> jobs.AdapterResult:
        if not 1 <= job.lora.rank <= MAX_RANK:
            raise InvalidInputError(
                f"must be 1 to {MAX_RANK}, got {job.lora.rank}", path="lora.rank"
            )
        if job.adapter_id in self._adapters:
            raise InvalidInputError(f"adapter {job.adapter_id!r} exists already; drop it first")
        self._base(job.base_model)
        self._adapters[job.adapter_id] = self._fresh(job.base_model, job.lora, job.optimizer)
        return jobs.AdapterResult()

    def _load(self, job: jobs.LoadAdapterJob) -> jobs.AdapterResult:
        self._base(job.base_model)
        adapter = self._read(job.folder, with_optimizer=job.with_optimizer)
        if adapter.base_model != job.base_model:
            raise InvalidInputError(
                f"checkpoint is of {adapter.base_model!r}, adapter of {job.base_model!r}"
            )
        self._adapters[job.adapter_id] = adapter
        return jobs.AdapterResult(content=checkpoint.content_of(adapter.export()))

    def _read(self, folder: str, *, with_optimizer: bool = False) -> ToyAdapter:
        return checkpoint.read(
            Path(folder),
            vocab_size=self.config.vocab_size,
            with_optimizer=with_optimizer,
            has_ballast=self.config.adapter_bytes > 0,
        )

    def _save(self, job: jobs.SaveAdapterJob, due: Due) -> jobs.AdapterResult | None:
        adapter, folder = self._adapter(job.adapter_id), Path(job.folder)
        write = partial(
            checkpoint.write,
            folder,
            *checkpoint.capture(adapter, job),
            ballast_bytes=self.config.adapter_bytes,
            sync=not job.ephemeral,
        )
        if not job.for_sampling:
            self._disk.submit(self._attempt, due, write)
            return None
        result = write()
        self._snapshots.put(job.folder, self._read(job.folder))
        return result

    def _snapshot(self, job: jobs.SampleJob) -> ToyAdapter:
        base = self._base(job.base_model)
        if (folder := job.adapter_folder) is None:
            return base
        return self._snapshots.get(folder, lambda: self._read(folder))

    # ------------------------------------------------------------------------------- training

    def _share(self, job: jobs.ShareGradientJob) -> jobs.GradientResult:
        assert job.file is not None, "a toy meets nobody"
        began, adapter = time.perf_counter(), self._adapter(job.adapter_id)
        size_bytes = gradient_file.write(job.file, pack_gradients(adapter.grads))
        adapter.grads = {}
        return jobs.GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def _add(self, job: jobs.AddGradientJob) -> jobs.GradientResult:
        began, adapter, size_bytes = time.perf_counter(), self._adapter(job.adapter_id), 0
        for file in job.files:
            arrays = gradient_file.read(file)
            size_bytes += sum(array.nbytes for array in arrays.values())
            for shard, grad in unpack_gradients(arrays).items():
                adapter.gather(shard, grad)
        return jobs.GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def _train(self, job: jobs.TrainJob) -> jobs.TrainResult:
        adapter, config, loss = self._adapter(job.adapter_id), self.config, loss_of(job)
        data = [
            read_datum(datum, loss, path=f"data[{i}]", limits=self._limits)
            for i, datum in enumerate(job.data)
        ]
        while data[0].tokens_T[0] == config.hang_token:
            time.sleep(1)
        work = [
            evaluate(loss, job.loss_fn_config, adapter.logprobs(x.tokens_T, x.targets), x.inputs)
            for x in data
        ]
        lengths = [len(datum.tokens_T) for datum in data]
        if job.backward:
            shards = job.shards or deal(lengths)
            for datum, done, shard in zip(data, work, shards, strict=True):
                adapter.backward(datum.tokens_T, datum.targets, done.slopes, shard)
        num_tokens = sum(lengths)
        sums = {"num_tokens:sum": float(num_tokens)}
        if pass_s := self._pass_s(job):
            sums["train_time_s:sum"] = pass_s
        tally = Tally(
            losses=tuple([done.loss for done in work]),
            sums=sums,
            gaps=tuple([gap for done in work for gap in done.gaps]),
            custom=tuple([done.metrics for done in work]),
        )
        outputs = tuple([{"logprobs": done.logp.astype(np.float32)} for done in work])
        return jobs.TrainResult(
            outputs=outputs, metrics=tally.metrics(), num_tokens=num_tokens, tally=tally
        )

    # ------------------------------------------------------------------------------- sampling

    def _sample(self, job: jobs.SampleJob) -> jobs.SampleResult:
        started = time.perf_counter()
        vocab_size, context = self.config.vocab_size, self.config.max_context_length
        check_sample_job(job, vocab_size)
        room = context - len(job.prompt)
        max_tokens = room if job.max_tokens is None else job.max_tokens
        if max_tokens > room or room < 0:
            raise InvalidInputError(
                f"prompt of {len(job.prompt)} + max_tokens {max_tokens} exceed the context of "
                f"{context}",
                path="max_tokens",
            )
        adapter = self._snapshot(job)
        seed = job.seed if job.seed is not None else self._free_seed(job)
        sequences = tuple(
            self._generate(job, adapter, sample_key(seed, job.first_sample + i), max_tokens)
            for i in range(job.num_samples)
        )
        return jobs.SampleResult(
            sequences=sequences,
            num_prompt_tokens=len(job.prompt),
            num_sampled_tokens=sum(len(s.tokens) for s in sequences),
            prompt_cache_hit_tokens=self._prefixes.hits(
                f"{job.tenant}\0{job.adapter_folder or ''}", job.prompt
            ),
            device_seconds=time.perf_counter() - started,
            **prompt_scores(job, adapter, seed),
        )

    def _free_seed(self, job: jobs.SampleJob) -> int:
        if not self.config.deterministic:
            return fresh_seed()
        return int.from_bytes(np.asarray(job.prompt).tobytes()[-8:], "little")

    def _generate(
        self, job: jobs.SampleJob, adapter: ToyAdapter, key: int, max_tokens: int
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
            row = adapter.row(context)
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


# ----------------------------------------------------------------------------------- functions


def _token_events(job_id: str, result: jobs.SampleResult) -> Iterator[tuple[int, jobs.Tokens]]:
    """(position, event) of every sampled token, positions ascending over all samples."""
    for t in range(max(len(sequence.tokens) for sequence in result.sequences)):
        for i, sequence in enumerate(result.sequences):
            if t < len(sequence.tokens):
                tokens, logprobs = sequence.tokens[t : t + 1], sequence.logprobs[t : t + 1]
                yield (
                    t,
                    jobs.Tokens(job_id=job_id, sample_index=i, tokens=tokens, logprobs=logprobs),
                )
