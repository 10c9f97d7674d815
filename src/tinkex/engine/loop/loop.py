"""The one loop of all engines: a thread that takes jobs in turns and has them computed.

Everything that touches the device happens in the loop's own thread. Jobs of one adapter wait in a
lane of their own and run in the order they came (`lanes`). The oldest waiting job goes first; when
it is a training job, the training jobs at the head of other lanes over the same base model ride in
the same packed passes, if the compute shares them. Samples have no lane: they join the running
batch of their sampler. Between two training passes the sampler gets its share of the time
(`fair_share`), so a long batch does not stop a stream of tokens, nor the other way round. Other
threads write checkpoints (`saves`).

Knows jobs and turns; models and weights are the compute's, who owns what is the server's.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

from tinkex.engine import jobs
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.loop.compute import Compute
from tinkex.engine.loop.fair_share import FairShare
from tinkex.engine.loop.lanes import Lanes, WaitingJob, num_tokens
from tinkex.engine.loop.saves import Saves
from tinkex.engine.reports import attempt, cancelled, failure, tell

log = logging.getLogger(__name__)
MEASURE_EVERY_S, RESTING_S = 10.0, 60.0
"""How often memory is looked at: while there is work, and while there is none."""
CLOSE_S = 60.0
"""How long `close` waits for the pass and the saves under way."""
_TRAIN, _SAMPLE = "train", "sample"

_Entry = tuple[jobs.Job, jobs.Emit] | str | None
"""A message to the loop's thread: a job, the id of a job to cancel, or None to wake it."""


class _Closing(BaseException):
    """Leaves a training job between two of its passes; nothing of it is kept."""


