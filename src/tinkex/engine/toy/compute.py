"""A deterministic stand-in for a model, without torch: microseconds per call.

It trains and samples a bigram table (`toy/model.py`), so server and SDK tests see losses that fall,
checkpoints that restore and samples that repeat, without a model on disk. Equal jobs in equal order
give equal bits. It knows nothing of queues, threads, tensors, devices or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tinkex.contract.models import MAX_RANK
from tinkex.engine import jobs
from tinkex.engine.all_reduce import sockets
from tinkex.engine.all_reduce.process_groups import ProcessGroups
from tinkex.engine.loop.compute import Packing
from tinkex.engine.metrics import Tally
from tinkex.engine.optim.shards import deal
from tinkex.engine.toy import checkpoint
from tinkex.engine.toy.cache import Recent
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.losses import evaluate
from tinkex.engine.toy.model import ToyAdapter
from tinkex.engine.toy.reducer import ToyReducer
from tinkex.engine.toy.sampler import ToySampler
from tinkex.engine.train.data import Limits, loss_of, read_datum
from tinkex.errors import InvalidInputError, ModelNotFoundError


class ToyCompute:
    """See `loop.compute.Compute`."""

    # A job is computed by itself, so a job that hangs is the only one to blame.
    shares_passes = False

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self.snapshots: Recent[str, ToyAdapter] = Recent(config.num_snapshots)
        self._limits = Limits(vocab_size=config.vocab_size, max_length=config.max_context_length)
        self._adapters: dict[str, ToyAdapter] = {}
        self._bases: dict[str, ToyAdapter] = {}
        self._sampler = ToySampler(config)
        self._groups = ProcessGroups(partial(ToyReducer.join, self._adapter), sockets.open_store)

    def packing(self, adapter_id: str) -> Packing | None:
        return None

    def run(self, job: jobs.Job, emit: jobs.Emit) -> jobs.Result | None:
        match job:
            case jobs.SampleJob():
                self._sampler.add(job, self._weights(job), emit)
                return None
            case jobs.CreateAdapterJob():
                self._create(job)
            case jobs.LoadAdapterJob():
                return self._load(job)
            case jobs.DropAdapterJob():
                self._adapters.pop(job.adapter_id, None)
            case jobs.OptimJob():
                metrics = self._adapter(job.adapter_id).optim_step(job.params)
                return jobs.OptimResult(metrics=metrics)
            case jobs.ShareGradientJob():
                return self._share(job)
            case jobs.AddGradientJob():
                return self._add(job)
            case jobs.LoadModelJob():
                self._base(job.base_model)
            case jobs.DescribeModelJob():
                return self._describe(job.base_model)
            case _:
                raise AssertionError(f"a {type(job).__name__} is not run here")
        return jobs.AdapterResult()

    def submit_to_group(self, job: jobs.GroupJob, emit: jobs.Emit) -> None:
        self._groups.submit(job, emit)

    def sampling(self) -> Sequence[ToySampler]:
        return (self._sampler,) if self._sampler.has_work else ()

    def held_bytes(self) -> Mapping[str, int]:
        """Nothing: its tables are too small to count."""
        return {}

    def begin(self) -> None:
        """Any thread will do."""

    def rest(self) -> None:
        """Keep everything."""

    def close(self) -> None:
        self._groups.close()

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

    def _create(self, job: jobs.CreateAdapterJob) -> None:
        if not 1 <= job.lora.rank <= MAX_RANK:
            raise InvalidInputError(
                f"must be 1 to {MAX_RANK}, got {job.lora.rank}", path="lora.rank"
            )
        if job.adapter_id in self._adapters:
            raise InvalidInputError(f"adapter {job.adapter_id!r} exists already; drop it first")
        self._base(job.base_model)
        self._adapters[job.adapter_id] = self._fresh(job.base_model, job.lora, job.optimizer)

    def _load(self, job: jobs.LoadAdapterJob) -> jobs.AdapterResult:
        self._base(job.base_model)
        adapter = self._read(job.folder, with_optimizer=job.with_optimizer)
        if adapter.base_model != job.base_model:
            raise InvalidInputError(
                f"checkpoint is of {adapter.base_model!r}, adapter of {job.base_model!r}"
            )
        if job.mixture:
            others = [(self._read(folder), by) for folder, by in job.mixture[1:]]
            adapter.mix(job.mixture[0][1], others)
        self._adapters[job.adapter_id] = adapter
        return jobs.AdapterResult(content=checkpoint.content_of(adapter.export()))

    def _read(self, folder: str, *, with_optimizer: bool = False) -> ToyAdapter:
        return checkpoint.read(
            Path(folder),
            vocab_size=self.config.vocab_size,
            with_optimizer=with_optimizer,
            has_ballast=self.config.adapter_bytes > 0,
        )

    def capture(self, job: jobs.SaveAdapterJob) -> Callable[[], jobs.AdapterResult]:
        adapter = self._adapter(job.adapter_id)
        arrays, texts = checkpoint.capture(adapter, job)
        if job.for_sampling:
            snapshot = self._fresh(adapter.base_model, adapter.lora, adapter.optimizer)
            snapshot.load(arrays, with_optimizer=False, with_gradients=False)
            self.snapshots.put(job.folder, snapshot)
        return partial(
            checkpoint.write,
            Path(job.folder),
            arrays,
            texts,
            ballast_bytes=self.config.adapter_bytes,
            sync=not job.ephemeral,
        )

    def _weights(self, job: jobs.SampleJob) -> ToyAdapter:
        """The weights that a job samples from."""
        base = self._base(job.base_model)
        if (folder := job.adapter_folder) is None:
            return base
        return self.snapshots.get(folder, lambda: self._read(folder))

    # ------------------------------------------------------------------------------- training

    def _share(self, job: jobs.ShareGradientJob) -> jobs.GradientResult:
        adapter = self._adapter(job.adapter_id)
        adapter.share()
        return jobs.GradientResult(seconds=0.0, size_bytes=adapter.shared_bytes)

    def _add(self, job: jobs.AddGradientJob) -> jobs.GradientResult:
        began, adapter = time.perf_counter(), self._adapter(job.adapter_id)
        size_bytes = adapter.shared_bytes
        adapter.add_brought()
        return jobs.GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def train(self, together: Sequence[jobs.TrainJob]) -> list[jobs.TrainResult]:
        return [self._train(job) for job in together]

    def _train(self, job: jobs.TrainJob) -> jobs.TrainResult:
        began_at = time.time()
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
        if pass_s := config.train_token_latency_s * num_tokens:
            sums["train_time_s:sum"] = pass_s
        tally = Tally(
            losses=tuple([done.loss for done in work]),
            sums=sums,
            gaps=tuple([gap for done in work for gap in done.gaps]),
            custom=tuple([done.metrics for done in work]),
        )
        outputs = tuple([{"logprobs": done.logp.astype(np.float32)} for done in work])
        return jobs.TrainResult(
            outputs=outputs,
            metrics=tally.metrics(),
            num_tokens=num_tokens,
            tally=tally,
            turns=(jobs.DeviceTurn("pass", began_at, time.time(), num_tokens),),
        )
