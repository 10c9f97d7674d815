"""Train on through the loss of a run.

`training_client.with_recovery(policy)` gives a TrainingClient that saves a checkpoint every so many
steps and remembers the calls made since. When the run is lost, or the server was away for longer
than the SDK's own retries, it makes a new run from a checkpoint, repeats the remembered calls in
their order and answers the waiting futures from them: the loop around it sees a pause.

The client stands in front of the client of its current run. A call is recorded, made on that one,
and returns at once with a future of its own, its answer. The background loop ends the answer when
the run answers. Errors go to the keeper, one thread per client, which also looks after the run. It
decides whether an error is a loss, and rebuilds; nobody else does. The lock is held only while a
call takes its position, never while something is waited for, so calls can be made from anywhere,
a callback included, while a run is rebuilt: they are repeated with the others. A call moves to the
new run only when all of them are there. Errors that the caller can fix pass through, and delivered
results are not changed by a repeat.
"""

from __future__ import annotations

import functools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkex import events, types
from tinkex.client.futures import APIFuture
from tinkex.client.http.options import Options
from tinkex.client.recovery.call_log import CallLog, RecordedCall, SavedPoint
from tinkex.client.recovery.keeper import Keeper
from tinkex.client.recovery.policy import Callback, RecoveryEvent, RecoveryPolicy
from tinkex.client.recovery.run_monitor import (
    SLICE_S,
    Patience,
    RunHealth,
    check_run,
    report_loss,
)
from tinkex.client.recovery.visited_sessions import VisitedSessions, close_session
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.training.rebuilder import (
    HopelessError,
    Rebuilder,
    RebuiltRun,
    needs_logprobs,
    prepare,
)
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import (
    ClientClosedError,
    ConfigError,
    RecoveryFailedError,
    RetryableException,
    TinkerError,
)

logger = logging.getLogger("tinkex.recovery")
P = ParamSpec("P")
T = TypeVar("T")