class Loop:
    """See `jobs.Engine`. `close` ends the thread; jobs that have not ended fail as cancelled."""

    def __init__(
        self,
        compute: Compute,
        heartbeat: Heartbeat | None = None,
        *,
        name: str,
        train_share: float = 0.5,
        idle_s: float = 300.0,
    ) -> None:
        """Start the thread.

        Args:
            name: Of its threads.
            train_share: Share of the time for training while both have work.
            idle_s: After so long without work, the compute is told to rest.
        """
        self.compute = compute
        self.heartbeat = heartbeat or Heartbeat()
        self._lanes = Lanes()
        self._turns = FairShare({_TRAIN: train_share, _SAMPLE: 1 - train_share})
        self._saves = Saves(name)
        # Not a Condition and a deque: those cost more at every small job (dev/LOG.md, 2026-11-16).
        self._inbox: SimpleQueue[_Entry] = SimpleQueue()
        self._door = threading.Lock()
        self._closed = False
        self._train_began = 0.0
        self._training: set[str] = set()  # adapters of the job that runs; nothing else may use them
        self._is_between = False  # a short job runs in the middle of a long one
        self._idle_s = idle_s
        self._is_resting = True
        self._measured_at = 0.0
        self._holds_snapshots = False
        # Waited for: a compute that cannot begin fails here, and not in silence at the first job.
        began: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(began,), name=name, daemon=True)
        self._thread.start()
        began.result()

    # ----------------------------------------------------------------------------- jobs.Engine

    def submit(self, job: jobs.Job, emit: jobs.Emit) -> None:
        if isinstance(job, jobs.GroupJob):
            self.compute.submit_to_group(job, emit)
            return
        with self._door:
            if not self._closed:
                self._inbox.put((job, emit))
                return
        tell(emit, cancelled(job.job_id))

    def cancel(self, job_id: str) -> None:
        """End a job that waits or samples; one that is training runs to its end."""
        self._inbox.put(job_id)  # nobody looks at it once the engine is closed

    def close(self) -> None:
        with self._door:
            self._closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=CLOSE_S)

    # ---------------------------------------------------------------------------------- thread

    def _run(self, began: Future[None]) -> None:
        try:
            self.compute.begin()
        except Exception as exc:
            began.set_exception(exc)
            return
        began.set_result(None)
        while not self._closed:
            self._take_in()
            if ready := self._ready():
                self._turn(self._turns.pick(ready))
                if time.monotonic() - self._measured_at > MEASURE_EVERY_S:
                    self._measure()
            else:
                self._measure()
                self._wait()
        self._end_all()

    def _wait(self) -> None:
        """Sleep until something comes; if for long nothing does, give up what can be made again.

        Once the compute rests, the loop wakes only while there are folders to watch: the weights
        of those that are gone are forgotten whenever memory is measured.
        """
        patience_s: float | None = self._idle_s
        if self._is_resting:
            patience_s = min(self._idle_s, RESTING_S) if self._holds_snapshots else None
        try:
            entry = self._inbox.get(timeout=patience_s)
        except Empty:
            if not self._is_resting:
                self.compute.rest()
            self._is_resting = True
        else:
            self._take(entry)

    def _measure(self) -> None:
        """Say what the memory is for."""
        self._measured_at = time.monotonic()
        held_bytes = self.compute.held_bytes()
        self._holds_snapshots = bool(held_bytes.get("snapshots"))
        if held_bytes:
            self.heartbeat.hold(**held_bytes)

    def _ready(self) -> list[str]:
        """The kinds of work that wait now."""
        kinds = [_TRAIN] if self._lanes else []
        if self.compute.sampling():
            kinds.append(_SAMPLE)
        return kinds

    def _turn(self, kind: str) -> None:
        """Sample, or run the oldest job that waits in a lane."""
        if kind == _SAMPLE:
            self._sample_turn(look_ahead=not self._lanes)
            return
        self._train_began = time.perf_counter()
        self._run_first(min(self._lanes.fronts()))
        self._charge_training()

    def _charge_training(self) -> None:
        now = time.perf_counter()
        self._turns.charge(_TRAIN, now - self._train_began)
        self._train_began = now

    def _sample_turn(self, *, look_ahead: bool) -> None:
        """Run one pass of each sampler. While training takes turns, no token waits for the next."""
        began = time.perf_counter()
        for sampler in self.compute.sampling():
            try:
                alone = sampler.next_alone
                with self.heartbeat.work(*([alone] if alone else [])):
                    sampler.step(look_ahead=look_ahead)
            except Exception as exc:
                log.exception("a sampling pass failed")
                sampler.fail_all(f"the sampling pass failed: {type(exc).__name__}: {exc}")
        self._turns.charge(_SAMPLE, time.perf_counter() - began)

    # -------------------------------------------------------------------------- between passes

    def between_passes(self) -> None:
        """Give others their turns in the middle of a training job; the compute calls it."""
        self.heartbeat.turned()
        self._charge_training()
        if self._closed:
            raise _Closing
        self._take_in()
        while self.compute.sampling() and self._turns.pick((_TRAIN, _SAMPLE)) == _SAMPLE:
            self._sample_turn(look_ahead=False)
        # What sampling took is charged already; training must not pay for it as well.
        self._train_began = time.perf_counter()
        if not self._is_between:
            self._let_short_ones_by()

    def _let_short_ones_by(self) -> None:
        """In the middle of a long training job, run what others wait for, if a pass can hold it.

        So a job of many passes delays a short one of another adapter by one pass, and is itself
        delayed by one pass of theirs for each of its own.
        """
        fronts = self._lanes.fronts(besides=self._training)
        fronts = [waiting for waiting in fronts if self._is_short(waiting.job)]
        if not fronts:
            return
        self._is_between = True
        try:
            self._run_first(min(fronts))
        finally:
            self._is_between = False

    def _is_short(self, job: jobs.AdapterJob) -> bool:
        packing = self.compute.packing(job.adapter_id)
        return packing is None or num_tokens(job) <= packing.max_tokens

    # ----------------------------------------------------------------------------- in and out

    def _take_in(self) -> None:
        """Sort what arrived into lanes and samplers. Never runs a job of a lane."""
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, entry: _Entry) -> None:
        self._is_resting = False  # also when it came while the compute was told to rest
        if isinstance(entry, str):
            self._cancel_now(entry)
        elif entry is not None:
            job, emit = entry
            if isinstance(job, jobs.AdapterJob):
                self._lanes.add(job, emit)
                return
            # A base model may have to be fetched before it can be described.
            is_loading = not isinstance(job, jobs.SampleJob)
            with self.heartbeat.work(job.job_id, is_loading=is_loading):
                attempt(job, emit, partial(self.compute.run, job, emit))

    def _cancel_now(self, job_id: str) -> None:
        if any(sampler.cancel(job_id) for sampler in self.compute.sampling()):
            return
        if (emit := self._lanes.cancel(job_id)) is not None:
            tell(emit, cancelled(job_id))

    def _end_all(self) -> None:
        """Give each job that came its one end, write what was saved, and let go of everything."""
        while not self._inbox.empty():
            if isinstance(entry := self._inbox.get(), tuple):
                job, emit = entry
                tell(emit, cancelled(job.job_id))
        for waiting in self._lanes.clear():
            tell(waiting.emit, cancelled(waiting.job.job_id))
        for sampler in self.compute.sampling():
            sampler.cancel_all()
        self._saves.close()
        self.compute.close()

    # ---------------------------------------------------------------------------- jobs of lanes

    def _run_first(self, first: WaitingJob) -> None:
        """Run a job from the front of its lane, with those that can share its passes."""
        job, emit = first.job, first.emit
        if isinstance(job, jobs.TrainJob) and self.compute.shares_passes:
            self._train(self._lanes.take_pass(first, self.compute.packing, besides=self._training))
            return
        self._lanes.take(first)
        if isinstance(job, jobs.TrainJob):
            self._train([first])
            return
        self._training.add(job.adapter_id)  # a mixture gives turns between its folders
        with self.heartbeat.work(job.job_id):
            if isinstance(job, jobs.SaveAdapterJob):
                attempt(job, emit, partial(self._saves.save, job, emit, self.compute.capture))
            else:
                attempt(job, emit, partial(self.compute.run, job, emit))
        self._training.discard(job.adapter_id)

    def _train(self, chosen: list[WaitingJob]) -> None:
        together = [waiting.job for waiting in chosen if isinstance(waiting.job, jobs.TrainJob)]
        adapters = {job.adapter_id for job in together}
        self._training |= adapters
        try:
            with self.heartbeat.work(*[job.job_id for job in together]):
                results = self.compute.train(together)
        except _Closing:
            for waiting in chosen:
                tell(waiting.emit, cancelled(waiting.job.job_id))
            return
        except Exception as exc:
            for waiting in chosen:
                tell(waiting.emit, failure(waiting.job.job_id, exc))
            return
        finally:
            self._training -= adapters
        for waiting, result in zip(chosen, results, strict=True):
            if isinstance(result, jobs.TrainResult):
                tell(waiting.emit, jobs.Done(job_id=waiting.job.job_id, result=result))
            else:
                tell(waiting.emit, failure(waiting.job.job_id, result))
