"""The trainer and the sampler of one member of a group.

All members get the same calls in the same order (`calls`), so each packs the same passes, draws the
same tokens and takes the same steps. What is cut is only seen here: an adapter is made or read
whole and cut, and joined when the leader writes it. Files are those of a single device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinkex.engine import checkpoint
from tinkex.engine.exchange import gradient_file
from tinkex.engine.fingerprint import Base
from tinkex.engine.group.adapters import AdapterCut, CutAdapter
from tinkex.engine.group.decoder import GroupDecoder
from tinkex.engine.group.group import Group
from tinkex.engine.jobs import (
    AddGradientJob,
    GradientResult,
    LoraSpec,
    SampleJob,
    SaveAdapterJob,
    ShareGradientJob,
)
from tinkex.engine.lora.adapter import Adapter, Kind, fresh_adapter
from tinkex.engine.sample.sampler import Sampler, SamplerConfig
from tinkex.engine.sample.stopping import Detokenize
from tinkex.engine.train.optim import OptimizerState
from tinkex.engine.train.packing import Pass
from tinkex.engine.train.tasks import TrainTask
from tinkex.engine.train.trainer import (
    Gathered,
    Trainer,
    TrainerConfig,
    given_up,
)
from tinkex.errors import EngineError


class GroupTrainer(Trainer):
    decoder: GroupDecoder

    def __init__(
        self,
        decoder: GroupDecoder,
        *,
        base_model: str,
        config: TrainerConfig | None = None,
        after_pass: Callable[[], None] = lambda: None,
        base: Base | None = None,
    ) -> None:
        group = decoder.group
        config = config or TrainerConfig.for_device(group.device, deterministic=group.exact)
        # All recompute, or nobody does.
        config = replace(config, activation_bytes=group.least(config.activation_bytes))

        def strictly() -> None:
            with group.forgiving(False):  # what is done between two passes has rules of its own
                after_pass()

        super().__init__(
            decoder, base_model=base_model, config=config, after_pass=strictly, base=base
        )
        self._group = group

    # --------------------------------------------------------------------------- whole and cut

    def _cut(self, whole: Adapter) -> CutAdapter:
        return AdapterCut(whole, self.decoder.targets, self.decoder.cut).cut(whole, self._group)

    def _fresh(self, spec: LoraSpec, kinds: Sequence[Kind]) -> Adapter:
        assert spec.seed is not None, "members would draw different adapters"
        whole = fresh_adapter(
            self.decoder.targets,
            rank=spec.rank,
            alpha=spec.alpha,
            kinds=kinds,
            seed=spec.seed,
            device="cpu",
        )
        return self._cut(whole)

    def _read(self, folder: str, *, with_optimizer: bool) -> checkpoint.Stored:
        stored = checkpoint.read(
            folder, self.decoder.targets, "cpu", with_optimizer=with_optimizer, base=self.base
        )
        whole, adapter = stored.adapter, self._cut(stored.adapter)

        def cut(flat: Tensor) -> Tensor:
            return adapter.fold_whole(whole.views(flat))

        optimizer = stored.optimizer
        if optimizer is not None:
            moments = {name: cut(flat) for name, flat in optimizer.moments.items()}
            optimizer = OptimizerState(optimizer.kind, optimizer.step, moments)
        grads = {shard: cut(flat) for shard, flat in stored.grads.items()}
        return checkpoint.Stored(adapter, stored.spec, stored.optimizer_kind, optimizer, grads)

    def capture(self, job: SaveAdapterJob) -> checkpoint.Image:
        image = self.join(job)
        assert image is not None, "only the leader writes"
        return image

    def join(self, job: SaveAdapterJob) -> checkpoint.Image | None:
        """The whole state, as it is now, for the leader."""
        resident = self.find(job.adapter_id)
        adapter, optimizer = self._of(job.adapter_id), resident.optimizer
        with_optimizer = job.with_optimizer or job.with_gradients
        tensors = adapter.join(adapter.flat)
        moments = {n: adapter.join(m) for n, m in optimizer.moments.items() if with_optimizer}
        grads = {s: adapter.join(g) for s, g in resident.grads.items() if job.with_gradients}
        if not self._group.leads:
            return None
        whole = adapter.cut.rebuilt(tensors)
        return checkpoint.capture(
            whole,
            targets=self.decoder.targets,
            spec=resident.spec,
            base_model=resident.base_model,
            base=self.base,
            optimizer=OptimizerState(
                optimizer.kind, optimizer.step, {n: whole.fold(m) for n, m in moments.items()}
            ),
            with_optimizer=with_optimizer,
            grads={shard: whole.fold(grad) for shard, grad in grads.items()},
            with_gradients=job.with_gradients,
        )

    def _of(self, adapter_id: str) -> CutAdapter:
        adapter = self.find(adapter_id).adapter
        assert isinstance(adapter, CutAdapter)
        return adapter

    def _run(self, tasks: Sequence[TrainTask]) -> Gathered:
        """All passes; when the memory of one member runs out, all try once more in small pieces."""
        trouble = ""
        for config in (self.config, self._frugal):
            run = partial(self._run_passes, tasks, config)
            gathered, trouble = self._group.attempt(run, partial(self._forget_passes, tasks))
            if gathered is not None:
                return gathered
        return given_up(tasks, trouble, for_memory=True)

    def _agree_on(self, trouble: str) -> str:
        return self._group.any_trouble(trouble)

    def _run_pass(
        self, one: Pass, tasks: Sequence[TrainTask], owners: Sequence[str], config: TrainerConfig
    ) -> None:
        super()._run_pass(one, tasks, owners, config)
        self._group.finish()

    # ------------------------------------------------------------------------ gradients as files

    def share_gradient(self, job: ShareGradientJob) -> GradientResult:
        """Several groups may share an adapter: their files hold whole gradients."""
        assert job.file is not None, "a group meets nobody"
        began = time.perf_counter()
        resident, adapter = self.find(job.adapter_id), self._of(job.adapter_id)
        joined = {shard: adapter.join(grad) for shard, grad in resident.grads.items()}
        resident.grads.clear()
        size_bytes = 0
        if self._group.leads:
            arrays = {
                f"{shard}.{at}": tensor.numpy()
                for shard, tensors in joined.items()
                for at, tensor in enumerate(tensors)
            }
            size_bytes = gradient_file.write(job.file, arrays)
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)

    def add_gradient(self, job: AddGradientJob) -> GradientResult:
        began = time.perf_counter()
        resident, adapter = self.find(job.adapter_id), self._of(job.adapter_id)
        size_bytes = 0
        for file in job.files:
            shards: dict[int, dict[int, Tensor]] = {}
            for name, array in gradient_file.read(file).items():
                shard, at = map(int, name.split("."))
                shards.setdefault(shard, {})[at] = torch.from_numpy(array)
                size_bytes += array.nbytes
            for shard, tensors in shards.items():
                whole = [tensors[at] for at in range(len(tensors))]
                if [tuple(t.shape) for t in whole] != adapter.cut.shapes:
                    raise EngineError("gradients of another adapter do not fit this one")
                resident.gather(shard, adapter.fold_whole(whole))
        return GradientResult(seconds=time.perf_counter() - began, size_bytes=size_bytes)


class GroupSampler(Sampler):
    decoder: GroupDecoder

    def __init__(
        self,
        decoder: GroupDecoder,
        config: SamplerConfig | None = None,
        detokenizer: Callable[[], Detokenize] | None = None,
    ) -> None:
        group: Group = decoder.group
        config = config or SamplerConfig.for_device(group.device, deterministic=group.exact)
        # All have as many blocks as the one with the least memory.
        config = replace(config, kv_bytes=group.least(config.kv_bytes))
        super().__init__(decoder, config, detokenizer)

    def follow(self, job: SampleJob, adapter: Adapter | None, version: str | None) -> None:
        """Queue a job of which only the leader tells."""
        self.add(job, adapter, lambda event: None, version)

    def _pack_weights(self) -> bool:
        """Passes have as many rows here as elsewhere: all have packed copies, or nobody counts on
        them."""
        return self.decoder.group.all_agree(super()._pack_weights())

    def _agree(self, drawn_2N: Tensor) -> Tensor:
        return self.decoder.group.same(drawn_2N)

    def _settle(self) -> None:
        self.decoder.group.finish()

    def _attempt(self, look_ahead: bool) -> tuple[int, str]:
        num_tokens, trouble = self.decoder.group.attempt(
            lambda: self._step(look_ahead), lambda: None
        )
        return num_tokens or 0, trouble