def _outliving(
    method: Callable[Concatenate[TrainingClient, P], APIFuture[T]],
) -> Callable[Concatenate[RecoveringTrainingClient, P], APIFuture[T]]:
    """The same method, recorded, as a call that outlives the run it is made on."""

    @functools.wraps(method)
    def make(self: RecoveringTrainingClient, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        return self._make(method.__name__, args, kwargs)

    return make


class RecoveringTrainingClient(TrainingClient):
    """A TrainingClient that outlives its run. Made by `TrainingClient.with_recovery`."""

    # All that a TrainingClient asks of its run. What it makes of these (`train_step`, every
    # `_async` form, `get_info`, the samplers) is inherited.
    forward = _outliving(TrainingClient.forward)
    forward_backward = _outliving(TrainingClient.forward_backward)
    forward_backward_custom = _outliving(TrainingClient.forward_backward_custom)
    forward_backward_regularized = _outliving(TrainingClient.forward_backward_regularized)
    optim_step = _outliving(TrainingClient.optim_step)
    save_state = _outliving(TrainingClient.save_state)
    save_weights_for_sampler = _outliving(TrainingClient.save_weights_for_sampler)
    save_weights_external = _outliving(TrainingClient.save_weights_external)
    load_state = _outliving(TrainingClient.load_state)
    load_state_with_optimizer = _outliving(TrainingClient.load_state_with_optimizer)
    _snapshot = _outliving(TrainingClient._snapshot)
    _sampler = _outliving(TrainingClient._sampler)
    _info = _outliving(TrainingClient._info)

    def __init__(self, client: TrainingClient, policy: RecoveryPolicy | None = None) -> None:
        super().__init__(
            client.holder,
            client.model_seq_id,
            client.model_id,
            client.base_model,
            calls=client._calls,
        )
        self.policy = policy or RecoveryPolicy()
        self.run_ids: list[str] = []
        """Every run so far, the current one last."""
        self._lock = threading.RLock()  # one for all runs, where each run has its own
        self._over = threading.Event()
        self._is_closed = False
        self._log = CallLog(self.policy)
        self._rebuilder = Rebuilder(self.policy, self._log, client.holder.given_config)
        self._unanswered: set[RecordedCall] = set()
        self._tag = secrets.token_hex(2)  # the same run may have been looked after before
        self._num_steps = 0
        self._num_in_vain = 0
        self._metric: float | None = None
        self._lost: str | None = None
        self._rebuilding: str | None = None
        self._patience: Patience | None = None
        self._next_check_s = time.monotonic() + self.policy.monitor_interval_s
        self._sessions = VisitedSessions(client.holder)
        self._adopt(client)
        self._keeper = Keeper("tinkex-recovery", self._look, self._is_over)
        if self.policy.save_every_steps:
            try:
                self._save().result()  # before it there would be nothing to go back to
            except BaseException:
                self._end()
                raise

    @property
    def num_recoveries(self) -> int:
        return len(self.run_ids) - 1

    def _adopt(self, run: TrainingClient) -> None:
        self.client = run
        """The client of the current run; another one after a recovery."""
        self.holder, self.model_id, self.model_seq_id = run.holder, run.model_id, run.model_seq_id
        self.base_model, self._calls = run.base_model, run._calls
        # A subclass's `on_queue_state_change` hears of every run, not only of the first.
        self._calls.notify(self)
        self._lost = self._rebuilding = self._patience = None
        self.run_ids.append(run.model_id)
        self._sessions.enter(run.holder)

    def on_queue_state_change(
        self, queue_state: types.QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when the reason of waiting changes; override to react to it, on every run."""
        self.client.on_queue_state_change(queue_state, queue_state_reason)

    def unload_model(self, *, options: Options = None) -> APIFuture[types.UnloadModelResponse]:
        """Free the model's memory on the server, for good: a run that you end is not rebuilt."""
        self._end()
        return super().unload_model(options=options)

    def with_recovery(self, policy: RecoveryPolicy | None = None) -> RecoveringTrainingClient:
        """Refused: one policy per run. Give it to the first `with_recovery`."""
        raise ConfigError(
            "This client outlives its run already. For another policy, call "
            "client.client.with_recovery(policy) and go on with what that returns."
        )

    def close(self) -> None:
        """Stop watching and rebuilding, and close what a recovery opened.

        A session to which the ServiceClient has moved stays open: it is closed with that.
        """
        self._is_closed = True
        self._end()
        self._sessions.close(self.policy.attempt_timeout_s)

    def _end(self) -> None:
        self._over.set()
        self._keeper.wake()

    def _is_over(self) -> bool:
        """True once the keeper's thread may end: the client is closed, and nobody waits."""
        return self._over.is_set() and not self._unanswered

    def __copy__(self) -> RecoveringTrainingClient:
        return self  # two of them could not both know the current run

    # -- calls

    def _make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> APIFuture[Any]:
        if self._is_closed:
            raise ClientClosedError("The client is closed. Make a new one from a ServiceClient.")
        call = RecordedCall(method, args, kwargs)
        submit: Callable[[TrainingClient], APIFuture[Any]] = call.make_on
        while True:
            run = self.client
            if needs_logprobs(call):
                # The wait is that of a call which outlives the run. When it did, the logprobs are
                # of another run than the one to be trained, and the call has to begin again.
                submit = prepare(call, run, self._forward_result)
            with self._lock:
                if needs_logprobs(call) and run is not self.client:
                    continue
                self._take_saves()
                self._record(call, submit(self.client), self.client)
            return call.answer

    def _record(self, call: RecordedCall, future: APIFuture[Any], run: TrainingClient) -> None:
        call.position = self._log.position
        call.answer._ender = self._keeper
        self._unanswered.add(call)
        call.answer.add_done_callback(lambda _: self._unanswered.discard(call))
        self._log.add(call)
        self._assign(call, future, run)
        # Last: a future that has ended already calls back now, and must find its call recorded.
        future.add_done_callback(functools.partial(self._ended, call))
        if len(self._unanswered) == 1:  # the keeper looks after the run only now and then
            self._keeper.wake()
        if call.method == "optim_step":
            self._num_steps += 1
            every = self.policy.save_every_steps
            if every and self._num_steps % every == 0:
                self._save()

    def _assign(self, call: RecordedCall, future: APIFuture[Any], run: TrainingClient) -> None:
        """Let the call be answered by this future from here on."""
        call.made = (future, run)
        if call.method == "save_state":
            self._log.watch_save(call, future)
        if self._rebuilding is None:
            call.answer.follow(future)
        else:
            call.answer.waiting.reason = self._rebuilding

    def _ended(self, call: RecordedCall, future: APIFuture[Any]) -> None:
        """Take the run's answer. On the background loop, so nothing here may wait."""
        if future.cancelled():
            call.answer.cancel()
        elif (error := future.exception()) is not None:
            if self._over.is_set() and call.made[0] is future:
                call.answer._fail(error)  # closed: whatever it means, nobody rebuilds
            else:
                self._keeper.submit(self._judge, call, future)
        else:
            call.has_succeeded = True
            # Before anyone is woken: a save that they then ask for carries this metric.
            self._note(call, future.result())
            if call.answer._succeed(future.result()):
                self._num_in_vain = 0  # the run got somewhere; only those lost at once count

    def _note(self, call: RecordedCall, answer: Any) -> None:
        if call.method.startswith("forward_backward"):
            metrics = getattr(answer, "forward_backward", answer).metrics
            self._metric = metrics.get(self.policy.metric, self._metric)

    # -- checkpoints

    def _save(self) -> APIFuture[Any]:
        metadata = {} if self._metric is None else {self.policy.metric: repr(self._metric)}
        name = f"recovery-{self._tag}-{self._num_steps:06d}"
        call = RecordedCall("save_state", (name,), {"user_metadata": metadata}, is_ours=True)
        with self._lock:
            self._record(call, call.make_on(self.client), self.client)
        return call.answer

    def _take_saves(self) -> None:
        if self._rebuilding is None:  # else nothing is forgotten: it may be about to be repeated
            for needless in self._log.take_saves():
                _delete(self.client, needless.path)

    # -- the keeper: is it a loss?

    def _judge(self, call: RecordedCall, future: APIFuture[Any]) -> None:
        """Decide what an error means that came in place of an answer."""
        current, run = call.made
        error = future.exception()
        assert error is not None
        if current is not future:
            return  # the call has moved to another run meanwhile
        try:
            # What an earlier run says about itself is no news of the current one.
            is_loss = run is self.client and self._patience_with(run).is_loss(error)
        except Exception as exc:
            is_loss, error = False, exc
        if not is_loss:
            call.answer._fail(error)
        elif call.answer.done():
            self._lost = _text(error)  # it was cancelled: rebuild when someone waits
        else:
            self._lose(run, error)

    def _look(self) -> float | None:
        """Look after the run; returns when to look again, in seconds, or None for never.

        While anything is awaited, silence counts as a loss after a while: a promise may never be
        kept. Otherwise only the server's word does, and the run is rebuilt at the next call.
        """
        run = self.client
        if self._unanswered:
            self._patience = self._patience or self._patience_with(run)
            if (reason := self._lost or self._patience.look()) is not None:
                self._patience = None
                self._lose(run, RetryableException(reason))
            return SLICE_S
        self._patience = None
        if not self.policy.monitor_interval_s or self._lost is not None:
            return None
        if time.monotonic() >= self._next_check_s:
            health = self._health(run)
            self._next_check_s = time.monotonic() + self.policy.monitor_interval_s
            if health.state == "lost":
                report_loss(run, health.reason)
                self._lost = health.reason
        return self.policy.monitor_interval_s

    def _patience_with(self, run: TrainingClient) -> Patience:
        return Patience(lambda: self._health(run), self.policy.unreachable_s)

    def _health(self, run: TrainingClient) -> RunHealth:
        # A look, or a cancelled call, may have found out already; that spares a question.
        known = self._lost if run is self.client else None
        return RunHealth("lost", known) if known else check_run(run, self._rebuilder.ask_s)

    def _lose(self, run: TrainingClient, error: BaseException) -> None:
        """Rebuild a run that cannot go on, or tell everyone who waits for it."""
        if self._over.is_set():
            self._fail_all(lambda: error)  # closed: nobody wants another run
            return
        reason = _text(error)
        event = RecoveryEvent(run.model_id, reason)
        logger.warning("Run %s is lost (%s); rebuilding it.", run.model_id, reason)
        events.emit("recovery.start", run_id=run.model_id, error_type=type(error).__name__)
        _tell(self.policy.on_lost, event)
        try:
            rebuilt, attempt = self._rebuild(event)
        except Exception as exc:
            self._give_up(event, exc)
            return
        finally:
            self._rebuilding = None
        self._announce(event, rebuilt, attempt)
        # Without the lock, for answers wake foreign code; and after the callback, so that whoever
        # is woken finds what it set up for the new run.
        for call, future in rebuilt.futures.items():
            future.add_done_callback(functools.partial(self._ended, call))
        self._abandon_run(run, rebuilt.saved)

    def _announce(self, event: RecoveryEvent, rebuilt: RebuiltRun, attempt: int) -> None:
        done = replace(
            event,
            attempt=attempt,
            new_run_id=rebuilt.client.model_id,
            checkpoint=rebuilt.saved.path,
            num_repeated=len(rebuilt.futures),
            num_forgotten=self._log.num_forgotten(rebuilt.saved),
        )
        logger.warning("It goes on as %s from %s.", done.new_run_id, done.checkpoint)
        if done.num_forgotten:
            logger.warning(
                "The newest checkpoints could not be loaded: the effect of %d calls is lost.",
                done.num_forgotten,
            )
        events.emit(
            "recovery.stop", run_id=done.new_run_id, attempt=attempt, checkpoint=done.checkpoint
        )
        _tell(self.policy.on_recovered, done)

    def _give_up(self, event: RecoveryEvent, error: Exception) -> None:
        self._num_in_vain = 0  # whoever asks again is given all attempts again
        events.emit("recovery.exception", run_id=event.run_id)
        _tell(self.policy.on_failed, replace(event, reason=str(error)))
        text = f"Run {event.run_id} was lost ({event.reason}) and could not be rebuilt: {error}"

        # One object each: raised in several threads, one would gather the tracebacks of all.
        def failed() -> RecoveryFailedError:
            failure = RecoveryFailedError(text)
            failure.__cause__ = error
            return failure

        self._fail_all(failed)

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        """Tell all who wait; a call that was told to have failed is not repeated later."""
        with self._lock:
            waiting = [call for call in tuple(self._unanswered) if not call.is_settled]
            for call in waiting:
                self._log.drop(call)
                call.made = (None, None)  # whatever its run still says
        for call in waiting:
            call.answer._fail(error())

    # -- the keeper: rebuilding

    def _rebuild(self, event: RecoveryEvent) -> tuple[RebuiltRun, int]:
        """Attempt it until it succeeds: the run that is now the current one, and how many it took.

        Those who wait hear nothing of the new run yet.
        """
        # Else a call that kills each run it is made on would be repeated for ever.
        if self._num_in_vain >= self.policy.max_attempts:
            raise HopelessError(f"{self._num_in_vain} new runs were lost at once")
        for attempt in range(1, self.policy.max_attempts + 1):
            self._explain(f"run {event.run_id} was lost; attempt {attempt} to rebuild it")
            if self._over.wait(self.policy.delay_s(attempt, random.random())):
                raise HopelessError("the client was closed")
            try:
                return self._attempt(), attempt
            except HopelessError:
                raise
            except TinkerError as exc:
                logger.warning("Attempt %d to rebuild it failed: %s", attempt, exc)
                if attempt == self.policy.max_attempts:
                    raise
        raise AssertionError("unreachable")

    def _explain(self, reason: str) -> None:
        """Let `status()` of all who wait say why, from now on."""
        with self._lock:
            # Saves that ended since then count: the newest is the least to repeat. From here on
            # nothing is forgotten, because every call may have to be made again.
            self._rebuilding = None
            self._take_saves()
            self._rebuilding = reason
            for call in tuple(self._unanswered):  # the loop takes out what it answers meanwhile
                call.answer.waiting.state, call.answer.waiting.reason = "queued", reason
                call.answer.follow(None)

    def _attempt(self) -> RebuiltRun:
        # Not the lost run's own service: its session may be what was lost.
        holder = self._rebuilder.connect()
        try:
            rebuilt = self._rebuilder.load(holder, self.run_ids)
            # Most is repeated without the lock, for it takes as long as the training did; calls
            # go on being made meanwhile.
            self._rebuilder.repeat(rebuilt)
            while not self._switch_to(rebuilt):
                self._rebuilder.repeat(rebuilt)
        except BaseException:
            close_session(holder, "errored", "an attempt to rebuild a run failed")
            raise
        self._sessions.leave_gone(holder)
        return rebuilt

    def _switch_to(self, rebuilt: RebuiltRun) -> bool:
        """Make the rebuilt run the current one; False when there is more to be waited for."""
        with self._lock:
            # Calls that came meanwhile are made under the lock, so that none can follow.
            missing = self._rebuilder.missing(rebuilt)
            if any(map(needs_logprobs, missing)):
                return False
            run = rebuilt.client
            rebuilt.futures.update((call, call.make_on(run)) for call in missing)
            self._num_in_vain += 1
            self._adopt(run)
            for call, future in rebuilt.futures.items():
                self._assign(call, future, run)
        return True

    def _abandon_run(self, lost: TrainingClient, saved: SavedPoint) -> None:
        """End the lost run's calls, and tell those that the checkpoint cannot answer."""
        # With a checkpoint that is not the latest, not every call is repeated.
        gone = f"Run {lost.model_id} was lost before it answered; it goes on from {saved.path}."
        lost._calls.abandon(RetryableException(gone))
        for call in tuple(self._unanswered):
            if call.made[1] is lost and not call.is_settled:
                call.answer._fail(RetryableException(gone))


# ------------------------------------------------------------------------------------- small things


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _delete(client: TrainingClient, path: str) -> None:
    """Delete a checkpoint without waiting for it: one too many does no harm."""
    RestClient(client.holder).delete_checkpoint_from_tinker_path(path)


def _tell(callback: Callback | None, event: RecoveryEvent) -> None:
    if callback is None:
        return
    try:
        callback(event)
    except Exception:
        logger.exception("A recovery callback failed; going on.")
