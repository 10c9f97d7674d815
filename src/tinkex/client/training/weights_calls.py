"""Saving and loading the weights of a run: the half of a TrainingClient that makes checkpoints."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from pydantic import BaseModel

from tinkex import types
from tinkex.client import validation
from tinkex.client.futures import APIFuture
from tinkex.client.http.options import Options
from tinkex.client.training.training_calls import TrainingCalls
from tinkex.client.twins import submitted
from tinkex.types.account.checkpoints import check_name
from tinkex.wire.endpoints import ENDPOINTS

T = TypeVar("T")


class WeightsCalls:
    """The calls of a run that save its weights or replace them."""

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
        asked = {"overwrite": overwrite, "user_metadata": user_metadata}
        return self._save_as(
            "save_weights", types.SaveWeightsResponse, name, ttl_seconds, asked, options
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
        kind, asked = types.SaveWeightsForSamplerResponse, {"user_metadata": user_metadata}
        return self._save_as("save_weights_for_sampler", kind, name, ttl_seconds, asked, options)

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
        asked = {"age_encryption_recipients": age_encryption_recipients}
        kind = types.SaveWeightsExternalResponse
        return self._save_as("save_weights_external", kind, name, ttl_seconds, asked, options)

    save_weights_external_async = submitted(save_weights_external)

    def _save_as(
        self,
        row: str,
        kind: type[T],
        name: str,
        ttl_seconds: int | None,
        asked: dict[str, Any],
        options: Options,
    ) -> APIFuture[T]:
        request: BaseModel = ENDPOINTS[row].request(
            model_id=self.model_id,
            path=check_name(name, path="name"),
            ttl_seconds=validation.check_ttl(ttl_seconds),
            **asked,
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
