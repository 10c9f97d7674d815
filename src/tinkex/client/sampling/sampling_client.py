"""Sample from one frozen model, thousands at a time.

How a sample travels is in `sample_calls.py`. A client pickles to other processes and can be handed
over as a text handle. How tokens are drawn is the server's business.
"""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from typing import TYPE_CHECKING, Any

import orjson

from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.http.call import Call
from tinkex.client.http.options import CallLimits, Options
from tinkex.client.older_sdk import BaseModelName, DirectFuture
from tinkex.client.sampling.sample_calls import SampleCalls
from tinkex.client.sampling.sample_requests import sample_request, target_tensor
from tinkex.client.sampling.sample_retry import RetryConfig
from tinkex.client.session.flags import DynamicFlags, ServerFlags
from tinkex.client.session.holder import Holder
from tinkex.client.twins import awaited
from tinkex.errors import (
    APIResponseValidationError,
    InvalidInputError,
    ModelNotFoundError,
)
from tinkex.types.account.checkpoints import is_tinker_path

if TYPE_CHECKING:
    from tinkex.client.sampling.sample_stream import SampleStream
    from tinkex.client.session.telemetry import Reporter
    from tinkex.client.tokenizers import Tokenizer

_SECRET_HEADER = re.compile("auth|cookie|key|secret|token", re.IGNORECASE)


