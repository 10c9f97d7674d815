"""Train on through the loss of a run.

`training_client.with_recovery(policy)` gives a TrainingClient that saves a checkpoint every so many
steps and remembers the calls made since. When the run is lost, or the server was away for longer
than the SDK's own retries, it makes a new run from a checkpoint, repeats the remembered calls in
their order and answers the waiting futures from them: the loop around it sees a pause.

Who waits for whom: a call is made on the current run and returns at once with a future of its own,
its answer. The background loop ends the answer when the run answers. Errors go to the keeper, one
thread per client, which also looks after the run while any answer is open. It decides whether an
error is a loss, and rebuilds; nobody else does. The lock is held only to put a call in its place,
never while something is waited for, so calls can be made from anywhere, a callback included, while
a run is rebuilt: they are repeated with the others. A call moves to the new run only when all of
them are there. Whatever the keeper waits for is looked after too: a silent server ends the wait.
Errors that the caller can fix pass through, and delivered results are not changed by a repeat.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tinkex import events
from tinkex.client.futures import APIFuture
from tinkex.client.recovery.call_log import BLOCKS, CallLog, RecordedCall, SavedPoint
from tinkex.client.recovery.keeper import Keeper
from tinkex.client.recovery.policy import Callback, RecoveryEvent, RecoveryPolicy
from tinkex.client.recovery.run_monitor import Lookout, RunHealth, RunMonitor, check_service
from tinkex.client.recovery.visited_sessions import VisitedSessions, close_session
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.session.holder import Holder
from tinkex.client.session.polling import QueueWatch
from tinkex.client.training.rebuilder import HopelessError, Rebuilder
from tinkex.client.training.replay import CustomLossClient, RunMovedError, make_on
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    ConfigError,
    LocalServerError,
    RecoveryFailedError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)

if TYPE_CHECKING:
    from tinkex import types

logger = logging.getLogger("tinkex.recovery")
P = ParamSpec("P")
T = TypeVar("T")

_ENDS_A_RUN = (APIConnectionError, RetryableException, LocalServerError)
"""Errors that do, whatever the server thinks of the run."""


def _outliving(
    method: Callable[Concatenate[TrainingClient, P], APIFuture[T]],
) -> Callable[Concatenate[RecoveringTrainingClient, P], APIFuture[T]]:
    """The same method, as a call that outlives the run it is made on."""

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
        # Not the base's: it would make a second order of calls on the same run.
        self.policy = policy or RecoveryPolicy()
        self.run_ids: list[str] = []
        """Every run so far, the current one last."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._log = CallLog(self.policy)
        self._rebuilder = Rebuilder(self.policy, self._log, client.holder.given_config)
        self._unanswered: set[RecordedCall] = set()
        self._tag = secrets.token_hex(2)  # the same run may have been looked after before
        self._num_steps = 0
        self._num_in_vain = 0
        self._metric: float | None = None
        self._lost: str | None = None
        self._rebuilding: str | None = None
        self._lookout: Lookout | None = None
        self._sessions = VisitedSessions(client.holder)
        self._keeper = Keeper("tinkex-recovery", self._look)
        self._ask_s = min(10.0, self.policy.unreachable_s)
        self._monitor = RunMonitor(
            self._on_lost,
            interval_s=self.policy.monitor_interval_s or 1e9,
            timeout_s=self._ask_s,
        )
        self._adopt(client)
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
        self.base_model, self._steps = run.base_model, run._steps
        # A subclass's `on_queue_state_change` hears of every run, not only of the first.
        run._watch = QueueWatch(f"Training of {run.model_id}", self)
        self._lost = self._rebuilding = self._lookout = None
        self.run_ids.append(run.model_id)
        self._sessions.enter(run.holder)
        self._monitor.watch(run)

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Called when the reason of waiting changes; override to react to it, on every run."""
        self.client.on_queue_state_change(queue_state, queue_state_reason)

    def unload_model(self) -> APIFuture[types.UnloadModelResponse]:
        """Free the model's memory on the server, for good: a run that you end is not rebuilt."""
        self._end()
        return super().unload_model()

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
        self._end()
        self._sessions.close(self.policy.attempt_timeout_s)

    def _end(self) -> None:
        self._over.set()
        self._monitor.stop()

    def __copy__(self) -> RecoveringTrainingClient:
        return self  # two of them could not both know the current run

    # -- calls

    def _make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> APIFuture[Any]:
        while True:
            run = self.client
            with contextlib.ExitStack() as placing:
                if method in BLOCKS:
                    seen: Any = CustomLossClient(self, run, placing)
                else:
                    seen = run = self._take_place(placing)
                call = RecordedCall(method, args, kwargs, 0)
                try:
                    future = make_on(call, seen, run)
                except RunMovedError:
                    continue
                self._record(call, future, run)
            return call.answer

    def _take_place(self, placing: contextlib.ExitStack) -> TrainingClient:
        """Nobody else makes a call until `placing` ends. Gives the current run."""
        placing.enter_context(self._lock)
        self._take_saves()
        return self.client

    def _record(self, call: RecordedCall, future: APIFuture[Any], run: TrainingClient) -> None:
        call.position = self._log.position
        call.answer._ender = self._keeper
        self._unanswered.add(call)
        call.answer.add_done_callback(lambda _: self._unanswered.discard(call))
        self._log.add(call)
        self._place(call, future, run)
        # Last: a future that has ended already calls back now, and must find its call in place.
        future.add_done_callback(functools.partial(self._ended, call))
        self._keeper.stay()
        if call.method == "optim_step":
            self._num_steps += 1
            every = self.policy.save_every_steps
            if every and self._num_steps % every == 0:
                self._save()

    def _place(self, call: RecordedCall, future: APIFuture[Any], run: TrainingClient) -> None:
        """From here on the call is answered by this future."""
        call.made = (future, run)
        if call.method == "save_state":
            self._log.watch_save(call, future)
        if self._rebuilding is None:
            call.answer.follow(future)
        else:
            call.answer.waiting.reason = self._rebuilding

    def _ended(self, call: RecordedCall, future: APIFuture[Any]) -> None:
        """The run answered. On the background loop, so nothing here may wait."""
        if future.cancelled():
            call.answer.cancel()
        elif future.exception() is not None:
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
        call = RecordedCall("save_state", (name,), {"user_metadata": metadata}, 0, is_ours=True)
        with self._lock:
            self._record(call, make_on(call, self.client, self.client), self.client)
        return call.answer

    def _take_saves(self) -> None:
        if self._rebuilding is None:  # else nothing is forgotten: it may be about to be repeated
            for needless in self._log.take_saves():
                _delete(self.client, needless.path)

    # -- the keeper: is it a loss?

    def _judge(self, call: RecordedCall, future: APIFuture[Any]) -> None:
        """An error came in place of an answer."""
        now, run = call.made
        error = future.exception()
        assert error is not None
        if now is not future:
            return  # the call has moved to another run meanwhile
        try:
            # What an earlier run says about itself is no news of the current one.
            is_loss = run is self.client and self._is_loss(error, run)
        except Exception as exc:
            is_loss, error = False, exc
        if not is_loss:
            call.answer._fail(error)
        elif call.answer.done():
            self._on_lost(run, _text(error))  # it was cancelled: rebuild when someone waits
        else:
            self._lose(run, error)

    def _is_loss(self, error: BaseException, run: TrainingClient) -> bool:
        """True when the error means that this run cannot go on."""
        if isinstance(error, _ENDS_A_RUN):
            return True
        if isinstance(error, APIStatusError) and error.category == "server":
            return True
        if isinstance(error, APIStatusError) and error.status_code == 410:
            return True
        if isinstance(error, APIStatusError | RequestFailedError):
            # The request may be wrong, or the run may be gone: the server knows which. It may be
            # gone itself by now; then the request is made again where there is one.
            return self._watch_over(run).decide() is not None
        return False

    def _look(self) -> bool:
        """Look after the run while anything is awaited: a promise may never be kept."""
        if not self._unanswered:
            self._lookout = None
            return False
        run = self.client
        self._lookout = self._lookout or self._watch_over(run)
        if (reason := self._lost or self._lookout.look()) is not None:
            self._lookout = None
            self._lose(run, RetryableException(reason))
        return True

    def _watch_over(self, run: TrainingClient) -> Lookout:
        return Lookout(lambda: self._health(run), self.policy.unreachable_s)

    def _health(self, run: TrainingClient) -> RunHealth:
        # The monitor or a cancelled call may have found out already; that spares a question.
        known = self._lost if run is self.client else None
        return RunHealth("lost", known) if known else self._monitor.check(run)

    def _on_lost(self, run: TrainingClient, reason: str) -> None:
        if run is self.client:
            self._lost = reason

    def _lose(self, run: TrainingClient, error: BaseException) -> None:
        """The run cannot go on. Rebuild it, or tell everyone who waits for it."""
        if self._over.is_set():
            self._fail_all(lambda: error)  # closed: nobody wants another run
            return
        reason = _text(error)
        event = RecoveryEvent(run.model_id, reason)
        logger.warning("Run %s is lost (%s); rebuilding it.", run.model_id, reason)
        events.emit("recovery.start", run_id=run.model_id, error_type=type(error).__name__)
        _tell(self.policy.on_lost, event)
        try:
            done, answer = self._rebuild(event)
        except Exception as exc:
            self._give_up(event, exc)
            return
        finally:
            self._rebuilding = None
        logger.warning("It goes on as %s from %s.", done.new_run_id, done.checkpoint)
        if done.num_forgotten:
            logger.warning(
                "The newest checkpoints could not be loaded: the effect of %d calls is lost.",
                done.num_forgotten,
            )
        events.emit(
            "recovery.stop",
            run_id=done.new_run_id,
            attempt=done.attempt,
            checkpoint=done.checkpoint,
        )
        # The callback first: whoever is woken by an answer finds what it set up for the new run.
        _tell(self.policy.on_recovered, done)
        answer()

    def _give_up(self, event: RecoveryEvent, error: Exception) -> None:
        self._num_in_vain = 0  # whoever asks again is given all attempts again
        events.emit("recovery.exception", run_id=event.run_id)
        _tell(self.policy.on_failed, replace(event, reason=str(error)))
        text = f"Run {event.run_id} was lost ({event.reason}) and could not be rebuilt: {error}"

        # One object each: raised in several threads, one would gather the tracebacks of all.
        def failed() -> RecoveryFailedError:
            told = RecoveryFailedError(text)
            told.__cause__ = error
            return told

        self._fail_all(failed)

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        """All who wait are told; what they were told failed is not made again later."""
        with self._lock:
            waiting = [call for call in tuple(self._unanswered) if not call.is_settled]
            for call in waiting:
                self._log.drop(call)
                call.made = (None, None)  # whatever its run still says
        for call in waiting:
            call.answer._fail(error())

    # -- the keeper: rebuilding

    def _rebuild(self, event: RecoveryEvent) -> tuple[RecoveryEvent, Callable[[], None]]:
        """What there is to tell, and the call that then lets the new run answer."""
        # Else a call that kills each run it is made on would be repeated for ever.
        if self._num_in_vain >= self.policy.max_attempts:
            raise HopelessError(f"{self._num_in_vain} new runs were lost at once")
        for attempt in range(1, self.policy.max_attempts + 1):
            self._explain(f"run {event.run_id} was lost; attempt {attempt} to rebuild it")
            if self._over.wait(self.policy.delay_s(attempt, random.random())):
                raise HopelessError("the client was closed")
            try:
                return self._attempt(replace(event, attempt=attempt))
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

    def _attempt(self, event: RecoveryEvent) -> tuple[RecoveryEvent, Callable[[], None]]:
        # Not the lost run's own service: its session may be what was lost.
        holder = self._rebuilder.connect()
        try:
            saved, made, lost = self._move_to(holder)
        except BaseException:
            close_session(holder, "errored", "an attempt to rebuild a run failed")
            raise
        done = replace(
            event,
            new_run_id=self.client.model_id,
            checkpoint=saved.path,
            num_repeated=len(made),
            num_forgotten=self._log.num_forgotten(saved),
        )

        def answer() -> None:
            for call, future in made.items():  # without the lock: answers wake foreign code
                future.add_done_callback(functools.partial(self._ended, call))
            self._abandon_run(lost, saved)

        return done, answer

    def _move_to(
        self, holder: Holder
    ) -> tuple[SavedPoint, dict[RecordedCall, APIFuture[Any]], TrainingClient]:
        """A new run there, on which every call is made that the checkpoint does not hold.

        Returns that checkpoint, those calls, which nobody is told of yet, and the run that is lost.
        """

        def give_up(reason: str) -> None:
            close_session(holder, "errored", reason)

        watch = Lookout(lambda: check_service(holder, self._ask_s), self.policy.unreachable_s)
        made: dict[RecordedCall, APIFuture[Any]] = {}
        with watch.during(give_up):
            saved, run = self._rebuilder.load_first(holder, self.run_ids)
        while True:
            # Most is repeated without the lock, for it takes as long as the training did; calls
            # go on being made meanwhile. Only those that came last are made under it.
            with self._watch_over(run).during(give_up):
                for call in self._log.to_repeat(saved):
                    if call not in made:
                        made[call] = make_on(call, run, run)
                for call, future in made.items():
                    self._check_repeated(call, future, run)
            with self._lock:
                rest = [call for call in self._log.to_repeat(saved) if call not in made]
                if any(call.method in BLOCKS for call in rest):
                    continue  # made meanwhile, and not to be waited for under the lock
                made.update((call, make_on(call, run, run)) for call in rest)
                lost = self.client
                self._num_in_vain += 1
                self._adopt(run)
                for call, future in made.items():
                    self._place(call, future, run)
            break
        self._sessions.leave_gone(run.holder)
        return saved, made, lost

    def _check_repeated(
        self, call: RecordedCall, future: APIFuture[Any], run: TrainingClient
    ) -> None:
        """Wait for a call that had succeeded. Failing now, it would leave another state."""
        if not call.has_succeeded:
            return
        try:
            future.result()
        except TinkerError as exc:
            if self._is_loss(exc, run):
                raise
            raise HopelessError(
                f"{call.method} had succeeded, and fails when it is made again: {exc}"
            ) from exc

    def _abandon_run(self, lost: TrainingClient, saved: SavedPoint) -> None:
        """Nothing calls for it any more; who could not be answered from the checkpoint is told."""
        # With a checkpoint that is not the latest, not every call is repeated.
        gone = f"Run {lost.model_id} was lost before it answered; it goes on from {saved.path}."
        lost._abandon(RetryableException(gone))
        for call in tuple(self._unanswered):
            if call.made[1] is lost and not call.is_settled:
                call.answer._fail(RetryableException(gone))


# ------------------------------------------------------------------------------------- small things


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _delete(client: TrainingClient, path: str) -> None:
    """Ask for it and do not wait: a checkpoint too many does no harm."""
    RestClient(client.holder).delete_checkpoint_from_tinker_path(path)


def _tell(callback: Callback | None, event: RecoveryEvent) -> None:
    if callback is None:
        return
    try:
        callback(event)
    except Exception:
        logger.exception("A recovery callback failed; going on.")
