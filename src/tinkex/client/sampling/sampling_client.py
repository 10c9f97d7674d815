"""Sample from one frozen model, thousands at a time.

A sample is submitted, waited for and, when its promise is lost or the connection breaks, submitted
anew. Nothing here is a central bottleneck: every sample is a task of its own on the background
loop, behind the budgets of `limits.py`. A client pickles to other processes and can be handed over
as a text handle. How tokens are drawn is the server's business.
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import orjson

from tinkex import events, types
from tinkex.client.config import ClientConfig
from tinkex.client.direct import BaseModelName, DirectFuture, awaited
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.http import codec
from tinkex.client.http.retry import RetryConfig, SampleRetry
from tinkex.client.http.transport import Call
from tinkex.client.polling import QueueWatch
from tinkex.client.sampling.collector import BatchSubmitter, Collector, FinishedSample
from tinkex.client.sampling.sample_fields import SampleFields
from tinkex.client.session.flags import DynamicFlags, ServerFlags
from tinkex.client.session.holder import Holder
from tinkex.errors import (
    APIResponseValidationError,
    BillingError,
    InvalidInputError,
    RateLimitError,
    RequestFailedError,
    RetrieveError,
    status_error_class,
)

if TYPE_CHECKING:
    from tinkex.client.http.streaming import SampleStream

__all__ = ["SamplingClient", "SamplingClientFuture"]

CLONE_STRIDE = 10**9
_SECRET_HEADER = re.compile("auth|cookie|key|secret|token", re.IGNORECASE)


class SamplingClient:
    """Samples from one model, frozen as it was. Made by a ServiceClient or a TrainingClient."""

    def __init__(
        self,
        holder: Holder,
        sampling_session_id: str,
        *,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        is_clone: bool = False,
        base_model: str | None = None,
    ) -> None:
        self.holder = holder
        self.sampling_session_id = sampling_session_id
        self._retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._is_clone = is_clone
        self._clone_id: int | None = None if is_clone else 0
        self._joining: asyncio.Future[int] | None = None
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._watch = QueueWatch(f"Sampling of {sampling_session_id}", self)
        self._retry: SampleRetry | None = None
        self._collector: Collector | None = None
        self._batch: BatchSubmitter | None = None
        self._base_model_name = base_model

    @staticmethod
    def create(
        holder: Holder,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Open a sampling session for a checkpoint or a base model, or use an existing one."""
        if model_path is not None and not model_path.startswith("tinker://"):
            raise InvalidInputError(
                f"expected a path that starts with tinker://, got {model_path!r}. To sample from a "
                "base model pass base_model=.",
                path="model_path",
            )
        if model_path is None and base_model is None and sampling_session_id is None:
            raise InvalidInputError("give model_path or base_model", path="model_path")
        return holder.spawn(
            lambda waiting: SamplingClient._make(
                holder,
                model_path=model_path,
                base_model=base_model,
                sampling_session_id=sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        )

    @staticmethod
    async def _make(
        holder: Holder,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        if sampling_session_id is None:
            assert holder.session_id is not None
            request = types.CreateSamplingSessionRequest(
                session_id=holder.session_id,
                sampling_session_seq_id=holder.session.next_number("sampling_session"),
                base_model=base_model,
                model_path=model_path,
            )
            answer = await holder.post(
                "create_sampling_session",
                request,
                types.CreateSamplingSessionResponse,
                pool="session",
                window=False,
            )
            sampling_session_id = answer.sampling_session_id
        return SamplingClient(
            holder,
            sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            base_model=base_model if model_path is None else None,
        )

    # -- sampling

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: Any = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[types.SampleResponse]:
        """Draw `num_samples` continuations of a prompt. Returns at once.

        Any number may be in flight; the SDK holds back what the server cannot take yet. Cancelling
        the future also cancels the sample on the server.
        """
        fields = SampleFields(
            prompt=prompt,
            num_samples=num_samples,
            params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt=topk_prompt_logprobs,
            topk_sample=topk_sample_logprobs,
            target=codec.target_tensor(target_prompt_logprobs),
            alt_k=prompt_alt_tokens_k,
            last_n=prompt_logprobs_last_n,
            stability=self._record_stability_info,
        )
        fields.check()
        retries = not self.holder.flags.sample_no_retries
        return self.holder.spawn(lambda waiting: self._sample(fields, waiting, retries))

    sample_async = awaited(sample)

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of each prompt token given those before it; None for the first."""
        fields = SampleFields(
            prompt=prompt,
            num_samples=1,
            params=types.SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            last_n=prompt_logprobs_last_n,
            stability=self._record_stability_info,
        )
        fields.check()

        async def score(waiting: Waiting) -> list[float | None]:
            answer = await self._sample(fields, waiting, retries=True)
            if answer.prompt_logprobs is None:
                raise APIResponseValidationError("The server sent no prompt logprobs.")
            return answer.prompt_logprobs

        return self.holder.spawn(score)

    compute_logprobs_async = awaited(compute_logprobs)

    def stream(
        self,
        prompt: types.ModelInput,
        sampling_params: types.SamplingParams,
        num_samples: int = 1,
    ) -> SampleStream:
        """Tokens while they are generated: iterate with `for` or `async for`.

        Each item holds the new tokens of one sample; after the last one `.result` is the whole
        SampleResponse. Leaving the loop early cancels the sample.
        """
        from tinkex.client.http.streaming import SampleStream

        fields = SampleFields(prompt=prompt, num_samples=num_samples, params=sampling_params)
        fields.check()
        return SampleStream(self, fields)

    async def stream_body(self, fields: SampleFields) -> bytes:
        """The body of a streamed sample, with a number of its own."""
        self._prepare()
        fields.check_honoured(self.holder.flags)
        if self._clone_id is None:
            await self._join()
        return fields.body(self.sampling_session_id, self._next_seq_id())

    # -- one sample

    async def _sample(
        self, fields: SampleFields, waiting: Waiting, retries: bool
    ) -> types.SampleResponse:
        self._prepare()
        fields.check_honoured(self.holder.flags)
        if self._clone_id is None:
            await self._join()
        with events.span(
            "sampling", model_id=self.sampling_session_id, num_samples=fields.num_samples
        ):
            if not retries:
                return await self._attempt(fields, waiting)
            assert self._retry is not None
            return await self._retry.execute(lambda: self._attempt(fields, waiting))

    def _prepare(self) -> None:
        """On the loop, once: what the server's flags decide."""
        if self._retry is not None:
            return
        flags = self.holder.flags
        cap = None if flags.sample_use_retrieve_futures else flags.sample_max_concurrent_requests
        self._retry = SampleRetry(
            self._retry_config,
            max_in_flight=cap,
            stuck_detection=flags.sample_enable_stuck_detection,
        )
        if flags.tinkex_sample_batch:
            self._batch = BatchSubmitter(self.holder.transport.call)
            self.holder.calls.close_first(self._batch)

    async def _join(self) -> None:
        """A clone takes a number of its own before its first sample."""
        if self._joining is None:
            self._joining = asyncio.ensure_future(self._clone_number())
        try:
            self._clone_id = await asyncio.shield(self._joining)
        except Exception:
            self._joining = None
            raise

    async def _clone_number(self) -> int:
        if not self.holder.flags.sample_join_sampling_session:
            return random.randint(1, CLONE_STRIDE)
        request = types.JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
        answer = await self.holder.post(
            "join_sampling_session", request, types.JoinSamplingSessionResponse, pool="session"
        )
        return answer.client_counter

    def _next_seq_id(self) -> int:
        assert self._clone_id is not None
        with self._lock:
            number = self._num_submitted
            self._num_submitted += 1
        return self._clone_id * CLONE_STRIDE + number

    async def _attempt(self, fields: SampleFields, waiting: Waiting) -> types.SampleResponse:
        """One submission and the wait for its result. A retry is a new submission."""
        started = time.monotonic()
        waiting.state = "submitting"
        promise = await self._submit(fields, waiting)
        request_id = promise["request_id"]
        waiting.request_id, waiting.state = request_id, "submitted"
        try:
            answer = await self._wait(request_id, waiting, time.monotonic() - started)
        except asyncio.CancelledError:
            self._forget(request_id)
            raise
        return fields.finished(answer, promise.get("sample_sequence_ids"))

    def _forget(self, request_id: str) -> None:
        self.holder.cancel_sample(request_id)
        if self._collector is not None:
            self._collector.acknowledge(request_id)

    async def _submit(self, fields: SampleFields, waiting: Waiting) -> dict[str, Any]:
        """Post with one number until it is taken; 429 is a wait, not an error (6.2)."""
        gate = self.holder.budgets.samples
        body = fields.body(self.sampling_session_id, self._next_seq_id())
        while True:
            await gate.limiter.wait()
            async with gate.admit(fields.size_bytes):
                if gate.limiter.delay_s > 0:
                    continue  # held back while it waited for its slot
                try:
                    return await self._post(body, waiting)
                except RateLimitError as exc:
                    asked_ms = exc.retry_after_ms
                    gate.hold_back(fields.size_bytes, asked_ms and asked_ms / 1000)
                    waiting.reason = "held back: the server is busy (429)"
                except BillingError:
                    pause = self.holder.transport.billing.delay_s()
                    if pause is None:
                        raise
                    gate.limiter.hold(pause)
                    waiting.reason = "paused: billing"

    async def _post(self, body: bytes, waiting: Waiting) -> dict[str, Any]:
        if self._batch is not None:
            return _accepted(await self._batch.submit(body))
        call = Call(
            method="POST",
            path="asample",
            pool="sample",
            body=body,
            headers={"X-Tinker-Sampling-Backpressure": "1"},
            max_retries=0,
            waits_itself=True,
        )
        reply = await self.holder.transport.call(call, waiting)
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
            self._watch.saw(request_id, state, reason)

        done = await collector.wait(request_id, still_waiting)
        try:
            if done.payload is not None:
                answer: types.SampleResponse = codec.decode_sample(done.payload)
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
            codec.EXPECT_SAMPLE,
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

    # -- asking

    def get_base_model(self) -> BaseModelName:
        """The base model under the sampled weights: a text that can also be awaited.

        Waits, the first time. A future could not stand for a text wherever one is wanted.
        """
        return BaseModelName(self._base_model().result())

    async def get_base_model_async(self) -> str:
        """Like `get_base_model`, without blocking the event loop."""
        return await self._base_model()

    def _base_model(self) -> APIFuture[str]:
        async def ask(waiting: Waiting) -> str:
            if self._base_model_name is None:
                call = Call(method="GET", path=f"samplers/{self.sampling_session_id}")
                info = await self.holder.ask(call, types.GetSamplerResponse, waiting)
                self._base_model_name = info.base_model
            return self._base_model_name

        return self.holder.spawn(ask)

    def get_tokenizer(self) -> DirectFuture[Any]:
        """The tokenizer of the base model; the first call may download it."""
        from tinkex.client.tokenizers import load_tokenizer

        asked = self._base_model()

        async def load(waiting: Waiting) -> Any:
            return await asyncio.to_thread(load_tokenizer, await asked)

        return DirectFuture.of(spawn(load), "get_tokenizer")

    get_tokenizer_async = awaited(get_tokenizer)

    def get_telemetry(self) -> Any:
        return self.holder.reporter

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Called when the reason of waiting changes; override to react to it."""

    def __repr__(self) -> str:
        of = f" of {self._base_model_name}" if self._base_model_name else ""
        where = self.holder.config.base_url
        return f"<SamplingClient {self.sampling_session_id}{of} at {where}>"

    # -- other processes

    def _state(self) -> dict[str, Any]:
        holder = self.holder
        return {
            "session_id": holder.session_id,
            "sampling_session_id": self.sampling_session_id,
            "record_stability_info": self._record_stability_info,
            "base_url": holder.config.base_url,
            "headers": dict(holder.config.headers),
            "client_config": holder.flags.to_json(),
            "dynamic_config": holder.dynamic.to_json(),
            "api_key": holder.config.api_key,
        }

    def __reduce__(self) -> Any:
        return _restore, (self._state(),)

    def get_sampler_handle(self) -> str:
        """This client as a text without a credential, for another process or machine."""
        state = {**self._state(), "api_key": None}
        headers = state["headers"].items()
        state["headers"] = {k: v for k, v in headers if not _SECRET_HEADER.search(k)}
        return base64.urlsafe_b64encode(orjson.dumps(state)).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """The client behind a handle; the credential comes from `api_key` or the environment."""
        try:
            state = orjson.loads(base64.urlsafe_b64decode(handle))
            state = {**state, "api_key": api_key}
            return _restore(state)
        except (ValueError, KeyError, TypeError) as exc:
            if isinstance(exc, InvalidInputError):
                raise
            raise InvalidInputError(
                f"not a sampler handle ({type(exc).__name__}); make one with get_sampler_handle()",
                path="handle",
            ) from exc


if TYPE_CHECKING:

    class SamplingClientFuture(DirectFuture[SamplingClient], SamplingClient):  # type: ignore[misc]
        """For type checkers: await it, ask for its result, or use it as the client."""

else:
    SamplingClientFuture = DirectFuture


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


_shadows: dict[str, Holder] = {}
_shadows_lock = threading.Lock()


def _restore(state: dict[str, Any]) -> SamplingClient:
    """A client in another process: same session, own connections, own heartbeat."""
    config = ClientConfig.from_env(
        base_url=state["base_url"], api_key=state["api_key"], headers=state["headers"]
    )
    key = repr(
        (state["session_id"], config.base_url, config.api_key, sorted(config.headers.items()))
    )
    with _shadows_lock:
        holder = _shadows.get(key)
        if holder is None:
            holder = _shadows[key] = Holder(
                config,
                shadow=(
                    state["session_id"],
                    ServerFlags.from_json(state["client_config"]),
                    DynamicFlags.from_json(state["dynamic_config"]),
                ),
            )
    return SamplingClient(
        holder,
        state["sampling_session_id"],
        record_stability_info=bool(state["record_stability_info"]),
        is_clone=True,
    )
