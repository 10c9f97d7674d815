"""Make a recorded call on a run: the first time, or again on the run that replaced it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinkex.client.futures import APIFuture
from tinkex.client.recovery.call_log import RecordedCall
from tinkex.client.training.loss_tracing import LossHandle
from tinkex.client.training.training_client import TrainingClient

if TYPE_CHECKING:
    from tinkex.client.training.recovering_client import RecoveringTrainingClient


class RunMovedError(Exception):
    """The run was replaced between the halves of a call."""


class CustomLossClient:
    """A client as a custom loss sees it: the forward pass is waited for, the backward placed.

    The wait is that of a call which outlives the run. When it did, the halves belong to different
    runs, and the call has to begin again.
    """

    def __init__(
        self,
        owner: RecoveringTrainingClient,
        run: TrainingClient,
        placing: contextlib.ExitStack,
    ) -> None:
        self._owner, self._run, self._placing = owner, run, placing
        self.holder = run.holder
        self.forward = owner.forward

    def forward_backward(self, *args: Any, **kwargs: Any) -> APIFuture[Any]:
        if self._owner._take_place(self._placing) is not self._run:
            raise RunMovedError
        return self._run.forward_backward(*args, **kwargs)


def make_on(call: RecordedCall, seen: Any, run: TrainingClient) -> APIFuture[Any]:
    """Make the call on `run`, or on what stands for it."""
    args = [_rebound(arg, run) for arg in call.args]
    kwargs = {name: _rebound(arg, run) for name, arg in call.kwargs.items()}
    # By the run's class, on what stands for it: a custom loss then makes its passes through `seen`.
    future: APIFuture[Any] = getattr(type(run), call.method)(seen, *args, **kwargs)
    return future


def _rebound(value: Any, run: TrainingClient) -> Any:
    """A traced loss belongs to a session; in another one its graph runs on this side."""
    if isinstance(value, LossHandle) and value.session_id != run.holder.session_id:
        return replace(value, session_id=run.holder.session_id or "", loss_id=None)
    return value
