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
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from tinkex.engine import checkpoint, folders, jobs
from tinkex.engine.config import EngineConfig, make_cuda_deterministic
from tinkex.engine.exchange.meetings import Meetings
from tinkex.engine.fingerprint import Base, fingerprint, witness_of
from tinkex.engine.holdings import give_back, tensor_bytes
from tinkex.engine.model import packed_weights
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.engine.model.decoder import Decoder, DecoderLike, load_decoder, runs_kernels
from tinkex.engine.pulse import Pulse
from tinkex.engine.sample.sampler import Sampler, SamplerConfig
from tinkex.engine.sample.scheduler import FairShare
from tinkex.engine.sample.stopping import load_detokenizer
from tinkex.engine.snapshots import Snapshot, Snapshots, snapshot_room, version_of
from tinkex.engine.train.trainer import Trainer, TrainerConfig
from tinkex.errors import EngineError, InvalidInputError, TinkerError

if TYPE_CHECKING:
    from tinkex.engine.cuda.warm_up import WarmUp
    from tinkex.engine.group.leader import Leader

log = logging.getLogger(__name__)
MEASURE_EVERY_S, RESTING_S = 10.0, 60.0
"""How often memory is looked at: while there is work, and while there is none."""
_LATER_S = 0.5
"""How long unnamed weights wait for the disk: first the server's journal hears of them."""
Emit = Callable[[jobs.Event], None]
LaneJob = (
    jobs.CreateAdapterJob
    | jobs.LoadAdapterJob
    | jobs.SaveAdapterJob
    | jobs.DropAdapterJob
    | jobs.TrainJob
    | jobs.OptimJob
    | jobs.ShareGradientJob
    | jobs.AddGradientJob
)


@dataclass(slots=True)
class _Base:
    """A resident base model and what runs over it."""

    source: ModelSource
    decoder: DecoderLike
    trainer: Trainer
    identity: Base
    size_bytes: int
    sampler: Sampler | None = None

    @property
    def kv_bytes(self) -> int:
        sampler = self.sampler
        return 0 if sampler is None else tensor_bytes(sampler.cache, sampler.states)

    @property
    def packed_bytes(self) -> int:
        if not isinstance(self.decoder, Decoder):
            return 0
        return packed_weights.held_bytes(self.decoder.matrices())

    @property
    def adapter_bytes(self) -> int:
        return tensor_bytes(self.trainer.adapters)


@dataclass(slots=True)
class _Waiting:
    order: int
    job: LaneJob
    emit: Emit


class _Closing(BaseException):
    """Leaves a training job between two of its passes; nothing of it is kept."""


