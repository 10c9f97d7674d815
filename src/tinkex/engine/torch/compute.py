"""Compute with torch: base models, their trainers and samplers, and the weights to sample from.

Weights of a checkpoint folder never change; they are kept on the device by folder, the longest
unused forgotten, so that whoever samples from them does not wait for them to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tinkex.engine import jobs
from tinkex.engine.all_reduce.process_groups import ProcessGroups
from tinkex.engine.all_reduce.reduction import GradientReducer
from tinkex.engine.checkpoint import reader, writer
from tinkex.engine.checkpoint.snapshots import AdapterSnapshot, Snapshots, snapshot_room, version_of
from tinkex.engine.collectives.process_group import open_store
from tinkex.engine.device.backend import ops_for
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.loop.compute import Packing
from tinkex.engine.numerics.memory_in_use import give_back
from tinkex.engine.optim.resident import SharedGradients
from tinkex.engine.reports import safely
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.torch.bases import Bases, describe
from tinkex.engine.torch.config import EngineConfig


class TorchCompute:
    """See `loop.compute.Compute`."""

    def __init__(
        self, config: EngineConfig, heartbeat: Heartbeat, *, after_pass: Callable[[], None]
    ) -> None:
        self.device = config.torch_device()
        self._ops = ops = ops_for(self.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            ops.make_deterministic()
        # In deterministic mode the bits of a job must not depend on its company.
        self.shares_passes = not config.deterministic
        self.snapshots = Snapshots(config.snapshot_bytes or snapshot_room(ops))
        self.bases = Bases(
            config,
            self.device,
            heartbeat,
            after_pass=after_pass,
            on_forgotten=self.snapshots.forget_base,
        )
        # The leader of a group of devices has whole gradients on the host, and adds them up there.
        device = torch.device("cpu") if config.group else self.device
        join = partial(GradientReducer.join, device, self._shared_of)
        self._groups = ProcessGroups(join, open_store)

    def begin(self) -> None:
        self._ops.use_in_thread()

    def _shared_of(self, adapter_id: str) -> SharedGradients:
        return self.bases.trainer_of(adapter_id).find(adapter_id).shared

    def packing(self, adapter_id: str) -> Packing | None:
        base = self.bases.of(adapter_id)
        return None if base is None else Packing(base.name, base.trainer.config.max_tokens)

    def train(self, together: Sequence[jobs.TrainJob]) -> Sequence[jobs.TrainResult | Exception]:
        return self.bases.trainer_of(together[0].adapter_id).train(list(together))

    def run(self, job: jobs.Job, emit: jobs.Emit) -> jobs.Result | None:
        match job:
            case jobs.SampleJob():
                self._start_sample(job, emit)
                return None
            case jobs.CreateAdapterJob():
                return self._create(job, emit)
            case jobs.LoadAdapterJob():
                content = self.bases.find(job.base_model, job.job_id, emit).trainer.load(job)
                self.bases.adopt(job.adapter_id, job.base_model)
                return jobs.AdapterResult(content=content)
            case jobs.DropAdapterJob():
                self.bases.drop(job.adapter_id)
            case jobs.OptimJob():
                return self.bases.trainer_of(job.adapter_id).optim(job)
            case jobs.ShareGradientJob():
                return self.bases.trainer_of(job.adapter_id).share_gradient(job)
            case jobs.AddGradientJob():
                return self.bases.trainer_of(job.adapter_id).add_gradient(job)
            case jobs.LoadModelJob():
                self.bases.find(job.base_model, job.job_id, emit)
            case jobs.DescribeModelJob():
                return describe(job.base_model)
            case _:
                raise AssertionError(f"a {type(job).__name__} is not run here")
        return jobs.AdapterResult()

    def _create(self, job: jobs.CreateAdapterJob, emit: jobs.Emit) -> jobs.AdapterResult:
        base = self.bases.find(job.base_model, job.job_id, emit)
        if job.base_fingerprint:
            before = {"base_fingerprint": job.base_fingerprint, "base_model": job.base_model}
            base.identity.check(before, "The run", force=reader.FORCE)
        base.trainer.create(job)
        self.bases.adopt(job.adapter_id, job.base_model)
        return jobs.AdapterResult(base_fingerprint=base.identity.fingerprint)

    def capture(self, job: jobs.SaveAdapterJob) -> Callable[[], jobs.AdapterResult]:
        trainer = self.bases.trainer_of(job.adapter_id)
        image = trainer.capture(job)
        snapshot = None
        if job.for_sampling:
            snapshot = AdapterSnapshot(trainer.snapshot(job.adapter_id), job.job_id)
            self.snapshots.keep(trainer.base_model, job.folder, snapshot)
        return partial(_write, job, image, snapshot)

    def submit_to_group(self, job: jobs.GroupJob, emit: jobs.Emit) -> None:
        self._groups.submit(job, emit)

    # ------------------------------------------------------------------------------- sampling

    def _start_sample(self, job: jobs.SampleJob, emit: jobs.Emit) -> None:
        base = self.bases.find(job.base_model, job.job_id, emit)
        sampler = self.bases.sampler(base)
        if job.adapter_folder is None:
            sampler.add(job, None, safely(emit))
        else:
            read = base.trainer.read_snapshot
            snapshot = self.snapshots.find(job.base_model, job.adapter_folder, read)
            sampler.add(job, snapshot.adapter, safely(emit), snapshot.version)

    def sampling(self) -> list[Sampler]:
        return self.bases.sampling()

    # --------------------------------------------------------------------------------- memory

    def held_bytes(self) -> dict[str, int]:
        self.snapshots.forget_gone()
        return {**self.bases.held_bytes(), "snapshots": self.snapshots.size_bytes}

    def rest(self) -> None:
        self.bases.rest()
        give_back()

    def close(self) -> None:
        self._groups.close()
        self.snapshots.clear()
        self.bases.close()


def _write(
    job: jobs.SaveAdapterJob, image: writer.Image, snapshot: AdapterSnapshot | None
) -> jobs.AdapterResult:
    written = writer.write(job.folder, image, sync=not job.ephemeral)
    if snapshot is not None:
        snapshot.version = written.content
        snapshot.written = version_of(job.folder)
    return jobs.AdapterResult(size_bytes=written.size_bytes)
