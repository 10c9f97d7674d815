"""Train on through the loss of a run.

`training_client.with_recovery(policy)` gives a client with the same methods. It saves a checkpoint
every so many steps and remembers the calls made since. When the run is lost, or the server was away
for longer than the SDK's own retries, it makes a new run from a checkpoint, repeats the remembered
calls in their order and answers the waiting futures from them: the loop around it sees a pause.

Who waits: the first to ask for a result rebuilds, on its own thread and under the lock; all others
wait for that. The background loop never takes the lock, so it goes on meanwhile. A call moves to
the new run only when all of them are there, so nobody ever waits on a half-built one. Whatever
waits for a server, an attempt to rebuild included, is looked after: a silent server ends the wait.
Errors that the caller can fix pass through, and delivered results are not changed by a repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinkex import types
from tinkex.client import events, validation
from tinkex.client.call_log import BLOCKS, RECORDED, CallLog, RecordedCall, Saved
from tinkex.client.loss_tracing import LossHandle
from tinkex.client.recovery import Callback, RecoveryEvent, RecoveryPolicy
from tinkex.client.run_monitor import SLICE_S, RunHealth, RunMonitor, Watch, check_service
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    BadRequestError,
    LocalServerError,
    NotFoundError,
    RecoveryFailedError,
    RequestFailedError,
    ResultTimeoutError,
    RetryableException,
    TinkerError,
)

if TYPE_CHECKING:
    from tinkex.client.service_client import ServiceClient
    from tinkex.client.training_client import TrainingClient

__all__ = ["RecoveringFuture", "RecoveringTrainingClient"]

logger = logging.getLogger("tinkex.recovery")

_WAITING = frozenset(
    """save_weights_and_get_sampling_client save_weights_and_get_sampling_client_sync
    create_sampling_client get_info get_tokenizer""".split()
)
_LOSSES = (APIConnectionError, RetryableException, LocalServerError)
"""What ends a run whatever the server thinks of it."""


class _HopelessError(TinkerError):
    """Trying again will not help."""


class RecoveringFuture:
    """A result that survives the loss of the run it was asked of. Wait, or await."""

    def __init__(self, wait: Callable[[float | None], Any], is_done: Callable[[], bool]) -> None:
        self._wait = wait
        self.done = is_done

    def result(self, timeout: float | None = None) -> Any:
        """The result; rebuilds the run first when it was lost.

        Raises:
            RecoveryFailedError: Every attempt failed.
        """
        return self._wait(timeout)

    async def result_async(self, timeout: float | None = None) -> Any:
        """Like `result`, without blocking the event loop."""
        return await asyncio.to_thread(self._wait, timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()


class RecoveringTrainingClient:
    """A TrainingClient that outlives its run; what is not defined here is the current client's."""

    def __init__(
        self,
        client: TrainingClient,
        policy: RecoveryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.policy = policy or RecoveryPolicy()
        self.client = client
        """The client of the current run; another one after a recovery."""
        self.run_ids = [client.model_id]
        """Every run so far, the current one last."""
        self._config = client.holder.given_config
        self._sleep = sleep
        self._lock = threading.RLock()
        # A call from a coroutine may have to wait for a rebuild; one thread keeps their order.
        self._in_order = ThreadPoolExecutor(1, thread_name_prefix="tinkex-recovery")
        self._log = CallLog(self.policy)
        self._num_steps = 0
        self._num_in_vain = 0
        self._metric: float | None = None
        self._lost: str | None = None
        self._first_holder = client.holder
        self._service: ServiceClient | None = None
        self._monitor = RunMonitor(self._on_lost, interval_s=self.policy.monitor_interval_s or 1e9)
        self._monitor.watch(client)
        if self.policy.save_every_steps:
            self._wait(self._save(), None)  # before it there would be nothing to go back to

    @property
    def num_recoveries(self) -> int:
        return len(self.run_ids) - 1

    def __getattr__(self, name: str) -> Any:
        if name == "client" or name.startswith("__"):  # not made yet: `copy` looks before that
            raise AttributeError(name)
        if name in RECORDED:
            return lambda *args, **kwargs: self._make(name, args, kwargs)
        if name in _WAITING:
            return lambda *args, **kwargs: self._on_a_live_run(
                lambda run: getattr(run, name)(*args, **kwargs)
            )
        plain = name.removesuffix("_async")
        if plain != name and plain in RECORDED | _WAITING | {"train_step"}:
            return functools.partial(self._elsewhere, getattr(self, plain))
        return getattr(self.client, name)

    async def _elsewhere(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it without blocking the event loop, after all that was called like this before."""
        call = functools.partial(contextvars.copy_context().run, method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._in_order, call)

    def train_step(
        self, data: Any, loss_fn: str, optim_params: Any, loss_fn_config: Any = None
    ) -> RecoveringFuture:
        """`forward_backward` and `optim_step` together, as `TrainingClient.train_step`."""
        from tinkex.client.train_step import TrainStepResult

        validation.check_optim_params(optim_params, None)  # before anything is sent
        with self._lock:
            loss = self._make("forward_backward", (data, loss_fn, loss_fn_config), {})
            step = self._make("optim_step", (optim_params,), {})

        def both(timeout: float | None) -> TrainStepResult:
            return TrainStepResult(loss.result(timeout), step.result(timeout))

        return RecoveringFuture(both, lambda: loss.done() and step.done())

    def close(self) -> None:
        """Stop watching, and close what a recovery opened."""
        self._monitor.stop()
        self._in_order.shutdown(wait=False)
        if self._service is not None:
            self._service.close().result(self.policy.attempt_timeout_s)

    # -- calls

    def _make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecoveringFuture:
        with self._lock:
            self._take_saves()
            call = self._record(method, args, kwargs)
            if method == "optim_step":
                self._num_steps += 1
                every = self.policy.save_every_steps
                if every and self._num_steps % every == 0:
                    self._save()
        return RecoveringFuture(
            lambda timeout: self._wait(call, timeout), lambda: bool(call.made[0].done())
        )

    def _record(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_ours: bool = False
    ) -> RecordedCall:
        call = RecordedCall(method, args, kwargs, self._log.position, is_ours)
        call.made = self._on_a_live_run(
            lambda run: self._submit(call, run), blocks=method in BLOCKS
        )
        self._log.add(call)
        return call

    def _submit(self, call: RecordedCall, run: TrainingClient) -> tuple[Any, Any]:
        args = [_rebound(arg, run) for arg in call.args]
        kwargs = {name: _rebound(arg, run) for name, arg in call.kwargs.items()}
        future = getattr(run, call.method)(*args, **kwargs)
        if call.method == "save_state":
            self._log.watch_save(call, future)
        return future, run

    def _on_a_live_run(self, act: Callable[[TrainingClient], Any], *, blocks: bool = True) -> Any:
        """Do something that may itself find the run lost: rebuild and do it again."""
        while True:
            run = self.client
            try:
                if not blocks:
                    return act(run)
                with self._looked_after(run):
                    return act(run)
            except TinkerError as exc:
                if self.client is run:
                    if not self._is_loss(exc, run):
                        raise
                    self._recover(run, exc)

    def _wait(self, call: RecordedCall, timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            future, run = made = call.made
            try:
                answer = self._poll(future, run, deadline)
            except ResultTimeoutError:
                raise
            except TinkerError as exc:
                is_loss = run is self.client and self._is_loss(exc, run)
                with self._lock:  # whoever rebuilds meanwhile has moved the call when it is done
                    if call.made is not made:
                        continue
                    if not is_loss:
                        call.is_answered = True
                        raise
                    self._recover(run, exc)
                continue
            with self._lock:
                call.is_answered = True
                self._num_in_vain = 0
                self._note(call, answer)
            return answer

    def _poll(self, future: Any, run: TrainingClient, deadline: float | None) -> Any:
        """Wait for a future, and look after its run meanwhile: a promise may never be kept."""
        watch = self._watch(run)
        while True:
            left_s = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
            try:
                return future.result(max(left_s, 0.0))
            except ResultTimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                if (reason := watch.look()) is not None and not future.done():
                    raise RetryableException(reason) from None

    def _looked_after(self, run: TrainingClient) -> AbstractContextManager[None]:
        """While a block waits for the run: end its wait when there is nothing to wait for."""
        return self._watch(run).during(lambda why: run._abandon(RetryableException(why)))

    def _watch(self, run: TrainingClient) -> Watch:
        return Watch(lambda: self._health(run), self.policy.unreachable_s)

    def _health(self, run: TrainingClient) -> RunHealth:
        known = self._lost if run is self.client else None
        known = known or self._never_sent(run)
        return RunHealth("lost", known) if known else self._monitor.check(run)

    def _never_sent(self, run: TrainingClient) -> str | None:
        """Why a call did not arrive. The server misses its number, so none after it will run."""
        for call in self._log.calls:
            future, made_on = call.made
            if made_on is run and future.done() and not future.cancelled():
                error = future.exception()
                if isinstance(error, _LOSSES):
                    return str(error)
        return None

    def _is_loss(self, error: TinkerError, run: TrainingClient) -> bool:
        """True when the error means that this run cannot go on."""
        if isinstance(error, _LOSSES):
            return True
        if isinstance(error, APIStatusError) and error.category == "server":
            return True
        if isinstance(error, APIStatusError) and error.status_code == 410:
            return True
        if isinstance(error, APIStatusError | RequestFailedError):
            # The request may be wrong, or the run may be gone: the server knows which. It may be
            # gone itself by now; then the request is made again where there is one.
            return self._watch(run).decide() is not None
        return False

    def _on_lost(self, run: TrainingClient, reason: str) -> None:
        if run is self.client:
            self._lost = reason

    def _note(self, call: RecordedCall, answer: Any) -> None:
        if call.method.startswith("forward_backward"):
            metrics = getattr(answer, "forward_backward", answer).metrics
            self._metric = metrics.get(self.policy.metric, self._metric)

    # -- checkpoints

    def _save(self) -> RecordedCall:
        metadata = {} if self._metric is None else {self.policy.metric: repr(self._metric)}
        name = f"recovery-{self._num_steps:06d}"
        return self._record("save_state", (name,), {"user_metadata": metadata}, is_ours=True)

    def _take_saves(self) -> None:
        for needless in self._log.take_saves():
            _delete(self.client, needless.path)

    def _known(self, service: ServiceClient) -> list[Saved]:
        """The checkpoints there are, newest first."""
        if self.policy.checkpoint.startswith("tinker://"):
            return [Saved(self.policy.checkpoint, self._log.position)]
        if self._log.saved:
            return self._log.saved[::-1]
        rest = service.create_rest_client()
        found: list[types.Checkpoint] = []
        for run_id in self.run_ids:
            with contextlib.suppress(NotFoundError):
                found += rest.list_checkpoints(run_id).result().checkpoints
        return self._log.place(found)

    # -- rebuilding

    def _recover(self, lost: TrainingClient, error: TinkerError) -> None:
        """Replace `lost` by a new run. Whoever comes second finds it done."""
        with self._lock:
            if self.client is not lost:
                return
            reason = str(error) or type(error).__name__
            event = RecoveryEvent(lost.model_id, reason)
            logger.warning("Run %s is lost (%s); rebuilding it.", lost.model_id, reason)
            events.emit("recovery.start", run_id=lost.model_id, error_type=type(error).__name__)
            _tell(self.policy.on_lost, event)
            self._num_in_vain += 1
            try:
                if self._num_in_vain > self.policy.max_attempts:
                    raise _HopelessError(
                        f"{self._num_in_vain - 1} new runs were lost at once"
                    ) from error
                done = self._try(event)
            except TinkerError as exc:
                events.emit("recovery.exception", run_id=lost.model_id)
                _tell(self.policy.on_failed, replace(event, reason=str(exc)))
                raise RecoveryFailedError(
                    f"Run {lost.model_id} was lost ({reason}) and could not be rebuilt: {exc}"
                ) from exc
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
            _tell(self.policy.on_recovered, done)

    def _try(self, event: RecoveryEvent) -> RecoveryEvent:
        for attempt in range(1, self.policy.max_attempts + 1):
            self._sleep(self.policy.delay_s(attempt, random.random()))
            try:
                return self._attempt(replace(event, attempt=attempt))
            except _HopelessError:
                raise
            except TinkerError as exc:
                logger.warning("Attempt %d to rebuild it failed: %s", attempt, exc)
                if attempt == self.policy.max_attempts:
                    raise
        raise AssertionError("unreachable")

    def _attempt(self, event: RecoveryEvent) -> RecoveryEvent:
        service = self._connect()
        watch = Watch(lambda: check_service(service), self.policy.unreachable_s)
        try:
            self._take_saves()
            with watch.during(lambda reason: service.close("errored", reason)):
                saved, run = self._load_first(service, event.run_id)
                calls = self._log.to_repeat(saved)
                made = [self._submit(call, run) for call in calls]
        except BaseException:
            service.close("errored", "an attempt to rebuild a run failed")
            raise
        for call, now in zip(calls, made, strict=True):
            call.made = now
        self._move(service, run, saved)
        return replace(
            event,
            new_run_id=run.model_id,
            checkpoint=saved.path,
            num_repeated=len(calls),
            num_forgotten=self._log.num_forgotten(saved),
        )

    def _move(self, service: ServiceClient, run: TrainingClient, saved: Saved) -> None:
        """From here on the new run is the run, and nothing calls for the old one any more."""
        lost, self.client, self._lost = self.client, run, None
        self.run_ids.append(run.model_id)
        self._monitor.watch(run)
        gone = f"Run {lost.model_id} was lost before it answered; it goes on from {saved.path}."
        lost._abandon(RetryableException(gone))
        old, self._service = self._service, service
        if old is not None and old is not service:
            old.close("errored", "its run was lost")
        if self._first_holder is not run.holder:
            self._first_holder.end_if_gone()

    def _connect(self) -> ServiceClient:
        from tinkex.client.service_client import ServiceClient

        if self.policy.connect is not None:
            try:
                return self.policy.connect()
            except Exception as exc:
                raise RetryableException(f"connect() failed: {exc!r}") from exc
        window_s = min(self._config.retry_window_s, self.policy.attempt_timeout_s)
        return ServiceClient(config=self._config.replace(retry_window_s=window_s))

    def _load_first(self, service: ServiceClient, lost: str) -> tuple[Saved, TrainingClient]:
        """A new run from the first checkpoint that can still be loaded."""
        create: Callable[..., TrainingClient] = service.create_training_client_from_state
        if self.policy.restore_optimizer:
            create = service.create_training_client_from_state_with_optimizer
        known = self._known(service)
        refusals = self._log.distrusted(known)
        for saved in self._log.candidates(known):
            try:
                return saved, create(saved.path, user_metadata={"recovered_from": lost})
            except (NotFoundError, BadRequestError, RequestFailedError) as exc:
                if exc.category != "user":
                    raise
                logger.warning("Checkpoint %s cannot be loaded: %s", saved.path, exc)
                refusals.append(f"{saved.path}: {exc}")
        raise _HopelessError(
            "no checkpoint can be loaded. "
            + ("; ".join(refusals) or "None was saved: set save_every_steps, or call save_state.")
        )


# ------------------------------------------------------------------------------------- small things


def _rebound(value: Any, run: TrainingClient) -> Any:
    """A traced loss belongs to a session; in another one its graph runs on this side."""
    if isinstance(value, LossHandle) and value.session_id != run.holder.session_id:
        return replace(value, session_id=run.holder.session_id or "", loss_id=None)
    return value


def _delete(client: TrainingClient, path: str) -> None:
    """Ask for it and do not wait: a checkpoint too many does no harm."""
    from tinkex.client.rest_client import RestClient

    RestClient(client.holder).delete_checkpoint_from_tinker_path(path)


def _tell(callback: Callback | None, event: RecoveryEvent) -> None:
    if callback is None:
        return
    try:
        callback(event)
    except Exception:
        logger.exception("A recovery callback failed; going on.")