class TorchEngine:
    """See `jobs.Engine`. `close` ends the thread; jobs that have not ended fail as cancelled."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.device = self.config.torch_device()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        if self.config.deterministic and self.device.type == "cuda":
            make_cuda_deterministic()
        self.pulse = Pulse()
        self._bases: OrderedDict[str, _Base] = OrderedDict()
        self._base_of: dict[str, str] = {}
        self._lanes: dict[str, deque[_Waiting]] = {}
        self._snapshots = Snapshots(self.config.snapshot_bytes or snapshot_room(self.device))
        share = self.config.train_share
        self._turns = FairShare({"train": share, "sample": 1 - share})
        self._order = itertools.count()
        self._inbox: deque[tuple[jobs.Job, Emit] | str] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._train_began = 0.0
        self._training: set[str] = set()  # adapters of the job that runs; nothing else may use them
        self._is_between = False  # a short job runs in the middle of a long one
        self._measured_at = 0.0
        self._is_resting = True
        # Unnamed weights for sampling do not wait for a large checkpoint that is being written.
        self._leader = _lead(self.config, self.device)
        self._meetings = Meetings(
            self.device,
            lambda adapter_id: self._trainer(adapter_id).find(adapter_id),
            self._attempt,
            refusal="a group of devices meets no other worker" if self.config.group else "",
        )
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="torch-engine-disk")
        self._quick_disk = ThreadPoolExecutor(1, thread_name_prefix="torch-engine-quick-disk")
        self._written: dict[ThreadPoolExecutor, Future[None]] = {}
        self._thread = threading.Thread(target=self._loop, name="torch-engine", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------- jobs.Engine

    def submit(self, job: jobs.Job, emit: Emit) -> None:
        if isinstance(job, jobs.MeetingJob):
            self._meetings.submit(job, emit)
        else:
            self._put((job, emit))

    def cancel(self, job_id: str) -> None:
        """A job that waits or samples ends as cancelled; one that is training runs to its end."""
        self._put(job_id)

    def close(self) -> None:
        self._meetings.close()
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)

    def _put(self, entry: tuple[jobs.Job, Emit] | str) -> None:
        with self._wake:
            if not self._closed:
                self._inbox.append(entry)
                self._wake.notify()
                return
        if not isinstance(entry, str):
            _tell(entry[1], _cancelled(entry[0].job_id))

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
            self._take_in()
            if closed:
                self._end_all()
                self._quick_disk.shutdown()
                self._disk.shutdown()
                if self._leader is not None:
                    self._leader.close()
                return
            if ready := self._ready():
                self._turn(self._turns.pick(ready))
            if not self._ready() or time.monotonic() - self._measured_at > MEASURE_EVERY_S:
                self._measure()

    def _measure(self) -> None:
        """Say what the memory is for, and forget weights whose folder is gone."""
        self._measured_at = time.monotonic()
        self._snapshots.forget_gone()
        bases = list(self._bases.values())
        self.pulse.hold(
            base=sum(base.size_bytes for base in bases),
            packed=sum(base.packed_bytes for base in bases),
            kv=sum(base.kv_bytes for base in bases),
            adapters=sum(base.adapter_bytes for base in bases),
            snapshots=self._snapshots.size_bytes,
        )

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
        for base in self._bases.values():
            if (
                self.device.type == "cpu"
            ):  # a GPU's memory is nobody else's, and its graphs are dear
                base.sampler = None
                if isinstance(base.decoder, Decoder):
                    packed_weights.unpack(base.decoder.matrices())
        give_back()
        self._measure()

    def _ready(self) -> list[str]:
        """The kinds of work that wait now."""
        kinds = ["train"] if any(self._lanes.values()) else []
        return [*kinds, "sample"] if self._sampling() else kinds

    def _sampling(self) -> list[Sampler]:
        samplers = [base.sampler for base in self._bases.values()]
        return [sampler for sampler in samplers if sampler is not None and sampler.has_work]

    def _turn(self, kind: str) -> None:
        if kind == "sample":
            self._sample_turn(training=any(self._lanes.values()))
            return
        self._train_began = time.perf_counter()
        self._train_turn()
        self._charge_training()

    def _charge_training(self) -> None:
        now = time.perf_counter()
        self._turns.charge("train", now - self._train_began)
        self._train_began = now

    def _between_passes(self) -> None:
        """Give sampling its share in the middle of a training job."""
        self.pulse.turned()
        self._charge_training()
        if self._closed:
            raise _Closing
        self._take_in()
        while self._sampling() and self._turns.pick(("train", "sample")) == "sample":
            self._sample_turn(training=True)
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
        job, name = waiting.job, self._base_of.get(waiting.job.adapter_id)
        if not isinstance(job, jobs.TrainJob) or name is None:
            return True
        most = self._bases[name].trainer.config.max_tokens
        return sum(len(datum.tokens) for datum in job.data) <= most

    def _sample_turn(self, *, training: bool) -> None:
        """One pass of each sampler. While training takes turns, no token waits for the next."""
        began = time.perf_counter()
        for sampler in self._sampling():
            try:
                with self.pulse.work():
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
                with self.pulse.work(job.job_id):
                    self._attempt(job, emit, partial(self._start_sample, job, emit))
            elif isinstance(job, jobs.LoadModelJob):
                self._attempt(job, emit, partial(self._load_model, job, emit))
            elif isinstance(job, jobs.DescribeModelJob):
                with self.pulse.work(job.job_id, is_loading=True):  # it may have to be fetched
                    self._attempt(job, emit, partial(_describe, job.base_model))
            elif isinstance(job, LaneJob):
                lane = self._lanes.setdefault(job.adapter_id, deque())
                lane.append(_Waiting(next(self._order), job, emit))

    def _cancel_now(self, job_id: str) -> None:
        for sampler in self._sampling():
            if sampler.cancel(job_id):
                return
        for lane in self._lanes.values():
            for waiting in lane:
                if waiting.job.job_id == job_id:
                    lane.remove(waiting)
                    _tell(waiting.emit, _cancelled(job_id))
                    return

    def _end_all(self) -> None:
        for lane in self._lanes.values():
            for waiting in lane:
                _tell(waiting.emit, _cancelled(waiting.job.job_id))
        for sampler in self._sampling():
            sampler.cancel_all()
        self._lanes.clear()
        self._bases.clear()
        self._snapshots.clear()

    def _attempt(self, job: jobs.Job, emit: Emit, action: Callable[[], jobs.Result | None]) -> None:
        """Run something for a job and tell how it ended; None means that it goes on elsewhere."""
        try:
            result = action()
        except Exception as exc:
            _tell(emit, _failure(job.job_id, exc))
        else:
            if result is not None:
                _tell(emit, jobs.Done(job_id=job.job_id, result=result))

    # --------------------------------------------------------------------------------- models

    def _base(self, name: str, job_id: str, emit: Emit) -> _Base:
        """A resident base model, loaded now when it is not."""
        if (base := self._bases.get(name)) is None:
            said = f"loading {name}"

            def tell(percent: int) -> None:
                _tell(emit, jobs.Progress(job_id=job_id, text=f"{said} {percent} %"))

            _tell(emit, jobs.Progress(job_id=job_id, text=said))
            self._make_room()
            with self.pulse.work(job_id, is_loading=True):
                source = resolve(name)
                if source.note:
                    log.log(logging.WARNING if source.stands_in else logging.INFO, source.note)
                warm_up = None if self._leader is not None else _warm_up(source, self.device)
                witness = witness_of(source, tell)
                if self._leader is not None:
                    decoder: DecoderLike = self._leader.load(source, witness)
                else:
                    decoder = load_decoder(source, device=self.device, weights=witness)
                identity = Base(name, fingerprint(source, witness), self.config.any_base)
                log.info("loaded %s, fingerprint %s", name, identity.fingerprint)
                if warm_up is not None:
                    warm_up.wait()
            trainer = self._trainer_of(decoder, name, identity)
            size_bytes = tensor_bytes(decoder)
            base = self._bases[name] = _Base(source, decoder, trainer, identity, size_bytes)
        self._bases.move_to_end(name)
        return base

    def _trainer_of(self, decoder: DecoderLike, name: str, base: Base) -> Trainer:
        config, after_pass = self.config.trainer, self._between_passes
        if self._leader is not None:
            return self._leader.led_trainer(
                decoder, base_model=name, config=config, base=base, after_pass=after_pass
            )
        config = config or TrainerConfig.for_device(
            self.device, deterministic=self.config.deterministic
        )
        return Trainer(decoder, base_model=name, config=config, base=base, after_pass=after_pass)

    def _sampler_of(self, base: _Base) -> Sampler:
        config, folder = self.config.sampler, base.source.path
        if self._leader is not None:
            return self._leader.led_sampler(base.decoder, config, base.source)
        config = config or SamplerConfig.for_device(
            self.device, deterministic=self.config.deterministic
        )
        return Sampler(base.decoder, config, detokenizer=lambda: load_detokenizer(folder))

    def _load_model(self, job: jobs.LoadModelJob, emit: Emit) -> jobs.AdapterResult:
        self._base(job.base_model, job.job_id, emit)
        return jobs.AdapterResult()

    def _make_room(self) -> None:
        """Forget base models that nothing uses, the longest unused first."""
        for name in list(self._bases):
            if len(self._bases) < self.config.max_models:
                return
            base = self._bases[name]
            if not base.trainer.adapters and (base.sampler is None or not base.sampler.has_work):
                del self._bases[name]
                self._snapshots.forget_base(name)

    def _trainer(self, adapter_id: str) -> Trainer:
        if (name := self._base_of.get(adapter_id)) is not None:
            return self._bases[name].trainer
        loaded = ", ".join(map(repr, sorted(self._base_of))) or "none"
        raise InvalidInputError(
            f"No adapter {adapter_id!r} is loaded; loaded: {loaded}. Create it, or load a "
            "checkpoint into it, first."
        )

    # ------------------------------------------------------------------------------- training

    def _train_turn(self) -> None:
        """Run the oldest waiting job, with the training jobs that can share its passes."""
        self._run_first(
            min((lane[0] for lane in self._lanes.values() if lane), key=lambda w: w.order)
        )

    def _run_first(self, first: _Waiting) -> None:
        if isinstance(first.job, jobs.TrainJob):
            self._train(self._companions(first))
        else:
            self._lanes[first.job.adapter_id].popleft()
            with self.pulse.work(first.job.job_id):
                self._attempt(first.job, first.emit, partial(self._run, first.job, first.emit))
        for adapter_id in [key for key, lane in self._lanes.items() if not lane]:
            del self._lanes[adapter_id]

    def _companions(self, first: _Waiting) -> list[tuple[jobs.TrainJob, Emit]]:
        """Take `first` out of its lane, and what waits in front of other lanes of its base."""
        base = self._base_of.get(first.job.adapter_id)
        budget = self._bases[base].trainer.config.max_tokens if base is not None else 0
        chosen: list[tuple[jobs.TrainJob, Emit]] = []
        lanes = [x for name, x in self._lanes.items() if x and name not in self._training]
        lanes.sort(key=lambda lane: (lane[0] is not first, lane[0].order))
        for lane in lanes:
            while lane and isinstance(job := lane[0].job, jobs.TrainJob):
                size = sum(len(datum.tokens) for datum in job.data)
                alone = self.config.deterministic or base is None
                fits = size <= budget and not alone and self._base_of.get(job.adapter_id) == base
                if chosen and not fits:
                    break
                chosen.append((job, lane.popleft().emit))
                budget -= size
        return chosen

    def _train(self, chosen: list[tuple[jobs.TrainJob, Emit]]) -> None:
        mine = {job.adapter_id for job, _ in chosen}
        self._training |= mine
        try:
            trainer = self._trainer(chosen[0][0].adapter_id)
            with self.pulse.work(*(job.job_id for job, _ in chosen)):
                results = trainer.train([job for job, _ in chosen])
        except _Closing:
            for job, emit in chosen:
                _tell(emit, _cancelled(job.job_id))
            return
        except Exception as exc:
            for job, emit in chosen:
                _tell(emit, _failure(job.job_id, exc))
            return
        finally:
            self._training -= mine
        for (job, emit), result in zip(chosen, results, strict=True):
            if isinstance(result, jobs.TrainResult):
                _tell(emit, jobs.Done(job_id=job.job_id, result=result))
            else:
                _tell(emit, _failure(job.job_id, result))

    def _run(self, job: LaneJob, emit: Emit) -> jobs.Result | None:
        match job:
            case jobs.CreateAdapterJob():
                return self._create(job, emit)
            case jobs.LoadAdapterJob():
                self._base(job.base_model, job.job_id, emit).trainer.load(job)
                self._adopt(job.adapter_id, job.base_model)
            case jobs.SaveAdapterJob():
                return self._save(job, emit)
            case jobs.DropAdapterJob():
                if (name := self._base_of.pop(job.adapter_id, None)) is not None:
                    self._bases[name].trainer.drop(job.adapter_id)
            case jobs.OptimJob():
                return self._trainer(job.adapter_id).optim(job)
            case jobs.ShareGradientJob():
                return self._trainer(job.adapter_id).share_gradient(job)
            case jobs.AddGradientJob():
                return self._trainer(job.adapter_id).add_gradient(job)
            case jobs.TrainJob():
                raise AssertionError("training jobs are run by _train")
        return jobs.AdapterResult()

    def _create(self, job: jobs.CreateAdapterJob, emit: Emit) -> jobs.AdapterResult:
        base = self._base(job.base_model, job.job_id, emit)
        if job.base_fingerprint:
            before = {"base_fingerprint": job.base_fingerprint, "base_model": job.base_model}
            base.identity.check(before, "The run", force=checkpoint.FORCE)
        base.trainer.create(job)
        self._adopt(job.adapter_id, job.base_model)
        return jobs.AdapterResult(base_fingerprint=base.identity.fingerprint)

    def _adopt(self, adapter_id: str, base_model: str) -> None:
        """Note whose adapter it is; one that moved to another base leaves the old one."""
        previous = self._base_of.get(adapter_id)
        if previous is not None and previous != base_model:
            self._bases[previous].trainer.drop(adapter_id)
        self._base_of[adapter_id] = base_model

    def _save(self, job: jobs.SaveAdapterJob, emit: Emit) -> jobs.AdapterResult | None:
        trainer = self._trainer(job.adapter_id)
        disk = self._quick_disk if job.ephemeral else self._disk
        if (before := self._written.get(disk)) is not None:
            before.result()
        image = trainer.capture(job)
        snapshot = None
        if job.for_sampling:
            snapshot = Snapshot(trainer.snapshot(job.adapter_id), job.job_id)
            self._snapshots.keep(self._base_of[job.adapter_id], job.folder, snapshot)
        write = partial(_write, job, image, snapshot)
        self._written[disk] = disk.submit(self._attempt, job, emit, write)
        if job.ephemeral:
            self._written[disk].add_done_callback(
                lambda _: self._disk.submit(_make_safe, job.folder)
            )
        return None

    # ------------------------------------------------------------------------------- sampling

    def _start_sample(self, job: jobs.SampleJob, emit: Emit) -> None:
        base = self._base(job.base_model, job.job_id, emit)
        if base.sampler is None:
            base.sampler = self._sampler_of(base)
        if job.adapter_folder is None:
            base.sampler.add(job, None, _safe(emit))
        else:
            read = base.trainer.read_snapshot
            snapshot = self._snapshots.find(job.base_model, job.adapter_folder, read)
            base.sampler.add(job, snapshot.adapter, _safe(emit), snapshot.version)


# ------------------------------------------------------------------------------------ functions


def _write(
    job: jobs.SaveAdapterJob, image: checkpoint.Image, snapshot: Snapshot | None
) -> jobs.AdapterResult:
    size_bytes = checkpoint.write(job.folder, image, sync=not job.ephemeral)
    if snapshot is not None:
        snapshot.version = checkpoint.content_of(job.folder)
        snapshot.written = version_of(job.folder)
    return jobs.AdapterResult(size_bytes=size_bytes)


def _lead(config: EngineConfig, device: torch.device) -> Leader | None:
    """The leader of the engine's group; None without one."""
    if not config.group:
        return None
    from tinkex.engine.group.leader import Leader

    return Leader(
        config.group,
        device,
        exact=config.deterministic,
        threads=config.threads,
        timeout_s=config.group_timeout_s,
    )


