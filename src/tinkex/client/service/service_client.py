"""The front door: from a service to clients that train and sample on it.

A ServiceClient costs nothing until its first call. It holds one session for training and sampling,
made when first needed, and shares a session-less connection for everything else. It belongs to the
process that made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import httpx

from tinkex import types
from tinkex.client import validation
from tinkex.client.config import LOCAL, ClientConfig
from tinkex.client.deprecations import warn
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.http.call import Call
from tinkex.client.http.options import CallLimits, Options, seconds_of
from tinkex.client.older_sdk import DirectFuture
from tinkex.client.rest.rest_client import RestClient, RestClientFuture
from tinkex.client.sampling.sample_retry import RetryConfig
from tinkex.client.sampling.sampling_client import SamplingClient, SamplingClientFuture
from tinkex.client.service.estimate_calls import EstimateCalls
from tinkex.client.session.holder import Holder
from tinkex.client.spelling import nearest
from tinkex.client.training import custom_calls
from tinkex.client.training.creation import (
    continue_run,
    create_from_state,
    create_model,
    with_name,
)
from tinkex.client.training.loss_tracing import LossHandle
from tinkex.client.training.training_client import TrainingClient, TrainingClientFuture
from tinkex.client.twins import awaited, threaded
from tinkex.errors import ConfigError, InvalidInputError, NotSupportedError
from tinkex.types.account.console_urls import session_url

if TYPE_CHECKING:
    from tinkex.client.session.telemetry import Reporter

FinishStatus = Literal["success", "errored", "interrupted"]


class ServiceClient(EstimateCalls):
    """A service to train and sample on.

    Without `base_url`: `TINKER_BASE_URL`, else the hosted service when a key is set, else a server
    on this machine that starts by itself and loads any model it is asked for. `model` is the base
    model of calls that name none: a name on the Hugging Face hub, a folder, or a GGUF file. Use it
    as a context manager to tell the server how the program ended.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: ClientConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """Touches no network. `kwargs` are further fields of `ClientConfig`.

        Args:
            user_metadata: Texts by name, kept with the session.
            project_id: The project of the session; `TINKER_PROJECT_ID` when left out.
            display_name: The name of the session in listings.
            model: The base model of calls that name none.
            base_url: Root of the service, or "local".
            api_key: The credential; `TINKER_API_KEY` when left out.
            timeout: Longest wait for one HTTP answer, in seconds (`timeout_s` of the config).
            max_retries: Most tries of a call after its first; 0 fails at once.
            default_headers: Sent with every request; they win over ours.
            default_headers_overrides: The same, by the official SDK's name.
            config: All settings at once; nothing else may be given beside it.
        """
        headers: dict[str, str] = {}
        for part in (default_headers, default_headers_overrides):
            if part is not None and not isinstance(part, Mapping):
                raise ConfigError(f"default_headers must be a dict, got {type(part).__name__}.")
            headers |= part or {}
        given = {
            "base_url": base_url,
            "api_key": api_key,
            "user_metadata": user_metadata,
            "project_id": project_id,
            "display_name": display_name,
            "model": model,
            "timeout_s": seconds_of(timeout),
            "max_retries": max_retries,
            "headers": headers or None,
            **_known(kwargs),
        }
        given = {name: value for name, value in given.items() if value is not None}
        if config is not None and given:
            raise ConfigError(
                f"Give {', '.join(given)} in the config, or no config: config.replace(...)."
            )
        self.config = config or ClientConfig.from_env(**given)
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

    def openai_options(self, *, options: Options = None) -> dict[str, str]:
        """Arguments for an OpenAI client of this server: `OpenAI(**service.openai_options())`.

        Waits until the server answers; the embedded one is started.

        Raises:
            NotSupportedError: The key comes from a credential command, whose tokens end; give the
                client a key of its own.
        """
        self.get_server_capabilities(options=options).result()
        config = self._sessionless().config
        if config.api_key is None:
            raise NotSupportedError(
                "A credential command's tokens end while an OpenAI client lives. Make the client "
                f"with base_url={config.base_url}/v1 and an API key.",
                path="api_key",
            )
        return {"base_url": f"{config.base_url}/v1", "api_key": config.api_key}

    openai_options_async = threaded(openai_options)

    def get_server_address(self, *, options: Options = None) -> str:
        """The `base_url` that brings another program to this server: `local` for the private one.

        Waits until the server answers; the embedded one is started.
        """
        self.get_server_capabilities(options=options).result()
        return self._sessionless().address

    get_server_address_async = threaded(get_server_address)

    def get_server_capabilities(
        self, *, options: Options = None
    ) -> DirectFuture[types.GetServerCapabilitiesResponse]:
        """Which models the server offers."""
        holder = self._sessionless()
        call = Call.to("get_server_capabilities").having(options)
        kind = types.GetServerCapabilitiesResponse
        future = holder.spawn(lambda waiting: holder.ask(call, kind, waiting), call.limits)
        return DirectFuture.of(future, "get_server_capabilities", kind)

    get_server_capabilities_async = awaited(get_server_capabilities)

    def trajectories(
        self, trajectory_id: str, *, options: Options = None
    ) -> DirectFuture[types.Trajectory]:
        """The conversations recorded under an id by the OpenAI and Anthropic endpoints.

        They come back as exact tokens: `result.to_datums(reward)` is ready to train on.
        """
        holder = self._sessionless()
        ids = {"trajectory_id": quote(trajectory_id, safe="")}
        call = Call.to("get_trajectory", ids=ids).having(options)
        kind = types.Trajectory
        future = holder.spawn(lambda waiting: holder.ask(call, kind, waiting), call.limits)
        return DirectFuture.of(future, "trajectories", kind)

    trajectories_async = awaited(trajectories)

    # -- training

    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: Any = None,
        *,
        name: str | None = None,
        options: Options = None,
    ) -> TrainingClientFuture:
        """A fresh LoRA adapter on a base model, by default that of the ServiceClient.

        `name` is what the run is called in lists, in the console and by commands; it travels as
        `user_metadata["name"]`.
        """
        base_model = self.config.model if base_model is None else base_model
        if not base_model or not isinstance(base_model, str):
            raise InvalidInputError(
                f"expected a model name, got {base_model!r}; or give ServiceClient(model=...)",
                path="base_model",
            )
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
        holder, metadata = self.holder, with_name(user_metadata, name)
        future = holder.spawn(
            lambda waiting: create_model(
                holder, base_model, lora, metadata, optimizer, waiting, options
            ),
            CallLimits.of(options),
        )
        return TrainingClientFuture.of(future, "create_lora_training_client", TrainingClient)

    create_lora_training_client_async = awaited(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: Any = None,
        *,
        name: str | None = None,
        options: Options = None,
    ) -> TrainingClientFuture:
        """Train on from a checkpoint's weights; the optimizer starts afresh."""
        return self._from_state(
            "create_training_client_from_state",
            path=path,
            base_model=base_model,
            user_metadata=with_name(user_metadata, name),
            weights_access_token=weights_access_token,
            optimizer_config=optimizer,
            options=options,
        )

    create_training_client_from_state_async = awaited(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        name: str | None = None,
        continues_at: int | None = None,
        options: Options = None,
    ) -> TrainingClientFuture:
        """Train on exactly where a checkpoint was saved, optimizer included.

        With `continues_at`, the number of steps that your loop had made by then, a Tinkex server
        shows this and the run of the checkpoint as one run with one curve. Without it the new run
        stands beside the old one.
        """
        return self._from_state(
            "create_training_client_from_state_with_optimizer",
            continues_at=continues_at,
            path=path,
            base_model=base_model,
            user_metadata=with_name(user_metadata, name),
            weights_access_token=weights_access_token,
            optimizer=True,
            options=options,
        )

    create_training_client_from_state_with_optimizer_async = awaited(
        create_training_client_from_state_with_optimizer
    )

    def _from_state(
        self, name: str, *, options: Options, continues_at: int | None = None, **asked: Any
    ) -> TrainingClientFuture:
        validation.check_tinker_path(asked["path"], name="path")
        wanted, holder = types.LoadWeightsRequest(**asked), self.holder

        async def create(waiting: Waiting) -> TrainingClient:
            client = await create_from_state(holder, wanted, waiting, options)
            if continues_at is not None:
                await continue_run(client, wanted.path, continues_at, options)
            return client

        future = holder.spawn(create, CallLimits.of(options))
        return TrainingClientFuture.of(future, name, TrainingClient)

    # -- sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        options: Options = None,
    ) -> SamplingClientFuture:
        """Sample from a saved checkpoint or from a base model, by default the ServiceClient's."""
        if model_path is None and base_model is None:
            base_model = self.config.model
        future = SamplingClient.create(
            self.holder,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            options=options,
        )
        return SamplingClientFuture.of(future, "create_sampling_client", SamplingClient)

    create_sampling_client_async = awaited(create_sampling_client)

    # -- more

    def create_custom_loss(
        self, fn: Callable[..., Any], input_ranks: Mapping[str, int], *, options: Options = None
    ) -> APIFuture[LossHandle]:
        """Trace a loss written in torch, once, to be run by the server in one pass."""
        return custom_calls.create_custom_loss(self.holder, fn, input_ranks, options)

    create_custom_loss_async = awaited(create_custom_loss)

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        options: Options = None,
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
            options=options,
        )

    copy_weights_async = awaited(copy_weights)

    def interpolate_checkpoints(
        self,
        source_paths: Sequence[str],
        coefficients: Sequence[float],
        name: str | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.InterpolateCheckpointsResponse]:
        """A checkpoint between others, as `RestClient.interpolate_checkpoints` makes it."""
        return RestClient(self._sessionless()).interpolate_checkpoints(
            source_paths, coefficients, name, options=options
        )

    interpolate_checkpoints_async = awaited(interpolate_checkpoints)

    def create_rest_client(self) -> RestClientFuture:
        """A client for listings and checkpoints of the same service. Touches no network."""
        made: APIFuture[RestClient] = APIFuture()
        made.set_result(RestClient(self._sessionless()))
        return RestClientFuture.of(made, "create_rest_client", RestClient)

    create_rest_client_async = awaited(create_rest_client)

    def get_console_url(self) -> str:
        """Where a browser shows this session (or all of them, before the first call).

        A private server that was not used yet is started, for it has no address before.
        """
        holder = self._holder.latest if self._holder else self._sessionless()
        if holder.config.base_url == LOCAL:
            self.get_server_capabilities().result()
        return session_url(holder.session_id, holder.config.console)

    def get_telemetry(self) -> Reporter | None:
        """The reporter that tells the server of errors; None where telemetry is off."""
        return self._holder.latest.reporter if self._holder else None

    def __repr__(self) -> str:
        holder = self._holder.latest if self._holder is not None else None
        where = holder.config.base_url if holder is not None else self.config.base_url
        session = holder.session_id if holder is not None else None
        state = ", closed" if self._closing is not None else ""
        return f"<ServiceClient of {where}, session {session or 'not begun'}{state}>"

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

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close(*_ending(error)).result(60)

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        await self.close(*_ending(error))

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ServiceClient belongs to the process that made it. Make a new one there, or pickle "
            "a SamplingClient."
        )


_FIELDS = tuple(field.name for field in fields(ClientConfig))
_ARGUMENTS = ("timeout", "default_headers", "default_headers_overrides", "config", *_FIELDS)


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that there are. The official SDK lets others pass with a warning.

    Raises:
        ConfigError: One is misspelt, and would be missed.
    """
    unknown = sorted(settings.keys() - set(_FIELDS))
    for name in unknown:
        if (near := nearest(name, _ARGUMENTS)) is not None:
            raise ConfigError(f"ServiceClient has no argument {name!r}. Did you mean {near!r}?")
    if unknown:
        warn(
            f"ServiceClient ignores {', '.join(unknown)}; its arguments are "
            f"{', '.join(sorted(_ARGUMENTS))}."
        )
    return {name: value for name, value in settings.items() if name in _FIELDS}


def _ending(error: BaseException | None) -> tuple[FinishStatus, str | None]:
    if error is None:
        return "success", None
    status: FinishStatus = "errored" if isinstance(error, Exception) else "interrupted"
    return status, f"{type(error).__name__}: {error}"[:1000]
