"""Train many adapters over one frozen base model.

The trainer owns the resident adapters with their gradients and optimizer state. `train` takes jobs
of any number of adapters, checks each one before anything runs, packs all their datums into shared
passes and commits gradients only when a job has succeeded as a whole: a job that fails, whether
refused or diverged, leaves no trace and never touches its neighbours. Queues, threads and sampling
belong to the engine around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import checkpoint
from tinkex.engine.attention import PackedCausal
from tinkex.engine.decoder import DecoderLike
from tinkex.engine.graph import build_loss, reduce_metrics
from tinkex.engine.jobs import (
    Array,
    CreateAdapterJob,
    LoadAdapterJob,
    LoraSpec,
    OptimJob,
    OptimResult,
    SaveAdapterJob,
    TrainJob,
    TrainResult,
)
from tinkex.engine.lora import Adapter, Kind, LoraBatch, Span, fresh_adapter
from tinkex.engine.losses import (
    GAP_INPUTS,
    Gap,
    Loss,
    Prepared,
    check_settings,
    find_loss,
    gap_metrics,
    loss_values,
    prepare,
    prepare_custom,
)
from tinkex.engine.optim import OptimizerKind, OptimizerState, apply_step, check_params, global_norm
from tinkex.engine.packing import Item, Pass, pack
from tinkex.engine.scoring import Evaluate, Run, score
from tinkex.errors import (
    ConfigError,
    EngineError,
    InvalidInputError,
    ModelNotFoundError,
    TinkerError,
)

JobError = TinkerError
"""What `train` answers for a job that failed: an `EngineError` is ours, all others the caller's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    max_tokens: int = 2048
    """Most tokens in one pass; longer batches are split, longer datums go alone."""
    head_rows: int = 256
    """Rows whose logits exist at the same time."""
    activation_bytes: int = 3 << 29
    """A pass that would keep more than this for its backward recomputes layers instead."""
    deterministic: bool = False
    """One datum per pass: bits never depend on what else is in the batch."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "head_rows", "activation_bytes"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"trainer.{name} must be at least 1, got {value}")

    @staticmethod
    def for_device(device: torch.device, *, deterministic: bool = False) -> TrainerConfig:
        """Defaults that fit a device: a GPU takes larger passes and half of what it has free."""
        if device.type != "cuda":
            return TrainerConfig(deterministic=deterministic)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return TrainerConfig(
            max_tokens=16384,
            head_rows=2048,
            activation_bytes=free_bytes // 2,
            deterministic=deterministic,
        )


@dataclass(slots=True)
class ResidentAdapter:
    """An adapter in memory, with everything that training it further needs."""

    adapter: Adapter
    spec: LoraSpec
    base_model: str
    optimizer: OptimizerState
    grad: Tensor | None = None
    """Gathered since the last step, in the adapter's layout."""
    version: int = 0
    """Counts changes of the weights."""


@dataclass(slots=True)
class _Task:
    """A checked job on its way through the passes."""

    job: TrainJob
    resident: ResidentAdapter
    data: list[Prepared]
    evaluate: Evaluate
    loss: Loss | None
    """None: a custom loss."""
    logprobs: list[Array | None]
    losses: list[Tensor]
    metrics: list[Mapping[str, float]]
    gaps: list[Gap]
    seconds: float = 0.0
    error: TinkerError | None = None

    def total_loss(self) -> float:
        return float(torch.stack(self.losses).sum()) if self.losses else 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_T) for datum in self.data)

    def needs_backward(self, datum: Prepared) -> bool:
        return self.job.backward and bool(datum.active_T.any())