def _make_safe(folder: str) -> None:
    """What could not be written, or was removed meanwhile, has been told elsewhere."""
    time.sleep(_LATER_S)
    with contextlib.suppress(OSError):
        folders.make_safe(folder)


def _warm_up(source: ModelSource, device: torch.device) -> WarmUp | None:
    """Compile what a dense model will run while its weights are read; None for all others."""
    if not runs_kernels(device):
        return None
    from tinkex.engine.cuda.fused import can_fuse
    from tinkex.engine.cuda.warm_up import WarmUp

    config = source.config()
    return WarmUp(config, device) if can_fuse(config) else None


def _describe(name: str) -> jobs.ModelInfo:
    source = resolve(name)
    config = source.config()
    return jobs.ModelInfo(
        base_model=name,
        arch=config.arch,
        vocab_size=config.vocab_size,
        max_context_length=config.max_context_length,
        tokenizer_id=str(source.path),
        eos_token_ids=config.eos_token_ids,
        experts=config.routing,
        note=source.note,
        stands_in=source.stands_in,
    )


def _tell(emit: Emit, event: jobs.Event) -> None:
    """Emit; a receiver that fails must not take the engine with it."""
    try:
        emit(event)
    except Exception:
        log.exception("the receiver of an event of job %s failed", event.job_id)


def _safe(emit: Emit) -> Emit:
    return lambda event: _tell(emit, event)


def _cancelled(job_id: str) -> jobs.Failed:
    return jobs.Failed(job_id=job_id, message=f"job {job_id} was cancelled", category="cancelled")


def _failure(job_id: str, exc: Exception) -> jobs.Failed:
    """A user's mistake is told as it is; anything else is ours and logged."""
    category: Literal["user", "server"] = "server"
    message = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, TinkerError) and not isinstance(exc, EngineError):
        category, message = "user", str(exc)
    elif isinstance(exc, EngineError):
        message = str(exc)
    if category == "server":
        log.error("job %s failed", job_id, exc_info=exc)
    code = getattr(exc, "code", "")
    return jobs.Failed(job_id=job_id, message=message, category=category, code=code)
