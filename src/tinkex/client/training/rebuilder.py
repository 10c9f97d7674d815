"""Make a new run from a checkpoint of a lost one, and repeat on it the calls made since.

One attempt at a time. Every wait is patient with a silent server only for as long as the policy
says. When to try, and when the new run takes over, is for `recovering_client.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture
from tinkex.client.http.options import Options
from tinkex.client.recovery.call_log import CallLog, RecordedCall, SavedPoint
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.recovery.run_monitor import Patience, check_run, check_service
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.session.holder import Holder
from tinkex.client.training.creation import create_from_state
from tinkex.client.training.custom_calls import Forward, Submit, prepare_custom
from tinkex.client.training.loss_tracing import LossHandle
from tinkex.client.training.regularized import prepare_regularized
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import (
    BadRequestError,
    NotFoundError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinkex.types.account.checkpoints import is_tinker_path

logger = logging.getLogger("tinkex.recovery")

_PREPARE: dict[str, Callable[..., Submit[Any]]] = {
    "forward_backward_custom": prepare_custom,
    "forward_backward_regularized": prepare_regularized,
}


def needs_logprobs(call: RecordedCall) -> bool:
    """True for a call that waits for a forward pass before it is submitted."""
    return call.method in _PREPARE


def prepare(call: RecordedCall, run: TrainingClient, forward: Forward) -> Submit[Any]:
    """Wait for the forward pass of such a call; returns the function that submits the rest."""
    args = [_rebound(arg, run) for arg in call.args]
    kwargs = {name: _rebound(arg, run) for name, arg in call.kwargs.items()}
    return _PREPARE[call.method](run.holder, forward, *args, **kwargs)


def _rebound(value: Any, run: TrainingClient) -> Any:
    """A traced loss belongs to a session; in another one its graph runs on this side."""
    if isinstance(value, LossHandle) and value.session_id != run.holder.session_id:
        return replace(value, session_id=run.holder.session_id or "", loss_id=None)
    return value


class HopelessError(TinkerError):
    """Trying again will not help."""


@dataclass(frozen=True, slots=True)
class RebuiltRun:
    """A run that began as a checkpoint, and the futures of the calls repeated on it."""

    client: TrainingClient
    saved: SavedPoint
    futures: dict[RecordedCall, APIFuture[Any]] = field(default_factory=dict)


class Rebuilder:
    """Rebuilds the runs of one recovering client."""

    def __init__(self, policy: RecoveryPolicy, log: CallLog, config: ClientConfig) -> None:
        self._policy = policy
        self._log = log
        self._config = config
        self.ask_s = min(10.0, policy.unreachable_s)
        """The longest wait for an answer about a run or a server."""

    def connect(self) -> Holder:
        """Open a session for one attempt, which gives up sooner than a patient program would."""
        if self._policy.connect is not None:
            try:
                return self._policy.connect().holder
            except Exception as exc:  # the user's own code: whatever it raises may pass
                raise RetryableException(f"connect() failed: {exc!r}") from exc
        window_s = min(self._config.retry_window_s, self._policy.attempt_timeout_s)
        # It answered before it was lost, so it is waited for as long as any server that is known.
        return Holder(self._config.replace(retry_window_s=window_s, startup_window_s=window_s))

    # -- from a checkpoint

    def load(self, holder: Holder, run_ids: Sequence[str]) -> RebuiltRun:
        """Make a run from the first checkpoint that can still be loaded."""
        patience = Patience(lambda: check_service(holder, self.ask_s), self._policy.unreachable_s)
        known = self._known(holder, run_ids, patience)
        refusals = self._log.distrusted(known)
        for saved in self._log.candidates(known):
            request = types.LoadWeightsRequest(
                path=saved.path,
                user_metadata={"recovered_from": run_ids[-1]},
                optimizer=self._policy.restore_optimizer,
            )
            try:
                return RebuiltRun(patience.wait(_create(holder, request)), saved)
            except (NotFoundError, BadRequestError, RequestFailedError) as exc:
                # The server's own trouble says nothing about the checkpoint; an older one would
                # throw work away. That is for the next attempt.
                if exc.category != "user":
                    raise
                logger.warning("Checkpoint %s cannot be loaded: %s", saved.path, exc)
                refusals.append(f"{saved.path}: {exc}")
        raise HopelessError(
            "no checkpoint can be loaded. "
            + ("; ".join(refusals) or "None was saved: set save_every_steps, or call save_state.")
        )

    def _known(
        self, holder: Holder, run_ids: Sequence[str], patience: Patience
    ) -> list[SavedPoint]:
        """The checkpoints there are, newest first."""
        if is_tinker_path(self._policy.checkpoint):
            return [SavedPoint(self._policy.checkpoint, self._log.position)]
        # The positions of saves that we saw are known; a listing is asked for only without them.
        if self._log.saved:
            return self._log.saved[::-1]
        rest = RestClient(holder)
        listed: list[types.Checkpoint] = []
        for run_id in run_ids:
            with contextlib.suppress(NotFoundError):
                listed += patience.wait(rest.list_checkpoints(run_id)).checkpoints
        return self._log.locate(listed)

    # -- calls

    def repeat(self, rebuilt: RebuiltRun) -> None:
        """Repeat the calls that the checkpoint does not hold and that were not repeated yet.

        Waits for those that had succeeded: failing now, they would leave another state.
        """
        run = rebuilt.client
        patience = Patience(lambda: check_run(run, self.ask_s), self._policy.unreachable_s)

        def forward(
            data: Sequence[types.Datum], teacher: str | None, options: Options
        ) -> types.ForwardBackwardOutput:
            passed = run.forward(data, "cross_entropy", teacher=teacher, options=options)
            return patience.wait(passed)

        for call in self.missing(rebuilt):
            make = prepare(call, run, forward) if needs_logprobs(call) else call.make_on
            rebuilt.futures[call] = make(run)
        for call, future in rebuilt.futures.items():
            if call.has_succeeded:
                _check_repeated(call, future, patience)

    def missing(self, rebuilt: RebuiltRun) -> list[RecordedCall]:
        """The calls to repeat that were not repeated yet."""
        calls = self._log.to_repeat(rebuilt.saved)
        return [call for call in calls if call not in rebuilt.futures]


def _create(holder: Holder, request: types.LoadWeightsRequest) -> APIFuture[TrainingClient]:
    return holder.spawn(lambda waiting: create_from_state(holder, request, waiting))


def _check_repeated(call: RecordedCall, future: APIFuture[Any], patience: Patience) -> None:
    try:
        patience.wait(future)
    except TinkerError as exc:
        if patience.is_loss(exc):
            raise
        raise HopelessError(
            f"{call.method} had succeeded, and fails when it is made again: {exc}"
        ) from exc
