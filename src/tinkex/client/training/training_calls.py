"""How a training call travels: split into requests, put into the model's order, polled, joined.

`TrainingClient` says which calls exist; a `TrainingCalls` submits them to one run. The position in
the order is taken when the call is made (`submission.py`); results are awaited concurrently.
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
from tinkex.client.http.options import Options, check_options
from tinkex.client.session.holder import Holder
from tinkex.client.session.polling import Expect, QueueStateObserver, QueueWatch
from tinkex.client.training.pass_requests import pass_parts
from tinkex.client.training.sample_age import StepCount
from tinkex.client.training.submission import CallPart, Submission, SubmitQueue

logger = logging.getLogger("tinkex.training")
T = TypeVar("T")


class TrainingCalls:
    """The calls of one run: their order, the futures still open, and the count of its steps.

    `observer` is told when the server changes its reason for letting calls wait.
    """

    def __init__(self, holder: Holder, model_id: str, observer: QueueStateObserver) -> None:
        self.holder = holder
        self.model_id = model_id
        self.lock = threading.RLock()
        """Held while a call takes its position, so that train_step takes two adjacent ones."""
        self.steps = StepCount()
        self._submits = SubmitQueue(holder)
        self._open: set[APIFuture[Any]] = set()
        self._warned_of_no_signal = self._warned_of_no_gradient = False
        self._has_gradient = False
        self.notify(observer)

    def notify(self, observer: QueueStateObserver) -> None:
        """Tell `observer`, and no longer the one before it, why calls wait."""
        self.watch = QueueWatch(f"Training of {self.model_id}", observer)

    def pass_parts(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> list[CallPart]:
        """The requests of a pass, checked."""
        flags = self.holder.flags
        name = validation.check_loss(loss_fn, loss_fn_config)
        is_taught = validation.check_teacher(name, loss_fn_config, flags.tinkex_teacher)
        datums = validation.check_data(data, name, is_taught=is_taught)
        validation.check_routed_experts(datums, flags.tinkex_routed_experts)
        if not forward_only and not is_taught and not validation.has_signal(datums):
            self._warn_of_no_signal()
        config = dict(loss_fn_config) if loss_fn_config else None
        return pass_parts(flags, self.model_id, datums, name, config, forward_only=forward_only)

    def _warn_of_no_signal(self) -> None:
        # Once per run: a loop with sparse rewards meets such batches again and again.
        if not self._warned_of_no_signal:
            self._warned_of_no_signal = True
            logger.warning(
                "Every advantage of this batch is zero, so its gradient is rounding noise, and "
                "Adam makes a step of the usual size of it. Leave such batches out, or pass "
                "skip_without_signal=True to train_step. (%s says this once.)",
                self.model_id,
            )

    def note_step(self) -> None:
        """A step is made of the gradient gathered so far; the server makes one of none as well."""
        if not self._has_gradient and not self._warned_of_no_gradient:
            self._warned_of_no_gradient = True
            logger.warning(
                "optim_step was called and no gradient was gathered before it, so the step counts "
                "and trains nothing but what momentum and weight decay do. Call forward_backward "
                "first. (%s says this once.)",
                self.model_id,
            )
        self._has_gradient = False

    def submit_json(
        self,
        path: str,
        request: BaseModel,
        kind: type[T],
        *,
        quick_retries: int | None = None,
        options: Options = None,
    ) -> APIFuture[T]:
        """Submit a request that is one message, for a result of that kind."""

        def encode(seq_id: int) -> Call:
            numbered = request.model_copy(update={"seq_id": seq_id})
            return self.json_call(path, numbered, quick_retries=quick_retries)

        return self.submit(path, [CallPart(encode)], Expect.of(path, kind), options=options)

    def submit(
        self,
        method: str,
        parts: Sequence[CallPart],
        expect: Expect[T],
        join: Callable[[Sequence[T]], T] | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[T]:
        """Take the next position in the order and return the future of the result."""
        if options:
            check_options(options)
            parts = [part.having(options, index) for index, part in enumerate(parts)]
        submission = Submission(parts)

        async def collect(waiting: Waiting) -> T:
            with events.span("training", method=method, model_id=self.model_id):
                return await self._collect(submission, expect, waiting, join)

        with self.lock:
            self._has_gradient |= method == "forward_backward"
            self._submits.put(submission)
            future = self.holder.spawn(collect)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def abandon(self, error: Exception) -> None:
        """End every open call with `error`, and send none of those that still wait to be sent."""
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
                promise.request_id,
                expect,
                waiting=waiting,
                watch=self.watch,
                roundtrip_s=promise.roundtrip_s,
            )
            for promise in accepted
        )
        return join(results) if join is not None else results[0]

    def json_call(self, path: str, request: BaseModel, *, quick_retries: int | None = None) -> Call:
        return Call.to(path, request, self.holder.flags.generation, quick_retries=quick_retries)
