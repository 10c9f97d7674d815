"""The front door: from a service to clients that train and sample on it.

A ServiceClient costs nothing until its first call. It holds one session for training and sampling,
made when first needed, and shares a session-less connection for everything else. It belongs to the
process that made it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

from tinkex import types
from tinkex.client import validation
from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture, Waiting, spawn, warn_if_in_loop
from tinkex.client.http.retry import RetryConfig
from tinkex.client.http.transport import Call
from tinkex.client.polling import Expect
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.sampling.sampling_client import SamplingClient
from tinkex.client.session.holder import Holder
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.types.account.console_urls import session_url

__all__ = ["ServiceClient"]

FinishStatus = Literal["success", "errored", "interrupted"]


class ServiceClient:
    """A service to train and sample on.

    Without `base_url`: `TINKER_BASE_URL`, else the hosted service when a key is set, else a server
    on this machine that starts by itself. Use it as a context manager to tell the server how the
    program ended.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: ClientConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            warnings.warn(
                f"ServiceClient ignores {', '.join(sorted(kwargs))}; use config=ClientConfig(...).",
                FutureWarning,
                stacklevel=2,
            )
        self.config = config or ClientConfig.from_env(
            base_url=base_url,
            api_key=api_key,
            user_metadata=user_metadata,
            project_id=project_id,
            display_name=display_name,
            headers=dict(default_headers_overrides or {}),
        )
        self.config.set_up_logging()
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._plain_holder: Holder | None = None
        self._closing: APIFuture[None] | None = None

    @property
    def holder(self) -> Holder:
        """The inside of this client: session, connections, background tasks.

        Another one after `with_recovery` rebuilt a run whose session was lost: see
        `docs/recovery.md`.
        """
        with self._lock:
            if self._holder is None:
                self._holder = Holder(self.config)
            return self._holder.latest

    # -- the service

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Which models the server offers. Waits."""
        warn_if_in_loop("get_server_capabilities")
        return self._capabilities().result()

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        """Like `get_server_capabilities`, without blocking the event loop."""
        return await self._capabilities()

    def _capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        holder = self._sessionless()
        call = Call(method="GET", path="get_server_capabilities")
        return holder.spawn(
            lambda waiting: holder.call_json(call, types.GetServerCapabilitiesResponse)
        )

    def _sessionless(self) -> Holder:
        """The session's own holder when there is one, else one that needs no session."""
        with self._lock:
            if self._holder is not None:
                return self._holder.latest
            if self._plain_holder is None:
                self._plain_holder = Holder(self.config, with_session=False)
            return self._plain_holder

    # -- training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """A fresh LoRA adapter on a base model. Waits until the model is ready."""
        warn_if_in_loop("create_lora_training_client")
        return self._create(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
        ).result()

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Like `create_lora_training_client`, without blocking the event loop."""
        return await self._create(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata, optimizer
        )

    def _create(
        self,
        base_model: str,
        rank: int,
        seed: int | None,
        train_mlp: bool,
        train_attn: bool,
        train_unembed: bool,
        user_metadata: dict[str, str] | None,
        optimizer: Any,
    ) -> APIFuture[TrainingClient]:
        if not base_model or not isinstance(base_model, str):
            raise InvalidInputError(f"expected a model name, got {base_model!r}", path="base_model")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidInputError(
                f"must be a whole number of at least 1, got {rank!r}", path="rank"
            )
        if not (train_mlp or train_attn or train_unembed):
            raise InvalidInputError(
                "at least one of train_mlp, train_attn and train_unembed must be True",
                path="train_mlp",
            )
        lora = types.LoraConfig(
            rank=rank,
            seed=seed,
            train_unembed=train_unembed,
            train_mlp=train_mlp,
            train_attn=train_attn,
        )
        holder = self.holder
        return holder.spawn(
            lambda waiting: self._create_model(
                holder, base_model, lora, user_metadata, optimizer, waiting
            )
        )

    async def _create_model(
        self,
        holder: Holder,
        base_model: str,
        lora: types.LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: Any,
        waiting: Waiting,
    ) -> TrainingClient:
        assert holder.session_id is not None
        number = holder.next_number("model")
        request = types.CreateModelRequest(
            session_id=holder.session_id,
            model_seq_id=number,
            base_model=base_model,
            user_metadata=user_metadata,
            lora_config=lora,
            optimizer_config=optimizer or types.AdamOptimizerConfig(),
        )
        promise = await holder.post(
            "create_model", request, types.UntypedAPIFuture, window=False, waiting=waiting
        )
        expect = Expect("CreateModel", types.CreateModelResponse)
        made = await holder.poller.wait(promise.request_id, expect, waiting=waiting)
        return TrainingClient(holder, number, made.model_id)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Train on from a checkpoint's weights; the optimizer starts afresh. Waits."""
        warn_if_in_loop("create_training_client_from_state")
        return self._from_state(
            path, base_model, user_metadata, weights_access_token, optimizer, with_optimizer=False
        ).result()

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Like `create_training_client_from_state`, without blocking the event loop."""
        return await self._from_state(
            path, base_model, user_metadata, weights_access_token, optimizer, with_optimizer=False
        )

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Train on exactly where a checkpoint was saved, optimizer included. Waits."""
        warn_if_in_loop("create_training_client_from_state_with_optimizer")
        return self._from_state(
            path, base_model, user_metadata, weights_access_token, None, with_optimizer=True
        ).result()

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Like the method without `_async`, without blocking the event loop."""
        return await self._from_state(
            path, base_model, user_metadata, weights_access_token, None, with_optimizer=True
        )

    def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        optimizer: Any,
        *,
        with_optimizer: bool,
    ) -> APIFuture[TrainingClient]:
        validation.check_tinker_path(path, name="path")
        holder = self.holder

        async def make(waiting: Waiting) -> TrainingClient:
            if holder.flags.create_model_via_load_weights:
                return await self._create_by_loading(
                    holder,
                    types.LoadWeightsRequest(
                        session_id=holder.session_id,
                        model_seq_id=holder.next_number("model"),
                        base_model=base_model,
                        user_metadata=user_metadata,
                        path=path,
                        optimizer=with_optimizer,
                        optimizer_config=optimizer,
                        weights_access_token=weights_access_token,
                    ),
                    waiting,
                )
            return await self._create_then_load(
                holder,
                path,
                base_model,
                user_metadata,
                weights_access_token,
                optimizer,
                with_optimizer,
                waiting,
            )

        return holder.spawn(make)

    async def _create_by_loading(
        self, holder: Holder, request: types.LoadWeightsRequest, waiting: Waiting
    ) -> TrainingClient:
        assert request.model_seq_id is not None
        promise = await holder.post(
            "load_weights", request, types.UntypedAPIFuture, waiting=waiting
        )
        expect = Expect("LoadWeights", types.LoadWeightsResponse)
        await holder.poller.wait(promise.request_id, expect, waiting=waiting)
        model_id = f"{holder.session_id}:train:{request.model_seq_id}"
        return TrainingClient(holder, request.model_seq_id, model_id)

    async def _create_then_load(
        self,
        holder: Holder,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        optimizer: Any,
        with_optimizer: bool,
        waiting: Waiting,
    ) -> TrainingClient:
        """The way of servers that cannot create by loading: look, create, load (5.8)."""
        headers = {"X-API-Key": weights_access_token} if weights_access_token else None
        info = await holder.post(
            "weights_info",
            types.WeightsInfoRequest(tinker_path=path),
            types.WeightsInfoResponse,
            headers=headers,
            waiting=waiting,
        )
        lora = types.LoraConfig(
            rank=info.lora_rank or 32,
            train_unembed=info.train_unembed is not False,
            train_mlp=info.train_mlp is not False,
            train_attn=info.train_attn is not False,
        )
        family = info.optimizer_config if with_optimizer else optimizer
        client = await self._create_model(
            holder, base_model or info.base_model, lora, user_metadata, family, waiting
        )
        await client._load(path, weights_access_token, optimizer=with_optimizer)
        return client

    # -- sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Sample from a saved checkpoint or from a base model. Waits."""
        return self._sampler(model_path, base_model, retry_config, record_stability_info).result()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Like `create_sampling_client`, without blocking the event loop."""
        return await self._sampler(model_path, base_model, retry_config, record_stability_info)

    def _sampler(
        self,
        model_path: str | None,
        base_model: str | None,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
    ) -> APIFuture[SamplingClient]:
        if model_path is None and base_model is None:
            raise InvalidInputError("give model_path or base_model, got neither", path="model_path")
        return SamplingClient.create(
            self.holder,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    # -- more

    def create_custom_loss(
        self, fn: Callable[..., Any], input_ranks: Mapping[str, int]
    ) -> APIFuture[Any]:
        """Trace a loss written in torch, once, to be run by the server in one pass."""
        from tinkex.client.training.custom_calls import create_custom_loss

        return create_custom_loss(self.holder, fn, input_ranks)

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project; gives the new path."""
        if self.config.project_id is None:
            raise ConfigError(
                "copy_weights needs a project: pass project_id= or set TINKER_PROJECT_ID."
            )
        return RestClient(self._sessionless()).copy_weights(
            path,
            self.config.project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    def create_rest_client(self) -> RestClient:
        """A client for listings and checkpoints of the same service."""
        return RestClient(self._sessionless())

    def get_console_url(self) -> str:
        """Where a browser shows this session (or all of them, before the first call)."""
        return session_url(self._holder.latest.session_id if self._holder else None)

    def get_telemetry(self) -> Any:
        return self._holder.latest.reporter if self._holder else None

    # -- ending

    def close(self, status: FinishStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Tell the server how the program ended and let the connections go. Returns at once."""
        with self._lock:
            if self._closing is None:
                first, plain = self._holder, self._plain_holder
                holders = [first, first.latest if first else None, plain]  # closing twice is fine

                async def close(waiting: Waiting) -> None:
                    for holder in holders:
                        if holder is not None:
                            await holder.close(status, detail)

                self._closing = spawn(close)
            return self._closing

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(*_ending(error)).result(60)

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(*_ending(error))

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ServiceClient belongs to the process that made it. Make a new one there, or pickle "
            "a SamplingClient."
        )


def _ending(error: BaseException | None) -> tuple[FinishStatus, str | None]:
    if error is None:
        return "success", None
    status: FinishStatus = "errored" if isinstance(error, Exception) else "interrupted"
    return status, f"{type(error).__name__}: {error}"[:1000]
