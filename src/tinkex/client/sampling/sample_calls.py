"""How a sample travels: past the gate, as a request, to its result; anew when it was lost.

`SamplingClient` says what can be asked for; this says what happens to one sample. Each is a task of
its own on the background loop, behind the budgets of `limits.py`: nothing here is a bottleneck for
all. A retry is a new request with a new number, because the server may have lost the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from typing import Any

from tinkex import events, types
from tinkex.client.futures import Waiting
from tinkex.client.http.call import Call
from tinkex.client.http.options import Options, without_key
from tinkex.client.http.retry import is_final
from tinkex.client.sampling.collector import BatchSubmitter, Collector, FinishedSample
from tinkex.client.sampling.sample_requests import check_answer, check_supported
from tinkex.client.sampling.sample_retry import RetryConfig, SampleRetry
from tinkex.client.session.flags import ServerFlags
from tinkex.client.session.holder import Holder
from tinkex.client.session.polling import Expect, QueueWatch
from tinkex.errors import (
    APIResponseValidationError,
    BillingError,
    RateLimitError,
    RequestFailedError,
    RetrieveError,
    status_error_class,
)
from tinkex.wire import Body, requests, results
from tinkex.wire.chunking import model_input_size
from tinkex.wire.generation import PROTOBUF

# Servers compute the number of a copy as seq_id // 10^9 (contract 6.5).
CLONE_STRIDE = 10**9
_EXPECT = Expect("Sample", types.SampleResponse, in_protobuf=True)


class SampleCalls:
    """The machinery of one sampler's calls."""

    def __init__(
        self,
        holder: Holder,
        sampling_session_id: str,
        *,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        is_clone: bool = False,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> None:
        self.holder = holder
        self.sampling_session_id = sampling_session_id
        self._retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._clone_id: int | None = None if is_clone else 0
        self._joining: asyncio.Future[int] | None = None
        self._joining_by: Options = None
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._watch = QueueWatch(f"Sampling of {sampling_session_id}", self)
        self._retry: SampleRetry | None = None
        self._collector: Collector | None = None
        self._batch: BatchSubmitter | None = None
        self._base_model_name = base_model
        self._model_path = model_path
        self._facts: dict[str, Any] = {}
        self._snapshot: types.WeightsSnapshot | None = None

    def on_queue_state_change(
        self, queue_state: types.QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when the reason of waiting changes; override to react to it."""

    async def _stream_call(self, request: types.SampleRequest, options: Options) -> Call:
        """The call of a streamed sample, with a number of its own."""
        await self._prepare(request, options)
        call = Call.to("sample_stream", self._numbered(request), pool="sample")
        return call.having(options)

    def _stamped(
        self, answer: types.SampleResponse, said: Any, sequence_ids: list[str] | None = None
    ) -> types.SampleResponse:
        """The answer, each sequence with its id and the weights that made it, where known."""
        ids = [s.sequence_id for s in answer.sequences] if sequence_ids is None else sequence_ids
        if len(ids) != len(answer.sequences):
            raise APIResponseValidationError(
                f"The server's promise and result differ: expected {len(ids)} sequences, got "
                f"{len(answer.sequences)}."
            )
        made_by = self._made_by(said if isinstance(said, dict) else {})
        for sequence, name in zip(answer.sequences, ids, strict=True):
            sequence._stamp(made_by, name)
        return answer

    def _made_by(self, facts: dict[str, Any]) -> types.WeightsSnapshot:
        if facts != self._facts or self._snapshot is None:  # many samples are of the same weights
            step, content = facts.get("step"), facts.get("content")
            self._facts = facts
            self._snapshot = types.WeightsSnapshot(
                self.sampling_session_id,
                path=facts.get("path") or self._model_path,
                step=step if isinstance(step, int) else None,
                content=content if isinstance(content, str) else None,
            )
        return self._snapshot

    # -- one sample

    async def _sample(
        self, request: types.SampleRequest, waiting: Waiting, retries: bool, options: Options
    ) -> types.SampleResponse:
        await self._prepare(request, options)
        with events.span(
            "sampling", model_id=self.sampling_session_id, num_samples=request.num_samples
        ):
            if not retries:
                return await self._attempt(request, waiting, options)
            assert self._retry is not None
            most = options.get("max_retries") if options else None
            numbers = itertools.count()
            return await self._retry.execute(
                lambda: self._attempt(request, waiting, options, next(numbers)), most
            )

    async def _prepare(self, request: types.SampleRequest, options: Options) -> None:
        """Refuse what this server would ignore, and have what the first sample needs."""
        if self._retry is None:
            self._apply_flags(self.holder.flags)
        check_supported(request, self.holder.flags)
        if self._clone_id is None:
            await self._join(options)

    def _apply_flags(self, flags: ServerFlags) -> None:
        cap = None if flags.sample_use_retrieve_futures else flags.sample_max_concurrent_requests
        self._retry = SampleRetry(
            self._retry_config,
            max_in_flight=cap,
            stuck_detection=flags.sample_enable_stuck_detection,
            max_retries=self.holder.config.max_retries,
        )
        if flags.tinkex_sample_batch:
            self._batch = BatchSubmitter(self.holder.transport.call, self.holder.calls.begin)

    async def _join(self, options: Options) -> None:
        """A clone takes a number of its own before its first sample.

        All wait for the first one's attempt. One that failed by the options of another sample is
        made again.
        """
        while self._clone_id is None:
            if self._joining is None:
                self._joining = asyncio.ensure_future(self._clone_number(options))
                self._joining_by = options
            attempt, by = self._joining, self._joining_by
            try:
                self._clone_id = await asyncio.shield(attempt)
            except Exception:
                if self._joining is attempt:
                    self._joining = None
                if by == options:
                    raise

    async def _clone_number(self, options: Options) -> int:
        if not self.holder.flags.sample_join_sampling_session:
            return random.randint(1, CLONE_STRIDE)
        request = types.JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
        answer = await self.holder.post(
            "join_sampling_session",
            request,
            types.JoinSamplingSessionResponse,
            pool="session",
            options=without_key(options),
        )
        return answer.client_counter

    def _numbered(self, request: types.SampleRequest) -> types.SampleRequest:
        """The request with the next number of this clone.

        In place, since it is encoded at once: copies were a tenth of a sample's cost.
        """
        assert self._clone_id is not None
        with self._lock:
            number = self._num_submitted
            self._num_submitted += 1
        request.refill(seq_id=self._clone_id * CLONE_STRIDE + number)
        return request

    async def _attempt(
        self, request: types.SampleRequest, waiting: Waiting, options: Options, number: int = 0
    ) -> types.SampleResponse:
        """Submit a sample and wait for its result. A retry is a new submission."""
        started = time.monotonic()
        waiting.state = "submitting"
        promise = await self._submit(request, waiting, options, number)
        request_id = promise["request_id"]
        waiting.request_id, waiting.state = request_id, "submitted"
        try:
            answer = await self._wait(request_id, waiting, time.monotonic() - started)
        except asyncio.CancelledError:
            self._forget(request_id)
            raise
        check_answer(request, answer)
        return self._stamped(answer, promise.get("snapshot"), promise.get("sample_sequence_ids"))

    def _forget(self, request_id: str) -> None:
        self.holder.cancel_sample(request_id)
        if self._collector is not None:
            self._collector.acknowledge(request_id)

    async def _submit(
        self, request: types.SampleRequest, waiting: Waiting, options: Options, number: int
    ) -> dict[str, Any]:
        """Post with one number until it is taken; 429 is a wait, not an error (6.2)."""
        gate = self.holder.budgets.samples
        size_bytes = model_input_size(request.prompt, bytes_per_token=10)
        body = requests.encode("asample", self._numbered(request), self.holder.flags.generation)
        most = (options or {}).get("max_retries", self.holder.config.max_retries)
        num_refused = 0
        while True:
            await gate.limiter.wait()
            async with gate.admit(size_bytes):
                if gate.limiter.delay_s > 0:
                    continue  # held back while it waited for its slot
                try:
                    return await self._post(body, waiting, options, number)
                except RateLimitError as exc:
                    num_refused += 1
                    if not exc.retryable or (most is not None and num_refused > most):
                        raise
                    asked_ms = exc.retry_after_ms
                    gate.hold_back(size_bytes, asked_ms and asked_ms / 1000)
                    waiting.reason = "held back: the server is busy (429)"
                except BillingError as exc:
                    num_refused += 1
                    pause = None if is_final(exc) else self.holder.transport.billing.delay_s()
                    if pause is None or (most is not None and num_refused > most):
                        raise
                    gate.limiter.hold(pause)
                    waiting.reason = "paused: billing"

    async def _post(
        self, body: Body, waiting: Waiting, options: Options, number: int
    ) -> dict[str, Any]:
        if self._batch is not None and not options:  # which are those of one sample
            return _accepted(await self._batch.submit(body))
        call = Call.to(
            "asample",
            body,
            pool="sample",
            headers={"X-Tinker-Sampling-Backpressure": "1"},
            quick_retries=0,
            waits_itself=True,
        )
        # A sample that is made anew is another request: by the same key a server would answer
        # with the promise that was lost.
        reply = await self.holder.transport.call(call.having(options, number), waiting)
        promise = reply.json()
        if not isinstance(promise, dict) or not isinstance(promise.get("request_id"), str):
            raise APIResponseValidationError("asample answered without a request_id.")
        return promise

    async def _wait(
        self, request_id: str, waiting: Waiting, roundtrip_s: float
    ) -> types.SampleResponse:
        if not self.holder.flags.sample_use_retrieve_futures:
            return await self._poll(request_id, waiting, roundtrip_s, None)
        collector = self._collecting()

        def still_waiting(state: str | None, reason: str | None) -> None:
            waiting.hear(state, reason)
            waiting.num_polls += 1
            self._watch.saw(request_id, state, reason)

        done = await collector.wait(request_id, still_waiting)
        try:
            if done.payload is not None:
                answer = results.decode(types.SampleResponse, done.payload, PROTOBUF)
            else:
                answer = await self._poll(request_id, waiting, roundtrip_s, done)
        except (RequestFailedError, RetrieveError, APIResponseValidationError):
            collector.acknowledge(request_id)
            raise
        collector.acknowledge(request_id)
        return answer

    async def _poll(
        self, request_id: str, waiting: Waiting, roundtrip_s: float, done: FinishedSample | None
    ) -> types.SampleResponse:
        return await self.holder.poller.wait(
            request_id,
            _EXPECT,
            waiting=waiting,
            watch=self._watch,
            roundtrip_s=roundtrip_s,
            known_size=done.size_bytes if done else None,
        )

    def _collecting(self) -> Collector:
        if self._collector is None:
            assert self._clone_id is not None
            self._collector = Collector(
                self.holder.transport.exchange,
                self.sampling_session_id,
                self._clone_id,
                billing=self.holder.transport.billing,
                inline=self.holder.flags.tinkex_sample_batch,
            )
            self.holder.calls.close_first(self._collector)
        return self._collector


def _accepted(entry: dict[str, Any]) -> dict[str, Any]:
    """A promise of a batch answer, or the error that one entry of it stands for."""
    status = entry.get("status")
    if status is None or "request_id" in entry:
        return entry
    raise status_error_class(int(status))(
        f"Error code: {status} on POST /api/v1/asample_batch - {entry.get('error')}",
        status_code=int(status),
        request="POST asample_batch",
        body=entry,
        retry_after_ms=entry.get("retry_after_ms"),
    )
