"""Train many adapters over one frozen base model.

The trainer owns the resident adapters with their gradients and optimizer state. `train` takes jobs
of any number of adapters, checks each one before anything runs, packs all their datums into shared
passes and commits gradients only when a job has succeeded as a whole: a job that fails, whether
refused or diverged, leaves no trace and never touches its neighbours. Queues, threads and sampling
belong to the engine around it.

In a group of several processes each rank has a trainer over its shard of the base. All get the same
calls in the same order, so each packs the same passes and takes the same steps. An adapter is made
or read whole and then sharded, and joined when the leader writes it: files are those of one device.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinkex.contract.optimizers import check_params
from tinkex.engine.checkpoint import reader, writer
from tinkex.engine.collectives.group import made_on_every_rank, on_every_rank
from tinkex.engine.jobs import (
    AddGradientJob,
    CreateAdapterJob,
    GradientResult,
    LoadAdapterJob,
    LoraSpec,
    OptimJob,
    OptimResult,
    SaveAdapterJob,
    ShareGradientJob,
    TrainJob,
    TrainResult,
)
from tinkex.engine.lora.adapter import KINDS, Adapter, Kind, fresh_adapter
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.numerics.memory_in_use import is_out_of_memory
from tinkex.engine.optim.optimizer import OptimizerState, apply_step, scratch_bytes
from tinkex.engine.optim.resident import ResidentAdapter, SharedGradients, shortage_for
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.data import Limits
from tinkex.engine.train.graph_cost import LossSeconds
from tinkex.engine.train.passes import Gathered, PassRunner
from tinkex.engine.train.sharded_adapter import AdapterShards, ShardedAdapter
from tinkex.engine.train.tasks import DIVERGED, TrainTask, check_job, divergence
from tinkex.errors import (
    EngineError,
    InvalidInputError,
    ModelNotFoundError,
    TinkerError,
)

JobError = TinkerError
"""What `train` answers for a job that failed: an `EngineError` is ours, all others the caller's."""


