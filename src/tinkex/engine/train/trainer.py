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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tinkex.contract import traced
from tinkex.contract.optimizers import check_params
from tinkex.contract.routing import NOT_RECORDED
from tinkex.engine.checkpoint import reader, writer
from tinkex.engine.collectives.group import made_on_every_rank, on_every_rank
from tinkex.engine.exchange import gradient_file
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
from tinkex.engine.lora.adapter import KINDS, Adapter, AdapterSpan, Kind, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.numerics.memory_in_use import is_out_of_memory
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.numerics.row_filling import exactly
from tinkex.engine.optim.optimizer import OptimizerState, apply_step, scratch_bytes
from tinkex.engine.optim.resident import ResidentAdapter, SharedGradients, shortage_for
from tinkex.engine.train.data import Limits
from tinkex.engine.train.graph_cost import LossSeconds
from tinkex.engine.train.losses import Prepared
from tinkex.engine.train.packing import Item, Pass, pack, pack_pieces
from tinkex.engine.train.scoring import score
from tinkex.engine.train.sharded_adapter import AdapterShards, ShardedAdapter
from tinkex.engine.train.tasks import DIVERGED, TrainTask, check_job, collect, divergence, runs_of
from tinkex.errors import (
    ConfigError,
    EngineError,
    InvalidInputError,
    ModelNotFoundError,
    TinkerError,
)

