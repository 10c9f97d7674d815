"""The weights of a run: saved, loaded, and sampled from.

The half of a TrainingClient that makes checkpoints and sampling clients; the other half trains.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from pydantic import BaseModel

from tinkex import types
from tinkex.client import validation
from tinkex.client.deprecations import warn
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.call import Call
from tinkex.client.http.options import Options, without_key
from tinkex.client.sampling.sample_retry import RetryConfig
from tinkex.client.sampling.sampling_client import SamplingClient, SamplingClientFuture
from tinkex.client.session.holder import Holder
from tinkex.client.session.polling import Expect
from tinkex.client.training.submission import CallPart
from tinkex.client.training.training_calls import TrainingCalls
from tinkex.client.twins import awaited, submitted
from tinkex.types.account.checkpoints import check_name
from tinkex.wire.endpoints import ENDPOINTS

T = TypeVar("T")


class WeightsCalls:
    """The calls of a run that save its weights, replace them, or sample from them."""

    holder: Holder
    model_id: str
    _calls: TrainingCalls
    _lock: threading.RLock

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights and optimizer under `tinker://MODEL/weights/NAME`, to resume from later."""
        fields = {"overwrite": overwrite, "user_metadata": user_metadata}
        return self._save_as(
            "save_weights", types.SaveWeightsResponse, name, ttl_seconds, fields, options
        )

    save_state_async = submitted(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save weights under `tinker://MODEL/sampler_weights/NAME`, to sample from."""
        kind, fields = types.SaveWeightsForSamplerResponse, {"user_metadata": user_metadata}
        return self._save_as("save_weights_for_sampler", kind, name, ttl_seconds, fields, options)

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        options: Options = None,
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Export weights for download, encrypted to the given age recipients if there are any."""
        fields = {"age_encryption_recipients": age_encryption_recipients}
        kind = types.SaveWeightsExternalResponse
        return self._save_as("save_weights_external", kind, name, ttl_seconds, fields, options)

    save_weights_external_async = submitted(save_weights_external)

    def _save_as(
        self,
        row: str,
        kind: type[T],
        name: str,
        ttl_seconds: int | None,
        fields: dict[str, Any],
        options: Options,
    ) -> APIFuture[T]:
        request: BaseModel = ENDPOINTS[row].request(
            model_id=self.model_id,
            path=check_name(name, path="name"),
            ttl_seconds=validation.check_ttl(ttl_seconds),
            **fields,
        )
        return self._calls.submit_json(row, request, kind, quick_retries=0, options=options)

    def load_state(
        self, path: str, weights_access_token: str | None = None, *, options: Options = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Replace the weights by a checkpoint's; the optimizer starts afresh."""
        return self._load(path, weights_access_token, options, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, *, options: Options = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Replace weights and optimizer by a checkpoint's, to go on exactly where it was saved."""
        return self._load(path, weights_access_token, options, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def _load(
        self,
        path: str,
        weights_access_token: str | None,
        options: Options = None,
        *,
        optimizer: bool,
    ) -> APIFuture[types.LoadWeightsResponse]:
        validation.check_tinker_path(path, name="path")
        request = types.LoadWeightsRequest(
            model_id=self.model_id,
            path=path,
            optimizer=optimizer,
            weights_access_token=weights_access_token,
        )
        with self._lock:
            self._calls.steps.loaded()
            kind = types.LoadWeightsResponse
            return self._calls.submit_json("load_weights", request, kind, options=options)

    # -- sampling

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: types.SamplingClientKind = "snapshot",
        *,
        options: Options = None,
    ) -> SamplingClientFuture:
        """Freeze the weights as they are after all calls so far, and sample from them.

        The snapshot is unnamed and lives as long as the session; `name` has no effect. With
        `kind="inflight"` the client goes on to the weights of every later inflight save of this
        model: a sample uses the weights saved when its client was made, or newer ones.
        """
        future = self._snapshot(name, retry_config, record_stability_info, kind, options)
        return SamplingClientFuture.of(
            future, "save_weights_and_get_sampling_client", SamplingClient
        )

    save_weights_and_get_sampling_client_sync = save_weights_and_get_sampling_client
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)

    def _snapshot(
        self,
        name: str | None,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
        kind: types.SamplingClientKind,
        options: Options,
    ) -> APIFuture[SamplingClient]:
        if name is not None:
            warn(
                "save_weights_and_get_sampling_client ignores `name`: the snapshot is unnamed. "
                "Use save_weights_for_sampler for a named one."
            )
        holder = self.holder
        path, answers = "save_weights_for_sampler", types.SaveWeightsForSamplerResponseInternal

        def encode(seq_id: int) -> Call:
            request = types.SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                sampling_session_seq_id=holder.session.next_number("sampling_session"),
                kind=None if kind == "snapshot" else kind,
                seq_id=seq_id,
            )
            return self._calls.json_call(path, request, quick_retries=0)

        with self._lock:
            num_steps = self._calls.steps.num_asked
            parts, expect = [CallPart(encode)], Expect.of(path, answers)
            saved = self._calls.submit(path, parts, expect, options=options)

        async def make(waiting: Waiting) -> SamplingClient:
            answer = await saved
            if answer.sampling_session_id is not None and kind == "snapshot":
                self._calls.steps.saved(answer.sampling_session_id, num_steps)
            return await SamplingClient.create(
                holder,
                model_path=answer.path if answer.sampling_session_id is None else None,
                sampling_session_id=answer.sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
                options=without_key(options),
            )

        return holder.spawn(make)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        options: Options = None,
    ) -> SamplingClientFuture:
        """Sample from a saved checkpoint."""
        future = self._sampler(model_path, retry_config, record_stability_info, options)
        return SamplingClientFuture.of(future, "create_sampling_client", SamplingClient)

    create_sampling_client_async = awaited(create_sampling_client)

    def _sampler(
        self,
        model_path: str,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
        options: Options,
    ) -> APIFuture[SamplingClient]:
        return SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            options=options,
        )