class Trainer:
    """All adapters over one base model. Not thread-safe: one thread owns it."""

    def __init__(
        self, decoder: DecoderLike, *, base_model: str, config: TrainerConfig | None = None
    ) -> None:
        self.decoder = decoder
        self.base_model = base_model
        self.config = config or TrainerConfig.for_device(decoder.device)
        self.adapters: dict[str, ResidentAdapter] = {}

    # ------------------------------------------------------------------------------- adapters

    def create(self, job: CreateAdapterJob) -> None:
        """Make a fresh adapter. A second create of one id replaces the first."""
        spec = job.lora
        kinds: list[Kind] = []
        kinds += ["attn"] if spec.train_attn else []
        kinds += ["mlp"] if spec.train_mlp else []
        kinds += ["unembed"] if spec.train_unembed else []
        adapter = fresh_adapter(
            self.decoder.targets,
            rank=spec.rank,
            alpha=spec.alpha,
            kinds=kinds,
            seed=spec.seed,
            device=self.decoder.device,
        )
        optimizer = OptimizerState.fresh(job.optimizer, adapter)
        self.adapters[job.adapter_id] = ResidentAdapter(adapter, spec, job.base_model, optimizer)

    def load(self, job: LoadAdapterJob) -> None:
        """Put a checkpoint into an adapter, creating it when it is absent."""
        previous = self.adapters.get(job.adapter_id)
        stored = checkpoint.read(
            job.folder, self.decoder.targets, self.decoder.device, with_optimizer=job.with_optimizer
        )
        kind: OptimizerKind = stored.optimizer_kind or (
            previous.optimizer.kind if previous is not None else "adamw"
        )
        optimizer = stored.optimizer or OptimizerState.fresh(kind, stored.adapter)
        self.adapters[job.adapter_id] = ResidentAdapter(
            stored.adapter,
            stored.spec,
            job.base_model,
            optimizer,
            stored.grad,
            previous.version + 1 if previous is not None else 0,
        )

    def save(self, job: SaveAdapterJob) -> int:
        """Write a checkpoint folder; returns its size in bytes."""
        resident = self.find(job.adapter_id)
        return checkpoint.write(
            job.folder,
            resident.adapter,
            targets=self.decoder.targets,
            spec=resident.spec,
            base_model=resident.base_model,
            optimizer=resident.optimizer,
            with_optimizer=job.with_optimizer or job.with_gradients,
            grad=resident.grad,
            with_gradients=job.with_gradients,
        )

    def drop(self, adapter_id: str) -> None:
        self.adapters.pop(adapter_id, None)

    def find(self, adapter_id: str) -> ResidentAdapter:
        if (resident := self.adapters.get(adapter_id)) is None:
            loaded = ", ".join(map(repr, sorted(self.adapters))) or "none"
            raise ModelNotFoundError(f"No adapter {adapter_id!r} is loaded; loaded: {loaded}.")
        return resident

    # ------------------------------------------------------------------------------- training

    def train(self, jobs: Sequence[TrainJob]) -> list[TrainResult | JobError]:
        """Run jobs of one or many adapters in shared passes; answers in the order given.

        Gradients of a job are added to its adapter only when the whole job has succeeded.
        """
        results: list[TrainResult | JobError | None] = [None] * len(jobs)
        tasks: dict[int, _Task] = {}
        for index, job in enumerate(jobs):
            try:
                tasks[index] = self._check(job)
            except TinkerError as error:
                results[index] = error
        try:
            self._run_passes(list(tasks.values()))
        except (RuntimeError, MemoryError) as exc:
            # Torch reports both missing memory and its own faults this way; gradients of the
            # unfinished passes are dropped below, so every adapter is as it was.
            for task in tasks.values():
                task.error = EngineError(f"the training pass failed: {exc}")
        for index in self._settle(tasks):
            # Another job of the same adapter failed and their gradients are mixed: run it alone.
            results[index] = self.train([jobs[index]])[0]
        for index, task in tasks.items():
            if results[index] is None:
                results[index] = task.error or _result(task)
        return [result for result in results if result is not None]

    def optim(self, job: OptimJob) -> OptimResult:
        """Apply the gathered gradients and clear them."""
        resident = self.find(job.adapter_id)
        check_params(resident.optimizer.kind, job.params)
        began = time.perf_counter()
        grad = resident.grad
        if grad is None:
            grad = torch.zeros_like(resident.adapter.flat)
        norm = apply_step(resident.adapter, resident.optimizer, grad, job.params)
        resident.grad = None
        resident.version += 1
        metrics = {
            "grad_norm:mean": norm,
            "step:max": float(resident.optimizer.step),
            "optim_time_s:sum": time.perf_counter() - began,
        }
        return OptimResult(metrics=metrics)

    def _check(self, job: TrainJob) -> _Task:
        """Everything that can be wrong with a job, found before any state changes."""
        resident = self.find(job.adapter_id)
        if not job.data:
            raise InvalidInputError("must hold at least one datum", path="data")
        limits = {
            "vocab_size": self.decoder.config.vocab_size,
            "max_length": self.decoder.config.max_context_length,
        }
        names = [f"data[{index}]" for index in range(len(job.data))]
        data: list[Prepared]
        loss: Loss | None = None
        if job.loss_fn == "custom":
            if (custom := job.custom_loss) is None:
                raise InvalidInputError("loss 'custom' came without its graph", path="loss_fn")
            evaluate: Evaluate = partial(_evaluate_custom, build_loss(custom))
            data = [
                prepare_custom(datum, custom, path=path, **limits)
                for datum, path in zip(job.data, names, strict=True)
            ]
        else:
            loss = find_loss(job.loss_fn)
            settings = check_settings(job.loss_fn, loss, job.loss_fn_config)
            evaluate = partial(_evaluate_loss, loss, settings)
            data = [
                prepare(datum, loss, path=path, **limits)
                for datum, path in zip(job.data, names, strict=True)
            ]
        return _Task(job, resident, data, evaluate, loss, [None] * len(data), [], [], [])

    def _run_passes(self, tasks: Sequence[_Task]) -> None:
        owners = list({id(task.resident): task.resident for task in tasks}.values())
        place = {id(resident): index for index, resident in enumerate(owners)}
        items = [
            Item(place[id(task.resident)], j, d, len(datum.tokens_T), task.needs_backward(datum))
            for j, task in enumerate(tasks)
            for d, datum in enumerate(task.data)
        ]
        config = self.config
        for one in pack(items, max_tokens=config.max_tokens, deterministic=config.deterministic):
            began = time.perf_counter()
            self._run_pass(one, tasks, [resident.adapter for resident in owners])
            seconds_per_token = (time.perf_counter() - began) / one.num_tokens
            for item in one.items:
                tasks[item.job].seconds += seconds_per_token * item.length

    def _run_pass(self, one: Pass, tasks: Sequence[_Task], adapters: Sequence[Adapter]) -> None:
        decoder, device = self.decoder, self.decoder.device
        bounds = one.bounds
        data = [tasks[item.job].data[item.datum] for item in one.items]
        tokens_T = torch.cat([datum.tokens_T for datum in data]).to(device)
        positions_T = torch.cat([torch.arange(item.length) for item in one.items]).to(device)
        lora = LoraBatch(Span(a, b, adapters[owner]) for a, b, owner in one.owner_spans())
        runs = list(_runs(one, tasks, device))
        with torch.set_grad_enabled(one.backward):
            hidden_TD = decoder.forward(
                tokens_T,
                positions_T,
                PackedCausal(bounds, decoder.config.windows),
                lora,
                recompute=one.backward and self._must_recompute(one.num_tokens),
            )
        if one.backward:
            for span in lora.spans:
                span.adapter.start_grad()
        dhidden_TD = score(
            decoder,
            hidden_TD,
            [run for run, _ in runs],
            lora,
            backward=one.backward,
            chunk_rows=self.config.head_rows,
        )
        if dhidden_TD is not None and hidden_TD.requires_grad:
            hidden_TD.backward(dhidden_TD)
        for run, items in runs:
            _collect(run, items, tasks)

    def _must_recompute(self, num_tokens: int) -> bool:
        config = self.decoder.config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        attended = (1 + config.qk_norm) * config.num_heads * config.head_size
        per_layer = 2 * config.hidden_size + qkv + attended + 2 * config.mlp_size
        size = self.decoder.dtype.itemsize
        kept_bytes = num_tokens * config.num_layers * per_layer * size
        return kept_bytes > self.config.activation_bytes

    def _settle(self, tasks: Mapping[int, _Task]) -> list[int]:
        """Commit the gradients of adapters whose jobs all succeeded; returns jobs to run again."""
        again: list[int] = []
        for task in tasks.values():
            task.error = task.error or _non_finite_loss(task)
        for resident in {id(task.resident): task.resident for task in tasks.values()}.values():
            mine = {index: task for index, task in tasks.items() if task.resident is resident}
            good = [index for index, task in mine.items() if task.error is None]
            if len(good) == len(mine) and _finite(resident.adapter.grad):
                _commit(resident)
            elif len(mine) > 1:
                again += good
            else:
                for index in good:
                    mine[index].error = InvalidInputError(_DIVERGED.format(what="gradient"))
            resident.adapter.drop_grad()
        return again