class Trainer:
    """All adapters over one base model. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        decoder: DecoderLike,
        *,
        base_model: str,
        config: TrainerConfig | None = None,
        after_pass: Callable[[], None] = lambda: None,
        base: Base | None = None,
    ) -> None:
        """`after_pass` runs after every pass, so that others can use the device in between.

        With `base`, checkpoints carry its fingerprint, and those of another base are refused.
        """
        self.decoder = decoder
        self.base_model = base_model
        self.base = base
        self.group = group = decoder.group
        config = config or TrainerConfig.for_device(decoder.ops, deterministic=group.exact)
        # All ranks recompute, or none does.
        self.config = replace(config, activation_bytes=group.smallest(config.activation_bytes))
        self.adapters: dict[str, ResidentAdapter] = {}
        self.passes = PassRunner(decoder, self.adapters, after_pass)
        # In a group adapters are made whole on the host, and then sharded.
        self._made_on = decoder.device if group.size == 1 else torch.device("cpu")

    # ------------------------------------------------------------------------------- adapters

    def create(self, job: CreateAdapterJob) -> None:
        """Make a fresh adapter. A second create of one id replaces the first.

        Raises:
            EngineError: There is no memory to train it, here or on another rank of the group.
        """
        if self.group.size > 1 and job.lora.seed is None:  # all ranks draw the same adapter
            job = replace(job, lora=replace(job.lora, seed=secrets.randbits(63)))
        self._create(job)

    @on_every_rank
    def _create(self, job: CreateAdapterJob) -> None:
        spec = job.lora
        kinds = [kind for kind in KINDS if getattr(spec, f"train_{kind}")]
        for kind in kinds:
            if (name := self.decoder.uncovered.get(kind)) is not None:
                raise InvalidInputError(
                    f"{job.base_model!r} has weights that cannot carry an adapter, such as "
                    f"{name!r}; pass train_{kind}=False to train the others",
                    path=f"lora.train_{kind}",
                )
        resident: ResidentAdapter | None = None
        try:
            adapter = self._fresh(spec, kinds)
            optimizer = OptimizerState.fresh(job.optimizer, adapter)
            resident = ResidentAdapter(adapter, spec, job.base_model, optimizer)
            shortage = shortage_for(resident, self.adapters.values())
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            shortage = str(exc)
        if shortage := self.group.first_reason(shortage):
            raise EngineError(
                f"no memory for an adapter of rank {spec.rank} beside {len(self.adapters)} others: "
                f"{shortage}. Unload models that are done, or use a smaller rank"
            )
        assert resident is not None
        self.adapters[job.adapter_id] = resident

    def _fresh(self, spec: LoraSpec, kinds: Sequence[Kind]) -> Adapter:
        whole = fresh_adapter(
            self.decoder.targets,
            rank=spec.rank,
            alpha=spec.alpha,
            kinds=kinds,
            seed=spec.seed,
            device=self._made_on,
        )
        return whole if self.group.size == 1 else self._shard(whole)

    def _shard(self, whole: Adapter) -> ShardedAdapter:
        decoder = self.decoder
        assert isinstance(decoder, Decoder), "only our own decoder is sharded"
        return AdapterShards(whole, decoder.targets, decoder.shards).shard(whole, self.group)

    def load(self, job: LoadAdapterJob) -> str:
        """Put a checkpoint into an adapter, creating it when it is absent; gives its digest."""
        # Patient: when a load has ended, the server may delete the folder, which all ranks read.
        with self.group.call(self, "load_here", job, patient=True):
            return self.load_here(job)

    def load_here(self, job: LoadAdapterJob) -> str:
        """`load` on this rank alone."""
        previous = self.adapters.get(job.adapter_id)
        stored = self._read(job.folder, with_optimizer=job.with_optimizer)
        kind: str = stored.optimizer_kind or (
            previous.optimizer.kind if previous is not None else "adamw"
        )
        optimizer = stored.optimizer or OptimizerState.fresh(kind, stored.adapter)
        self.adapters[job.adapter_id] = ResidentAdapter(
            stored.adapter,
            stored.spec,
            job.base_model,
            optimizer,
            dict(stored.grads),
            previous.version + 1 if previous is not None else 0,
        )
        if job.mixture:
            try:
                self._mix(stored.adapter, job.mixture)
            except BaseException:
                self._put_back(job.adapter_id, previous)
                raise
        return stored.content

    def _put_back(self, adapter_id: str, previous: ResidentAdapter | None) -> None:
        if previous is None:
            self.drop(adapter_id)
        else:
            self.adapters[adapter_id] = previous

    def _mix(self, adapter: Adapter, mixture: Sequence[tuple[str, float]]) -> None:
        """Make the weights of an adapter, read from the first folder, those of a mixture.

        It is among the adapters already: between two folders others have turns, in which a base
        model without any might be forgotten.
        """
        mixed = adapter.flat * mixture[0][1]
        for folder, coefficient in mixture[1:]:
            self.passes.give_turn()
            other = self._read(folder, with_optimizer=False).adapter
            if other.signature != adapter.signature:
                raise InvalidInputError(
                    "the adapters have other modules, ranks or scales than each other; their "
                    "matrices cannot be added"
                )
            mixed += other.flat * coefficient
        if self.group.first_reason("" if bool(torch.isfinite(mixed).all()) else "infinite"):
            raise InvalidInputError("the sums are not finite; choose smaller coefficients")
        adapter.flat.copy_(mixed)

    def _read(self, folder: str, *, with_optimizer: bool) -> reader.Stored:
        targets = self.decoder.targets
        stored = reader.read(
            folder, targets, self._made_on, with_optimizer=with_optimizer, base=self.base
        )
        if self.group.size == 1:
            return stored
        whole, adapter = stored.adapter, self._shard(stored.adapter)

        def shard(flat: Tensor) -> Tensor:
            return adapter.fold_whole(whole.views(flat))

        if (optimizer := stored.optimizer) is not None:
            moments = {name: shard(flat) for name, flat in optimizer.moments.items()}
            optimizer = replace(optimizer, moments=moments)
        grads = {number: shard(flat) for number, flat in stored.grads.items()}
        return replace(stored, adapter=adapter, optimizer=optimizer, grads=grads)

    @made_on_every_rank()
    def snapshot(self, adapter_id: str) -> Adapter:
        """The weights as they are now, for sampling while training goes on."""
        return self.find(adapter_id).adapter.frozen_copy()

    @made_on_every_rank(patient=True)
    def read_snapshot(self, folder: str) -> Adapter:
        """The weights in a folder, for sampling. As after a `load`, the folder may go then."""
        stored = self._read(folder, with_optimizer=False)
        adapter = stored.adapter.frozen_copy()
        adapter.content = stored.content
        return adapter

    def capture(self, job: SaveAdapterJob) -> writer.Image:
        """The state to save, as it is now. Any thread may write it."""
        with self.group.call(self, "join", job):
            resident = self.join(job)
        assert resident is not None, "only the leader writes"
        rounds = self.decoder.batch_invariant and self.decoder.dtype == torch.bfloat16
        return writer.capture(
            resident,
            targets=self.decoder.targets,
            base=self.base,
            with_optimizer=job.with_optimizer or job.with_gradients,
            with_gradients=job.with_gradients,
            ops=self.decoder.ops,
            dtype=torch.bfloat16 if job.ephemeral and job.for_sampling and rounds else None,
        )

    def join(self, job: SaveAdapterJob) -> ResidentAdapter | None:
        """The whole of what a save needs, as it is now, on the leader; None on other ranks."""
        resident = self.find(job.adapter_id)
        adapter, optimizer = resident.adapter, resident.optimizer
        if not isinstance(adapter, ShardedAdapter):
            return resident
        with_optimizer = job.with_optimizer or job.with_gradients
        tensors = adapter.join(adapter.flat)
        moments = {n: adapter.join(m) for n, m in optimizer.moments.items() if with_optimizer}
        grads = {s: adapter.join(g) for s, g in resident.grads.items() if job.with_gradients}
        if not self.group.leads:
            return None
        whole = adapter.shards.rebuilt(tensors)
        return ResidentAdapter(
            whole,
            resident.spec,
            resident.base_model,
            replace(optimizer, moments={n: whole.fold(m) for n, m in moments.items()}),
            {shard: whole.fold(grad) for shard, grad in grads.items()},
        )

    @on_every_rank
    def drop(self, adapter_id: str) -> None:
        self.adapters.pop(adapter_id, None)

    def find(self, adapter_id: str) -> ResidentAdapter:
        if (resident := self.adapters.get(adapter_id)) is None:
            loaded = ", ".join(map(repr, sorted(self.adapters))) or "none"
            raise ModelNotFoundError(f"No adapter {adapter_id!r} is loaded; loaded: {loaded}.")
        return resident

    # ------------------------------------------------------------------------------- training

    @on_every_rank
    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult | JobError]:
        """Run jobs of one or many adapters in shared passes; answers in the order given.

        Gradients of a job are added to its adapter only when the whole job has succeeded.
        """
        answers: dict[int, TrainResult | JobError] = {}
        tasks: dict[int, TrainTask] = {}
        config = self.decoder.config
        limits = Limits(
            vocab_size=config.vocab_size,
            max_length=config.max_context_length,
            experts=config.routing,
        )
        for index, job in enumerate(jobs):
            try:
                self.find(job.adapter_id)
                tasks[index] = task = check_job(job, limits, self._loss_seconds)
                if task.budget is not None:
                    task.budget.give_turn = self.passes.give_turn
            except TinkerError as error:
                answers[index] = error
        # Nothing is an adapter's before all passes have run: see `_settle`.
        gathered = self._run(list(tasks.values()))
        for index in self._settle(tasks, gathered):
            # Another job of the same adapter failed and their gradients are mixed: run it alone.
            answers[index] = self.train([jobs[index]])[0]
        for index, task in tasks.items():
            if index not in answers:
                answers[index] = task.error or task.result()
        return [answers[index] for index in range(len(jobs))]

    @property
    def _loss_seconds(self) -> LossSeconds | None:
        """Limits of time on losses; None in a group, whose ranks would not agree on a clock."""
        if self.group.size > 1:
            return None
        return LossSeconds(datum_s=self.config.loss_datum_s, job_s=self.config.loss_job_s)

    @on_every_rank
    def optim(self, job: OptimJob) -> OptimResult:
        """Apply the gathered gradients and clear them."""
        resident = self.find(job.adapter_id)
        check_params(resident.optimizer.kind, job.params)
        began = time.perf_counter()
        # Before anything has changed.
        if shortage := self.group.first_reason(resident.shortage_for_a_step()):
            raise EngineError(
                f"the step failed: {shortage}. Beside an adapter of rank {resident.spec.rank} it "
                f"needs {scratch_bytes(resident.adapter, resident.optimizer) / 1e6:.0f} MB; unload "
                "models that are done, or train with a smaller rank"
            )
        grad = resident.take_grad()
        if grad is None:
            grad = torch.zeros_like(resident.adapter.flat)
        norm = apply_step(resident.adapter, resident.optimizer, grad, job.params, self.decoder.ops)
        resident.version += 1
        metrics = {
            "grad_norm:mean": norm,
            "step:max": float(resident.optimizer.step),
            "optim_time_s:sum": time.perf_counter() - began,
        }
        return OptimResult(metrics=metrics)

    @on_every_rank
    def share_gradient(self, job: ShareGradientJob) -> GradientResult:
        """Put what was gathered here aside, whole."""
        began = time.perf_counter()
        resident = self.find(job.adapter_id)
        adapter, grads = resident.adapter, resident.grads
        num_numbers = adapter.flat.numel()
        if isinstance(adapter, ShardedAdapter):
            # Groups of any size may share an adapter: what travels between them is whole.
            grads = {shard: adapter.join_flat(grad) for shard, grad in grads.items()}
            num_numbers = adapter.shards.whole_size
        resident.shared, resident.grads = SharedGradients(grads, num_numbers), {}
        size_bytes = sum(grad.nbytes for grad in grads.values())
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    @on_every_rank
    def add_gradient(self, job: AddGradientJob) -> GradientResult:
        """Gather what the process group brought."""
        began = time.perf_counter()
        resident = self.find(job.adapter_id)
        adapter, brought = resident.adapter, resident.shared.brought
        if isinstance(adapter, ShardedAdapter):
            brought = adapter.shard_flat(brought)
        for shard, grad in brought.items():
            resident.gather(shard, grad)
        resident.shared = SharedGradients()
        size_bytes = sum(grad.nbytes for grad in brought.values())
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def _run(self, tasks: Sequence[TrainTask]) -> Gathered:
        """All passes; when the memory of a rank runs out, once more in pieces an eighth the size.

        Others may train between two passes (`after_pass`), so what is gathered here is nobody
        else's until it is settled.
        """
        reason = ""
        try:
            for config in (self.config, self._frugal):
                run = partial(self.passes.run, tasks, config)
                gathered, reason = self.group.attempt(run, partial(self.passes.forget, tasks))
                if gathered is not None:
                    return gathered
        except RuntimeError as exc:
            if self.group.size > 1:
                raise  # the ranks may stand at different points: the group ends
            # Torch's own faults are RuntimeErrors too. No job has been committed yet, so every
            # adapter is as it was.
            self.passes.forget(tasks)
            return _given_up(tasks, str(exc), for_memory=False)
        return _given_up(tasks, reason, for_memory=True)

    @property
    def _frugal(self) -> TrainerConfig:
        """Pieces an eighth the size, for another try with less memory."""
        return replace(
            self.config,
            max_tokens=max(1, self.config.max_tokens // 8),
            head_rows=max(1, self.config.head_rows // 8),
            activation_bytes=1,
        )

    def _settle(self, tasks: Mapping[int, TrainTask], gathered: Gathered) -> list[int]:
        """Commit the gradients of adapters whose jobs all succeeded; returns jobs to run again."""
        again: list[int] = []
        ops = self.decoder.ops
        for task in tasks.values():
            task.error = task.error or divergence(task)
        for adapter_id in dict.fromkeys(task.job.adapter_id for task in tasks.values()):
            resident = self.adapters[adapter_id]
            mine = {i: task for i, task in tasks.items() if task.job.adapter_id == adapter_id}
            good = [index for index, task in mine.items() if task.error is None]
            adapter = resident.adapter
            new = {
                shard: adapter.share(grad)
                for (owner, shard), grad in gathered.items()
                if owner == adapter_id
            }
            finite = all(math.isfinite(adapter.norm(grad, ops)) for grad in new.values())
            if len(good) == len(mine) and finite:
                for shard, grad in new.items():
                    resident.gather(shard, grad)
            elif len(mine) > 1:
                again += good
            else:
                for index in good:
                    mine[index].error = InvalidInputError(DIVERGED.format(what="gradient is"))
        return again


def _given_up(tasks: Sequence[TrainTask], why: str, *, for_memory: bool) -> Gathered:
    """All tasks have failed, with numbers and advice."""
    num_tokens = sum(task.num_tokens for task in tasks)
    advice = f". The pass held {num_tokens} tokens; send fewer or shorter datums at a time"
    for task in tasks:
        task.error = EngineError(f"the training pass failed: {why}{advice if for_memory else ''}")
    return {}
