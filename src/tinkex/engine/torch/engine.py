"""The engine of one device: one thread that trains adapters and generates samples.

Everything that touches the device happens in the engine's own thread. Jobs of one adapter wait in a
lane of their own and run in the order they came; a lane never waits for another one. The oldest
waiting job goes first; when it is a training job, the training jobs at the head of other lanes over
the same base model ride in the same packed passes (not in deterministic mode). Samples have no
lane: they join the running batch as soon as there is KV memory. Between two training passes the
sampler gets its share of the time, so a long batch does not stop a stream of tokens, nor the other
way round. A second thread writes checkpoints: a save is copied when its turn comes and the engine
goes on. One copy at a time, so that saves cannot fill the memory; the next one waits. Weights for
sampling are kept on the device as well: who samples from them does not wait for them to be read.
Unnamed ones have a thread of their own, and are synced later.

Weights of a checkpoint folder never change; they are kept by folder, the longest unused forgotten.
Knows jobs and modules of this package, nothing of HTTP or who owns what.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from tinkex.engine import folders, jobs
from tinkex.engine.checkpoint import reader, writer
from tinkex.engine.checkpoint.snapshots import AdapterSnapshot, Snapshots, snapshot_room, version_of
from tinkex.engine.device.backend import ops_for
from tinkex.engine.exchange.meetings import Meetings
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.loop.fair_share import FairShare
from tinkex.engine.numerics.memory_in_use import give_back
from tinkex.engine.reports import cancelled, failure, safely, tell
from tinkex.engine.torch.bases import Bases, describe
from tinkex.engine.torch.config import EngineConfig

log = logging.getLogger(__name__)
MEASURE_EVERY_S, RESTING_S = 10.0, 60.0
"""How often memory is looked at: while there is work, and while there is none."""
_LATER_S = 0.5
"""How long unnamed weights wait for the disk: first the server's journal hears of them."""


@dataclass(slots=True)
class _Waiting:
    order: int
    job: jobs.AdapterJob
    emit: jobs.Emit


class _Closing(BaseException):
    """Leaves a training job between two of its passes; nothing of it is kept."""