_DIVERGED = (
    "the {what} is not finite: the adapter has diverged or an input is extreme. Lower the learning "
    "rate, or load an earlier checkpoint. Nothing was changed."
)


# ------------------------------------------------------------------------------ losses and results


def _evaluate_loss(
    loss: Loss, settings: Mapping[str, float], logprobs: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return loss_values(loss, logprobs, inputs, settings).double().sum(), {}


def _evaluate_custom(
    function: Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]],
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return function({"logprobs": logprobs, **inputs})


def _runs(
    one: Pass, tasks: Sequence[_Task], device: torch.device
) -> Iterator[tuple[Run, list[Item]]]:
    """Cut a pass into runs: datums of one job side by side, or single datums of other losses."""
    placed = list(zip(one.items, pairwise(one.bounds), strict=True))

    def key(entry: tuple[Item, tuple[int, int]]) -> tuple[Any, ...]:
        item, _ = entry
        task = tasks[item.job]
        alone = task.loss is None or not task.loss.token_local
        datum = task.data[item.datum]
        return item.job, item.datum if alone else -1, datum.targets.shape[1:], sorted(datum.inputs)

    for _, group in groupby(placed, key):
        entries = list(group)
        task = tasks[entries[0][0].job]
        data = [task.data[item.datum] for item, _ in entries]
        run = Run(
            start=entries[0][1][0],
            stop=entries[-1][1][1],
            targets=torch.cat([datum.targets for datum in data]).to(device),
            inputs={
                name: torch.cat([datum.inputs[name] for datum in data]).to(device)
                if len(data) > 1
                else data[0].inputs[name].to(device)
                for name in data[0].inputs
            },
            active=torch.cat([datum.active_T for datum in data]).numpy(),
            evaluate=task.evaluate,
            token_local=task.loss is not None and task.loss.token_local,
        )
        yield run, [item for item, _ in entries]