JobError = TinkerError
"""What `train` answers for a job that failed: an `EngineError` is ours, all others the caller's."""
Gathered = dict[tuple[str, int], Tensor]
"""Gradients by adapter and virtual shard, until they are settled."""
TURN_S = 0.05
"""How long traced losses of a pass may take before others get a turn."""
_PIECE = 4096
"""Tokens of a virtual shard whose gradients are added up in one product, in deterministic mode. A
constant: another number gives other bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    max_tokens: int = 2048
    """Most tokens in one pass; longer batches are split, longer datums go alone."""
    head_rows: int = 256
    """Rows whose logits exist at the same time."""
    activation_bytes: int = 3 << 29
    """What a pass may keep for its backward; what does not fit is computed again there."""
    loss_datum_s: float = traced.DATUM_S
    """Most seconds on the traced loss of one datum, looked at between its steps."""
    loss_job_s: float = traced.REQUEST_S
    """Most seconds on the traced loss of a whole job."""
    deterministic: bool = False
    """A shard's bits never depend on what else is in the batch: where the decoder cannot promise it
    for a packed pass, each datum gets one of its own."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "head_rows", "activation_bytes"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"trainer.{name} must be at least 1, got {value}")
        for name in ("loss_datum_s", "loss_job_s"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"trainer.{name} must be above 0, got {value}")

    @staticmethod
    def for_device(ops: Ops, *, deterministic: bool = False) -> TrainerConfig:
        """Defaults that fit a device: a GPU takes larger passes and half of what it has free."""
        if not ops.large_passes:
            return TrainerConfig(deterministic=deterministic)
        return TrainerConfig(
            max_tokens=16384,
            head_rows=2048,
            activation_bytes=ops.free_bytes() // 2,
            deterministic=deterministic,
        )


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
        self._after_pass = after_pass
        # In a group adapters are made whole on the host, and then sharded.
        self._made_on = decoder.device if group.size == 1 else torch.device("cpu")
        self._turn_given_at = 0.0
        self._away_s = 0.0  # that others had in the middle of passes

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

    @on_every_rank
    def load(self, job: LoadAdapterJob) -> str:
        """Put a checkpoint into an adapter, creating it when it is absent; gives its digest."""
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
        return stored.content

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

    @made_on_every_rank
    def snapshot(self, adapter_id: str) -> Adapter:
        """The weights as they are now, for sampling while training goes on."""
        return self.find(adapter_id).adapter.frozen_copy()

    @made_on_every_rank
    def read_snapshot(self, folder: str) -> Adapter:
        """The weights in a folder, for sampling."""
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
                    task.budget.give_turn = self._give_turn
            except TinkerError as error:
                answers[index] = error
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
        """Put what was gathered here aside, in memory or in a file."""
        began = time.perf_counter()
        resident = self.find(job.adapter_id)
        if resident.grads or resident.shared.file:  # else a meeting failed, and they are there yet
            resident.shared, resident.grads = SharedGradients(resident.grads), {}
        shared, size_bytes = resident.shared, 0
        if job.file is not None:
            size_bytes = self._write_gradients(job.file, resident.adapter, shared.shards)
            shared.file = job.file
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    @on_every_rank
    def add_gradient(self, job: AddGradientJob) -> GradientResult:
        """Add what came together: file by file, or the sum that a meeting made."""
        began = time.perf_counter()
        resident = self.find(job.adapter_id)
        size_bytes = 0
        if job.reduced and resident.shared.total is not None:
            resident.gather(0, resident.shared.total)
        for file in job.files:
            # Those that were written here are here still.
            is_mine = file == resident.shared.file
            read = (
                resident.shared.shards if is_mine else self._read_gradients(file, resident.adapter)
            )
            for shard, grad in read.items():
                resident.gather(shard, grad)
                size_bytes += grad.nbytes
        resident.shared = SharedGradients()
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def _write_gradients(self, file: str, adapter: Adapter, grads: Mapping[int, Tensor]) -> int:
        if isinstance(adapter, ShardedAdapter):
            # Several groups may share an adapter: their files hold whole gradients.
            joined = {shard: adapter.join(grad) for shard, grad in grads.items()}
            if not self.group.leads:
                return 0
            parts = {
                f"{shard}.{at}": tensor.numpy()
                for shard, tensors in joined.items()
                for at, tensor in enumerate(tensors)
            }
            return gradient_file.write(file, parts)
        arrays = {str(shard): grad.cpu().numpy() for shard, grad in grads.items()}
        return gradient_file.write(file, arrays)

    def _read_gradients(self, file: str, adapter: Adapter) -> dict[int, Tensor]:
        """By shard, in the adapter's layout."""
        if isinstance(adapter, ShardedAdapter):
            return self._read_sharded(file, adapter)
        grads = {
            int(shard): torch.from_numpy(array).to(self.decoder.device)
            for shard, array in gradient_file.read(file).items()
        }
        for grad in grads.values():
            if grad.shape != adapter.flat.shape:
                raise EngineError(f"gradients of shape {grad.shape} do not fit the adapter")
        return grads

    def _read_sharded(self, file: str, adapter: ShardedAdapter) -> dict[int, Tensor]:
        shards: dict[int, dict[int, Tensor]] = {}
        for name, array in gradient_file.read(file).items():
            shard, at = map(int, name.split("."))
            shards.setdefault(shard, {})[at] = torch.from_numpy(array)
        grads: dict[int, Tensor] = {}
        for shard, tensors in shards.items():
            whole = [tensors[at] for at in range(len(tensors))]
            if [tuple(t.shape) for t in whole] != adapter.shards.shapes:
                raise EngineError("gradients of another adapter do not fit this one")
            grads[shard] = adapter.fold_whole(whole)
        return grads

    def _run(self, tasks: Sequence[TrainTask]) -> Gathered:
        """All passes; when the memory of a rank runs out, once more in pieces an eighth the size.

        Others may train between two passes (`after_pass`), so what is gathered here is nobody
        else's until it is settled.
        """
        reason = ""
        try:
            for config in (self.config, self._frugal):
                run = partial(self._run_passes, tasks, config)
                gathered, reason = self.group.attempt(run, partial(self._forget_passes, tasks))
                if gathered is not None:
                    return gathered
        except RuntimeError as exc:
            if self.group.size > 1:
                raise  # the ranks may stand at different points: the group ends
            # Torch's own faults are RuntimeErrors too. No job has been committed yet, so every
            # adapter is as it was.
            self._forget_passes(tasks)
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

    def _forget_passes(self, tasks: Sequence[TrainTask]) -> None:
        for task in tasks:
            task.restart()
            resident = self.adapters[task.job.adapter_id]
            for adapter in (resident.adapter, *resident.twins.values()):
                adapter.drop_grad()
        self.decoder.ops.empty_cache()

    def _run_passes(self, tasks: Sequence[TrainTask], config: TrainerConfig) -> Gathered:
        gathered: Gathered = {}
        owners = list(dict.fromkeys(task.job.adapter_id for task in tasks))
        shards = [task.shards if config.deterministic else () for task in tasks]
        items = [
            Item(
                owners.index(task.job.adapter_id),
                j,
                d,
                len(datum.tokens_T),
                task.needs_backward(datum),
                shards[j][d] if shards[j] else 0,
            )
            for j, task in enumerate(tasks)
            for d, datum in enumerate(task.data)
        ]
        for batch in self._batches(items, config):
            used: dict[tuple[str, int], Adapter] = {}
            for one in batch:
                began = self._turn_given_at = time.perf_counter()
                away_s = self._away_s
                with exactly(config.deterministic and self.decoder.ops.fills_rows):
                    self._run_pass(one, tasks, owners, config)
                took_s = time.perf_counter() - began - (self._away_s - away_s)
                seconds_per_token = took_s / one.num_tokens
                for item in one.items:
                    tasks[item.job].seconds += seconds_per_token * item.length
                    owner = owners[item.owner]
                    used[owner, item.shard] = self._gatherer(owner, item.shard)
                self._let_others()
            for (owner, shard), adapter in used.items():
                if adapter.grad is not None:
                    gathered[owner, shard] = adapter.grad
                    adapter.drop_grad()
        return gathered

    def _give_turn(self) -> None:
        """Let others use the device in the middle of a pass whose traced losses take long.

        The pass stays as it was packed, so its bits do. What others do is theirs: the adapters of
        the pass are in use, and products of theirs are filled up or not as they ask for. A turn may
        come in the middle of a backward, where autograd keeps no graphs. In a group nothing comes
        between: the ranks would not do it at one point.
        """
        if self.group.size > 1:
            return
        began = time.perf_counter()
        if began - self._turn_given_at < TURN_S:
            return
        with exactly(False), torch.enable_grad():
            self._let_others()
        self._turn_given_at = time.perf_counter()
        self._away_s += self._turn_given_at - began

    def _let_others(self) -> None:
        """Let others use the device between two passes; their failures are not the pass's."""
        with self.group.recoverable(False):
            self._after_pass()

    def _batches(self, items: Sequence[Item], config: TrainerConfig) -> Iterator[list[Pass]]:
        """The passes, in batches between which no gradient has to wait for another.

        Shards whose bits are their own in any company go side by side; else one after the other.
        """
        if not config.deterministic:
            yield pack(items, max_tokens=config.max_tokens)
        elif self.decoder.batch_invariant:
            together = config.max_tokens if self.decoder.keeps_pieces_apart else 0
            yield pack_pieces(items, piece_tokens=_PIECE, max_tokens=together)
        else:
            for shard in sorted({item.shard for item in items}):
                mine = [item for item in items if item.shard == shard]
                yield pack(mine, max_tokens=config.max_tokens, alone=True)

    def _gatherer(self, owner: str, shard: int) -> Adapter:
        """The adapter, or its twin, that a shard's gradients go to in this pass."""
        resident = self.adapters[owner]
        return resident.twin(shard) if self.decoder.batch_invariant else resident.adapter

    def _run_pass(
        self, one: Pass, tasks: Sequence[TrainTask], owners: Sequence[str], config: TrainerConfig
    ) -> None:
        decoder, device = self.decoder, self.decoder.device
        exact = config.deterministic and decoder.ops.fills_rows
        data = [tasks[item.job].data[item.datum] for item in one.items]
        tokens_T = torch.cat([datum.tokens_T for datum in data]).to(device)
        positions_T = torch.cat([torch.arange(item.length) for item in one.items]).to(device)
        spans = [
            AdapterSpan(start, stop, self._gatherer(owners[owner], shard))
            for start, stop, owner, shard in one.spans()
        ]
        lora = LoraBatch(spans, apart=config.deterministic and decoder.keeps_pieces_apart)
        runs = list(runs_of(one, tasks, device))
        routing = _routing(decoder.config, data, device)
        with torch.set_grad_enabled(one.backward):
            hidden_TD = decoder.forward(
                tokens_T,
                positions_T,
                PackedCausal(one.bounds, decoder.config.windows, exact=exact),
                lora,
                room=config.activation_bytes,
                routing=routing,
            )
        if routing is not None and routing.chosen and decoder.config.experts is not None:
            for item, (start, stop) in zip(one.items, pairwise(one.bounds), strict=True):
                load = tasks[item.job].router_load
                load.add(routing, slice(start, stop), decoder.config.experts.count)
        if one.backward:
            # After the forward: on a GPU the host does this while the device computes.
            for span in lora.spans:
                span.adapter.start_grad(decoder.leaf_keys)
        dhidden_TD = score(
            decoder,
            hidden_TD,
            [run for run, _ in runs],
            lora,
            backward=one.backward,
            chunk_rows=config.head_rows,
            after_traced=self._give_turn,
        )
        if dhidden_TD is not None and hidden_TD.requires_grad:
            _Handed.apply(hidden_TD, dhidden_TD).backward()  # type: ignore[no-untyped-call]
        for run, items in runs:
            collect(run, items, tasks)
        self.group.finish()

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


class _Handed(torch.autograd.Function):
    """A number whose gradient with respect to `hidden` is `dhidden`.

    `hidden.backward(dhidden)` would do, but makes torch import sympy: seconds of a first step.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, dhidden_TD: Tensor) -> Tensor:
        ctx.save_for_backward(dhidden_TD)
        return hidden_TD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def _routing(config: ModelConfig, data: Sequence[Prepared], device: torch.device) -> Routing | None:
    """The record of a mixture's routers in a pass, with the experts that its datums prescribe."""
    if (experts := config.routing) is None:
        return None
    if all(datum.experts_TLk is None for datum in data):
        return Routing()
    free = torch.tensor(NOT_RECORDED, dtype=torch.int16)
    shape = experts.layers, experts.per_token
    rows = [
        free.expand(len(datum.tokens_T), *shape) if datum.experts_TLk is None else datum.experts_TLk
        for datum in data
    ]
    given_LTk = torch.cat(rows).transpose(0, 1).contiguous().to(device)
    return Routing(dict(zip(config.expert_layers, given_LTk, strict=True)))