class SamplingClient(SampleCalls):
    """Samples from one model, frozen as it was. Made by a ServiceClient or a TrainingClient."""

    @staticmethod
    def create(
        holder: Holder,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        options: Options = None,
    ) -> APIFuture[SamplingClient]:
        """Open a sampling session for a checkpoint or a base model, or use an existing one."""
        if model_path is not None and not is_tinker_path(model_path):
            raise InvalidInputError(
                f"expected a path that starts with tinker://, got {model_path!r}. To sample from a "
                "base model pass base_model=.",
                path="model_path",
            )
        if model_path is None and base_model is None and sampling_session_id is None:
            raise InvalidInputError("give model_path or base_model", path="model_path")

        async def make(waiting: Waiting) -> SamplingClient:
            session = sampling_session_id
            if session is None:
                assert holder.session_id is not None
                request = types.CreateSamplingSessionRequest(
                    session_id=holder.session_id,
                    sampling_session_seq_id=holder.session.next_number("sampling_session"),
                    base_model=base_model,
                    model_path=model_path,
                )
                kind = types.CreateSamplingSessionResponse
                answer = await holder.post(
                    "create_sampling_session",
                    request,
                    kind,
                    pool="session",
                    window=False,
                    options=options,
                )
                session = answer.sampling_session_id
            return SamplingClient(
                holder,
                session,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
                base_model=base_model if model_path is None else None,
                model_path=model_path,
            )

        return holder.spawn(make, CallLimits.of(options))

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
        *,
        routed_experts: bool = False,
        options: Options = None,
    ) -> APIFuture[types.SampleResponse]:
        """Draw `num_samples` continuations of a prompt. Returns at once.

        Any number may be in flight; the SDK holds back what the server cannot take yet. Cancelling
        the future also cancels the sample on the server. With `routed_experts` a mixture also tells
        which experts each token passed, to be trained on with a datum's input of that name.
        """
        request = sample_request(
            prompt,
            num_samples,
            sampling_params,
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_tensor(target_prompt_logprobs),
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
            routed_experts=routed_experts or None,
        )
        retries = not self.holder.flags.sample_no_retries
        return self.holder.spawn(
            lambda waiting: self._sample(request, waiting, retries, options), CallLimits.of(options)
        )

    sample_async = awaited(sample)

    def compute_logprobs(
        self,
        prompt: types.ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[list[float | None]]:
        """The logprob of each prompt token given those before it; None for the first."""
        request = sample_request(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

        async def score(waiting: Waiting) -> list[float | None]:
            answer = await self._sample(request, waiting, True, options)
            if answer.prompt_logprobs is None:
                raise APIResponseValidationError("The server sent no prompt logprobs.")
            return answer.prompt_logprobs

        return self.holder.spawn(score, CallLimits.of(options))

    compute_logprobs_async = awaited(compute_logprobs)

    def stream(
        self,
        prompt: types.ModelInput,
        sampling_params: types.SamplingParams,
        num_samples: int = 1,
        *,
        options: Options = None,
    ) -> SampleStream:
        """Tokens while they are generated: iterate with `for` or `async for`.

        Each item holds the new tokens of one sample; after the last one `.result` is the whole
        SampleResponse. Leaving the loop early cancels the sample.
        """
        from tinkex.client.sampling.sample_stream import SampleStream

        request = sample_request(
            prompt,
            num_samples,
            sampling_params,
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=False,
            record_stability_info=False,
        )
        return SampleStream(self, request, options)

    # -- asking

    def get_base_model(self, *, options: Options = None) -> BaseModelName:
        """The base model under the sampled weights: a text that can also be awaited.

        Waits, the first time. A future could not stand for a text wherever one is wanted.
        """
        return BaseModelName(self._base_model(options).result())

    async def get_base_model_async(self, *, options: Options = None) -> str:
        """Like `get_base_model`, without blocking the event loop."""
        return await self._base_model(options)

    def _base_model(self, options: Options) -> APIFuture[str]:
        async def ask(waiting: Waiting) -> str:
            if self._base_model_name is None:
                call = Call.to("get_sampler", ids={"sampler_id": self.sampling_session_id})
                info = await self.holder.ask(
                    call.having(options), types.GetSamplerResponse, waiting
                )
                self._base_model_name = info.base_model
            return self._base_model_name

        return self.holder.spawn(ask, CallLimits.of(options))

    def get_tokenizer(self, *, options: Options = None) -> DirectFuture[Tokenizer]:
        """The tokenizer of the base model; the first call may download it.

        A server on this machine that has not fetched the model yet fetches it now.
        """
        from tinkex.client.tokenizers import load_tokenizer

        asked = self._base_model(options)

        mirrors = self.holder.config.tokenizer_mirrors

        async def load(waiting: Waiting) -> Tokenizer:
            name = await asked
            try:
                return await asyncio.to_thread(load_tokenizer, name, mirrors=mirrors)
            except ModelNotFoundError:
                if not self.holder.config.is_local:
                    raise
            # A server on this machine fetches a model, tokenizer included, when it is first used.
            await self.compute_logprobs(types.ModelInput.from_ints([0]), options=options)
            return await asyncio.to_thread(load_tokenizer, name, mirrors=mirrors)

        return DirectFuture.of(spawn(load), "get_tokenizer")

    get_tokenizer_async = awaited(get_tokenizer)

    def get_telemetry(self) -> Reporter | None:
        """The reporter that tells the server of errors; None where telemetry is off."""
        return self.holder.reporter

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
            "client_config": holder.flags.model_dump(),
            "dynamic_config": holder.dynamic.model_dump(),
            "api_key": holder.config.api_key,
        }

    def __reduce__(self) -> Any:
        return _restore, (self._state(), self.holder.config, self._retry_config)

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


_shadows: dict[str, Holder] = {}
_shadows_lock = threading.Lock()


def _restore(
    state: dict[str, Any],
    config: ClientConfig | None = None,
    retry_config: RetryConfig | None = None,
) -> SamplingClient:
    """A client in another process: same session, own connections, own heartbeat.

    A handle names no settings beside the address: those are of the environment here.
    """
    config = config or ClientConfig.from_env(
        base_url=state["base_url"], api_key=state["api_key"], headers=state["headers"]
    )
    key = repr((state["session_id"], config, config.api_key, sorted(config.headers.items())))
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
        retry_config=retry_config,
        record_stability_info=bool(state["record_stability_info"]),
        is_clone=True,
    )