def _collect(run: Run, items: Sequence[Item], tasks: Sequence[_Task]) -> None:
    """Hand a run's logprobs and loss back to the job it came from."""
    task = tasks[items[0].job]
    logprobs = run.logprobs.cpu()  # one copy for all datums of the run
    pieces = logprobs.split([item.length for item in items])
    for item, piece in zip(items, pieces, strict=True):
        task.logprobs[item.datum] = piece.numpy()
    task.losses += run.losses
    task.error = task.error or run.error
    if run.metrics:
        task.metrics.append({name: float(value) for name, value in run.metrics.items()})
    if task.loss is not None:
        inputs = {name: value.cpu() for name, value in run.inputs.items() if name in GAP_INPUTS}
        if (gap := gap_metrics(logprobs, inputs)) is not None:
            task.gaps.append(gap)


def _non_finite_loss(task: _Task) -> TinkerError | None:
    for index, logprobs in enumerate(task.logprobs):
        if logprobs is None or not np.isfinite(logprobs).all():
            what = f"logprobs of data[{index}]"
            return InvalidInputError(_DIVERGED.format(what=what).replace("is not", "are not", 1))
    if not math.isfinite(task.total_loss()):
        return InvalidInputError(_DIVERGED.format(what="loss"))
    return None


def _result(task: _Task) -> TrainResult:
    outputs = tuple({"logprobs": logprobs} for logprobs in task.logprobs if logprobs is not None)
    metrics = {
        "loss:sum": task.total_loss(),
        "num_tokens:sum": float(task.num_tokens),
        "num_active_tokens:sum": float(sum(int(datum.active_T.sum()) for datum in task.data)),
        "train_time_s:sum": task.seconds,
        **_gap_summary(task.gaps),
        **(reduce_metrics(task.metrics) if task.metrics else {}),
    }
    return TrainResult(outputs=outputs, metrics=metrics, num_tokens=task.num_tokens)


def _gap_summary(gaps: Sequence[Gap]) -> dict[str, float]:
    """Trainer against sampler, over the tokens that a sampler produced."""
    count = sum(gap.num_tokens for gap in gaps)
    if not count:
        return {}
    return {
        "sampler_gap_mean:mean": sum(gap.sum_abs for gap in gaps) / count,
        "sampler_gap_max:max": max(gap.max_abs for gap in gaps),
        "sampler_gap_k3:mean": sum(gap.sum_k3 for gap in gaps) / count,
    }


# --------------------------------------------------------------------------------------- gradients


def _finite(grad: Tensor | None) -> bool:
    return grad is None or math.isfinite(global_norm(grad))


def _commit(resident: ResidentAdapter) -> None:
    """Add what the passes left to the adapter's gathered gradients."""
    new = resident.adapter.grad
    if new is not None:
        resident.grad = new if resident.grad is None else resident.grad.add_(new)