class TorchEngine:
    """See `jobs.Engine`. `close` ends the thread; jobs that have not ended fail as cancelled."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.device = self.config.torch_device()
        ops = ops_for(self.device)
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        if self.config.deterministic:
            ops.make_deterministic()
        self.heartbeat = Heartbeat()
        self._lanes: dict[str, deque[_Waiting]] = {}
        self._snapshots = Snapshots(self.config.snapshot_bytes or snapshot_room(ops))
        self._bases = Bases(
            self.config,
            self.device,
            self.heartbeat,
            after_pass=self._between_passes,
            on_forgotten=self._snapshots.forget_base,
        )
        share = self.config.train_share
        self._turns = FairShare({"train": share, "sample": 1 - share})
        self._order = itertools.count()
        self._inbox: deque[tuple[jobs.Job, jobs.Emit] | str] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._train_began = 0.0
        self._training: set[str] = set()  # adapters of the job that runs; nothing else may use them
        self._is_between = False  # a short job runs in the middle of a long one
        self._measured_at = 0.0
        self._is_resting = True
        self._meetings = Meetings(
            self.device,
            lambda adapter_id: self._bases.trainer_of(adapter_id).find(adapter_id),
            self._attempt,
            refusal="a group of devices meets no other worker" if self.config.group else "",
        )
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="torch-engine-disk")
        # Unnamed weights for sampling do not wait for a large checkpoint that is being written.
        self._quick_disk = ThreadPoolExecutor(1, thread_name_prefix="torch-engine-quick-disk")
        self._written: dict[ThreadPoolExecutor, Future[None]] = {}
        self._thread = threading.Thread(target=self._loop, name="torch-engine", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------- jobs.Engine

    def submit(self, job: jobs.Job, emit: jobs.Emit) -> None:
        if isinstance(job, jobs.MeetingJob):
            self._meetings.submit(job, emit)
            return
        with self._wake:
            if not self._closed:
                self._inbox.append((job, emit))
                self._wake.notify()
                return
        tell(emit, cancelled(job.job_id))

    def cancel(self, job_id: str) -> None:
        """A job that waits or samples ends as cancelled; one that is training runs to its end."""
        with self._wake:
            self._inbox.append(job_id)  # nobody looks at it once the engine is closed
            self._wake.notify()

    def close(self) -> None:
        self._meetings.close()
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)

    # ---------------------------------------------------------------------------------- thread

    def _loop(self) -> None:
        while True:
            with self._wake:
                woken = self._wake.wait_for(
                    lambda: self._closed or self._inbox or self._ready(), self._patience_s()
                )
                closed = self._closed
            if not woken:
                self._rest()
                continue
            self._is_resting = False
            self._take_in()  # before anything ends: each job that came gets its one end
            if closed:
                self._end_all()
                self._quick_disk.shutdown()
                self._disk.shutdown()
                self._bases.close()
                return
            if ready := self._ready():
                self._turn(self._turns.pick(ready))
            if not self._ready() or time.monotonic() - self._measured_at > MEASURE_EVERY_S:
                self._measure()

    def _measure(self) -> None:
        """Say what the memory is for, and forget weights whose folder is gone."""
        self._measured_at = time.monotonic()
        self._snapshots.forget_gone()
        self.heartbeat.hold(**self._bases.held_bytes(), snapshots=self._snapshots.size_bytes)

    def _patience_s(self) -> float | None:
        """How long to wait for work before something is given up; None: there is nothing."""
        if not self._is_resting:
            return self.config.idle_s
        return min(self.config.idle_s, RESTING_S) if self._snapshots else None

    def _rest(self) -> None:
        """Nothing came for long: give up what can be made again. Later only folders are watched."""
        if self._is_resting:
            self._measure()
            return
        self._is_resting = True
        self._bases.rest()
        give_back()
        self._measure()

    def _ready(self) -> list[str]:
        """The kinds of work that wait now."""
        kinds = ["train"] if any(self._lanes.values()) else []
        return [*kinds, "sample"] if self._bases.sampling() else kinds

    def _turn(self, kind: str) -> None:
        """Sample, or run the oldest job that waits in a lane."""
        if kind == "sample":
            self._sample_turn(training=any(self._lanes.values()))
            return
        self._train_began = time.perf_counter()
        fronts = (lane[0] for lane in self._lanes.values() if lane)
        self._run_first(min(fronts, key=lambda waiting: waiting.order))
        self._charge_training()

    def _charge_training(self) -> None:
        now = time.perf_counter()
        self._turns.charge("train", now - self._train_began)
        self._train_began = now

    def _between_passes(self) -> None:
        """Give sampling its share in the middle of a training job."""
        self.heartbeat.turned()
        self._charge_training()
        if self._closed:
            raise _Closing
        self._take_in()
        while self._bases.sampling() and self._turns.pick(("train", "sample")) == "sample":
            self._sample_turn(training=True)
        # What sampling took is charged already; training must not pay for it as well.
        self._train_began = time.perf_counter()
        if not self._is_between:
            self._let_short_ones_by()

    def _let_short_ones_by(self) -> None:
        """In the middle of a long training job, run what others wait for, if a pass can hold it.

        So a job of many passes delays a short one of another adapter by one pass, and is itself
        delayed by one pass of theirs for each of its own.
        """
        fronts = [lane[0] for lane in self._lanes.values() if lane]
        fronts = [w for w in fronts if w.job.adapter_id not in self._training and self._is_short(w)]
        if not fronts:
            return
        self._is_between = True
        try:
            self._run_first(min(fronts, key=lambda w: w.order))
        finally:
            self._is_between = False

    def _is_short(self, waiting: _Waiting) -> bool:
        job, base = waiting.job, self._bases.of(waiting.job.adapter_id)
        if not isinstance(job, jobs.TrainJob) or base is None:
            return True
        most = base.trainer.config.max_tokens
        return sum(len(datum.tokens) for datum in job.data) <= most

    def _sample_turn(self, *, training: bool) -> None:
        """One pass of each sampler. While training takes turns, no token waits for the next."""
        began = time.perf_counter()
        for sampler in self._bases.sampling():
            try:
                with self.heartbeat.work():
                    sampler.step(look_ahead=not training)
            except Exception as exc:
                log.exception("a sampling pass failed")
                sampler.fail_all(f"the sampling pass failed: {type(exc).__name__}: {exc}")
        self._turns.charge("sample", time.perf_counter() - began)

    # ----------------------------------------------------------------------------- in and out

    def _take_in(self) -> None:
        """Sort what arrived into lanes and samplers. Never runs a lane job."""
        while True:
            with self._wake:
                if not self._inbox:
                    return
                entry = self._inbox.popleft()
            if isinstance(entry, str):
                self._cancel_now(entry)
                continue
            job, emit = entry
            if isinstance(job, jobs.SampleJob):
                with self.heartbeat.work(job.job_id):
                    self._attempt(job, emit, partial(self._start_sample, job, emit))
            elif isinstance(job, jobs.LoadModelJob):
                self._attempt(job, emit, partial(self._load_model, job, emit))
            elif isinstance(job, jobs.DescribeModelJob):
                with self.heartbeat.work(job.job_id, is_loading=True):  # it may have to be fetched
                    self._attempt(job, emit, partial(describe, job.base_model))
            elif isinstance(job, jobs.AdapterJob):
                lane = self._lanes.setdefault(job.adapter_id, deque())
                lane.append(_Waiting(next(self._order), job, emit))

    def _cancel_now(self, job_id: str) -> None:
        for sampler in self._bases.sampling():
            if sampler.cancel(job_id):
                return
        for lane in self._lanes.values():
            for waiting in lane:
                if waiting.job.job_id == job_id:
                    lane.remove(waiting)
                    tell(waiting.emit, cancelled(job_id))
                    return

    def _end_all(self) -> None:
        for lane in self._lanes.values():
            for waiting in lane:
                tell(waiting.emit, cancelled(waiting.job.job_id))
        for sampler in self._bases.sampling():
            sampler.cancel_all()
        self._lanes.clear()
        self._snapshots.clear()

    def _attempt(
        self, job: jobs.Job, emit: jobs.Emit, action: Callable[[], jobs.Result | None]
    ) -> None:
        """Run something for a job and tell how it ended; None means that it goes on elsewhere."""
        try:
            result = action()
        except Exception as exc:
            tell(emit, failure(job.job_id, exc))
        else:
            if result is not None:
                tell(emit, jobs.Done(job_id=job.job_id, result=result))

    def _load_model(self, job: jobs.LoadModelJob, emit: jobs.Emit) -> jobs.AdapterResult:
        self._bases.find(job.base_model, job.job_id, emit)
        return jobs.AdapterResult()

    # ------------------------------------------------------------------------------- training

    def _run_first(self, first: _Waiting) -> None:
        """Run a job from the head of its lane, with those that can share its passes."""
        if isinstance(first.job, jobs.TrainJob):
            self._train(self._companions(first))
        else:
            self._lanes[first.job.adapter_id].popleft()
            with self.heartbeat.work(first.job.job_id):
                self._attempt(first.job, first.emit, partial(self._run, first.job, first.emit))
        for adapter_id in [key for key, lane in self._lanes.items() if not lane]:
            del self._lanes[adapter_id]

    def _companions(self, first: _Waiting) -> list[tuple[jobs.TrainJob, jobs.Emit]]:
        """Take `first` out of its lane, and what waits in front of other lanes of its base."""
        base = self._bases.of(first.job.adapter_id)
        budget = base.trainer.config.max_tokens if base is not None else 0
        chosen: list[tuple[jobs.TrainJob, jobs.Emit]] = []
        is_alone = isinstance(first.job, jobs.TrainJob) and first.job.alone
        lanes = [x for name, x in self._lanes.items() if x and name not in self._training]
        # `first` before all others: whoever was promised the turn must not be left out for room.
        lanes.sort(key=lambda lane: (lane[0] is not first, lane[0].order))
        for lane in lanes:
            while lane and isinstance(job := lane[0].job, jobs.TrainJob):
                size = sum(len(datum.tokens) for datum in job.data)
                alone = self.config.deterministic or base is None or job.alone or is_alone
                fits = size <= budget and not alone and self._bases.of(job.adapter_id) is base
                if chosen and not fits:
                    break
                chosen.append((job, lane.popleft().emit))
                budget -= size
        return chosen

    def _train(self, chosen: list[tuple[jobs.TrainJob, jobs.Emit]]) -> None:
        mine = {job.adapter_id for job, _ in chosen}
        self._training |= mine
        try:
            trainer = self._bases.trainer_of(chosen[0][0].adapter_id)
            with self.heartbeat.work(*(job.job_id for job, _ in chosen)):
                results = trainer.train([job for job, _ in chosen])
        except _Closing:
            for job, emit in chosen:
                tell(emit, cancelled(job.job_id))
            return
        except Exception as exc:
            for job, emit in chosen:
                tell(emit, failure(job.job_id, exc))
            return
        finally:
            self._training -= mine
        for (job, emit), result in zip(chosen, results, strict=True):
            if isinstance(result, jobs.TrainResult):
                tell(emit, jobs.Done(job_id=job.job_id, result=result))
            else:
                tell(emit, failure(job.job_id, result))

    def _run(self, job: jobs.AdapterJob, emit: jobs.Emit) -> jobs.Result | None:
        match job:
            case jobs.CreateAdapterJob():
                return self._create(job, emit)
            case jobs.LoadAdapterJob():
                content = self._bases.find(job.base_model, job.job_id, emit).trainer.load(job)
                self._bases.adopt(job.adapter_id, job.base_model)
                return jobs.AdapterResult(content=content)
            case jobs.SaveAdapterJob():
                return self._save(job, emit)
            case jobs.DropAdapterJob():
                self._bases.drop(job.adapter_id)
            case jobs.OptimJob():
                return self._bases.trainer_of(job.adapter_id).optim(job)
            case jobs.ShareGradientJob():
                return self._bases.trainer_of(job.adapter_id).share_gradient(job)
            case jobs.AddGradientJob():
                return self._bases.trainer_of(job.adapter_id).add_gradient(job)
            case _:
                raise AssertionError(f"a {type(job).__name__} is not run here")
        return jobs.AdapterResult()

    def _create(self, job: jobs.CreateAdapterJob, emit: jobs.Emit) -> jobs.AdapterResult:
        base = self._bases.find(job.base_model, job.job_id, emit)
        if job.base_fingerprint:
            before = {"base_fingerprint": job.base_fingerprint, "base_model": job.base_model}
            base.identity.check(before, "The run", force=reader.FORCE)
        base.trainer.create(job)
        self._bases.adopt(job.adapter_id, job.base_model)
        return jobs.AdapterResult(base_fingerprint=base.identity.fingerprint)

    def _save(self, job: jobs.SaveAdapterJob, emit: jobs.Emit) -> jobs.AdapterResult | None:
        trainer = self._bases.trainer_of(job.adapter_id)
        disk = self._quick_disk if job.ephemeral else self._disk
        # One copy at a time: saves that come faster than the disk would fill the memory.
        if (before := self._written.get(disk)) is not None:
            before.result()
        image = trainer.capture(job)
        snapshot = None
        if job.for_sampling:
            snapshot = AdapterSnapshot(trainer.snapshot(job.adapter_id), job.job_id)
            self._snapshots.keep(trainer.base_model, job.folder, snapshot)
        write = partial(_write, job, image, snapshot)
        self._written[disk] = disk.submit(self._attempt, job, emit, write)
        if job.ephemeral:
            self._written[disk].add_done_callback(
                lambda _: self._disk.submit(_make_safe, job.folder)
            )
        return None

    # ------------------------------------------------------------------------------- sampling

    def _start_sample(self, job: jobs.SampleJob, emit: jobs.Emit) -> None:
        base = self._bases.find(job.base_model, job.job_id, emit)
        sampler = self._bases.sampler(base)
        if job.adapter_folder is None:
            sampler.add(job, None, safely(emit))
        else:
            read = base.trainer.read_snapshot
            snapshot = self._snapshots.find(job.base_model, job.adapter_folder, read)
            sampler.add(job, snapshot.adapter, safely(emit), snapshot.version)


# ------------------------------------------------------------------------------------ functions


def _write(
    job: jobs.SaveAdapterJob, image: writer.Image, snapshot: AdapterSnapshot | None
) -> jobs.AdapterResult:
    written = writer.write(job.folder, image, sync=not job.ephemeral)
    if snapshot is not None:
        snapshot.version = written.content
        snapshot.written = version_of(job.folder)
    return jobs.AdapterResult(size_bytes=written.size_bytes)


def _make_safe(folder: str) -> None:
    """What could not be written, or was removed meanwhile, has been told elsewhere."""
    time.sleep(_LATER_S)
    with contextlib.suppress(OSError):
        folders.make_safe(folder)
