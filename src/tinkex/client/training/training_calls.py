"""How a training call travels: cut into requests, put into the model's order, polled, joined.

`TrainingClient` says which calls exist; this says what happens to one. The place in the order is
taken when the call is made (`submission.py`); waiting for results goes on beside it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from tinkex import events, types
from tinkex.client import validation
from tinkex.client.futures import APIFuture, Waiting, gather_or_cancel, spawn
from tinkex.client.http.call import Call
from tinkex.client.session.holder import Holder
from tinkex.client.session.polling import Expect, QueueWatch
from tinkex.client.training.pass_requests import pass_parts
from tinkex.client.training.sample_age import StepCount
from tinkex.client.training.submission import CallPart, Submission, SubmitQueue

logger = logging.getLogger("tinkex.training")
T = TypeVar("T")


class TrainingCalls:
    """The machinery of one model's calls."""

    def __init__(
        self, holder: Holder, model_seq_id: int, model_id: str, base_model: str | None = None
    ) -> None:
        self.holder = holder
        self.model_id = model_id
        self.base_model = base_model
        """As far as the maker of this client was told; `get_info` asks the server."""
        self.model_seq_id = model_seq_id
        # Held while a call takes its place, so that train_step takes two places side by side.
        self._lock = threading.RLock()
        self._submits = SubmitQueue(holder)
        self._watch = QueueWatch(f"Training of {model_id}", self)
        self._open: set[APIFuture[Any]] = set()
        self._steps = StepCount()
        self._warned_of_no_signal = False

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Called when the reason of waiting changes; override to react to it."""

    def _pass_parts(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> list[CallPart]:
        """The requests of a pass, checked."""
        name = validation.check_loss(loss_fn, loss_fn_config)
        datums = validation.check_data(data, name)
        validation.check_routed_experts(datums, self.holder.flags.tinkex_routed_experts)
        if not forward_only and not validation.has_signal(datums):
            self._warn_of_no_signal()
        config = dict(loss_fn_config) if loss_fn_config else None
        return pass_parts(
            self.holder.flags, self.model_id, datums, name, config, forward_only=forward_only
        )

    def _warn_of_no_signal(self) -> None:
        """Once per client: a loop with sparse rewards meets such batches again and again."""
        if not self._warned_of_no_signal:
            self._warned_of_no_signal = True
            logger.warning(
                "Every advantage of this batch is zero, so its gradient is rounding noise, and "
                "Adam makes a step of the usual size of it. Leave such batches out, or pass "
                "skip_without_signal=True to train_step. (%s says this once.)",
                self.model_id,
            )

    def _submit_json(
        self,
        path: str,
        request: BaseModel,
        kind: type[T],
        *,
        max_retries: int | None = None,
    ) -> APIFuture[T]:
        """Submit a request that is one message, for a result of that kind."""

        def encode(seq_id: int) -> Call:
            numbered = request.model_copy(update={"seq_id": seq_id})
            return self._json_call(path, numbered, max_retries=max_retries)

        return self._submit(path, [CallPart(encode)], Expect.of(path, kind))

    def _submit(
        self,
        method: str,
        parts: Sequence[CallPart],
        expect: Expect[T],
        join: Callable[[Sequence[T]], T] | None = None,
    ) -> APIFuture[T]:
        """Take the next place in the order and return the future of the result."""
        submission = Submission(parts)

        async def collect(waiting: Waiting) -> T:
            with events.span("training", method=method, model_id=self.model_id):
                return await self._collect(submission, expect, waiting, join)

        with self._lock:
            self._submits.put(submission)
            future = self.holder.spawn(collect)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _abandon(self, error: Exception) -> None:
        """Nobody will answer any more: calls that wait end with `error`, the rest is not sent."""
        for future in tuple(self._open):
            future._abandon(error)
        spawn(lambda waiting: self._submits.close())

    async def _collect(
        self,
        submission: Submission,
        expect: Expect[T],
        waiting: Waiting,
        join: Callable[[Sequence[T]], T] | None,
    ) -> T:
        # Shielded: whoever stops waiting must not take the others' order with him.
        accepted = await asyncio.shield(submission.accepted)
        wait = self.holder.poller.wait
        results = await gather_or_cancel(
            wait(
                one.request_id,
                expect,
                waiting=waiting,
                watch=self._watch,
                roundtrip_s=one.roundtrip_s,
            )
            for one in accepted
        )
        return join(results) if join is not None else results[0]

    def _json_call(self, path: str, request: BaseModel, *, max_retries: int | None = None) -> Call:
        return Call.to(path, request, self.holder.flags.generation, max_retries=max_retries)
