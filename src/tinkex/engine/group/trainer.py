"""The trainer and the sampler of one member of a group.

All members get the same calls in the same order (`calls`), so each packs the same passes, draws the
same tokens and takes the same steps. What is cut is only seen here: an adapter is made or read
whole and cut, and joined when the leader writes it. Files are those of a single device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinkex.engine.checkpoint import reader as checkpoint
from tinkex.engine.exchange import gradient_file
from tinkex.engine.group.adapters import AdapterCut, CutAdapter
from tinkex.engine.group.decoder import GroupDecoder
from tinkex.engine.group.group import Group
from tinkex.engine.jobs import LoraSpec, SampleJob, SaveAdapterJob
from tinkex.engine.lora.adapter import Adapter, Kind
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.optim.resident import ResidentAdapter
from tinkex.engine.sample.sampler import Sampler, SamplerConfig
from tinkex.engine.sample.stopping import Detokenize
from tinkex.engine.train.packing import Pass
from tinkex.engine.train.tasks import TrainTask
from tinkex.engine.train.trainer import Gathered, Trainer, TrainerConfig, given_up
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
        self._made_on = torch.device("cpu")  # whole, and then cut

    @property
    def _loss_seconds(self) -> None:
        """No clock decides: members would not agree. Operations are counted by all alike."""
        return None

    def _give_turn(self) -> None:
        """Nothing comes between in the middle of a pass: members would not do it at one time."""

    # --------------------------------------------------------------------------- whole and cut

    def _cut(self, whole: Adapter) -> CutAdapter:
        return AdapterCut(whole, self.decoder.targets, self.decoder.cut).cut(whole, self._group)

    def _fresh(self, spec: LoraSpec, kinds: Sequence[Kind]) -> Adapter:
        assert spec.seed is not None, "members would draw different adapters"
        return self._cut(super()._fresh(spec, kinds))

    def _read(self, folder: str, *, with_optimizer: bool) -> checkpoint.Stored:
        stored = super()._read(folder, with_optimizer=with_optimizer)
        whole, adapter = stored.adapter, self._cut(stored.adapter)

        def cut(flat: Tensor) -> Tensor:
            return adapter.fold_whole(whole.views(flat))

        if (optimizer := stored.optimizer) is not None:
            moments = {name: cut(flat) for name, flat in optimizer.moments.items()}
            optimizer = replace(optimizer, moments=moments)
        grads = {shard: cut(flat) for shard, flat in stored.grads.items()}
        return replace(stored, adapter=adapter, optimizer=optimizer, grads=grads)

    def capture(self, job: SaveAdapterJob) -> checkpoint.Image:
        whole = self.join(job)
        assert whole is not None, "only the leader writes"
        return self._image(whole, job)

    def join(self, job: SaveAdapterJob) -> ResidentAdapter | None:
        """What a save needs of the whole state, as it is now, for the leader."""
        resident = self.find(job.adapter_id)
        adapter, optimizer = resident.adapter, resident.optimizer
        assert isinstance(adapter, CutAdapter)
        with_optimizer = job.with_optimizer or job.with_gradients
        tensors = adapter.join(adapter.flat)
        moments = {n: adapter.join(m) for n, m in optimizer.moments.items() if with_optimizer}
        grads = {s: adapter.join(g) for s, g in resident.grads.items() if job.with_gradients}
        if not self._group.leads:
            return None
        whole = adapter.cut.rebuilt(tensors)
        return ResidentAdapter(
            whole,
            resident.spec,
            resident.base_model,
            replace(optimizer, moments={n: whole.fold(m) for n, m in moments.items()}),
            {shard: whole.fold(grad) for shard, grad in grads.items()},
        )

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
    # Several groups may share an adapter: their files hold whole gradients.

    def _write_gradients(self, file: str, adapter: Adapter, grads: Mapping[int, Tensor]) -> int:
        assert isinstance(adapter, CutAdapter)
        joined = {shard: adapter.join(grad) for shard, grad in grads.items()}
        if not self._group.leads:
            return 0
        arrays = {
            f"{shard}.{at}": tensor.numpy()
            for shard, tensors in joined.items()
            for at, tensor in enumerate(tensors)
        }
        return gradient_file.write(file, arrays)

    def _read_gradients(self, file: str, adapter: Adapter) -> dict[int, Tensor]:
        assert isinstance(adapter, CutAdapter)
        shards: dict[int, dict[int, Tensor]] = {}
        for name, array in gradient_file.read(file).items():
            shard, at = map(int, name.split("."))
            shards.setdefault(shard, {})[at] = torch.from_numpy(array)
        grads: dict[int, Tensor] = {}
        for shard, tensors in shards.items():
            whole = [tensors[at] for at in range(len(tensors))]
            if [tuple(t.shape) for t in whole] != adapter.cut.shapes:
                raise EngineError("gradients of another adapter do not fit this one")
            grads[shard] = adapter.fold_whole(whole)
        return grads


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
