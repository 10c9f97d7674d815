"""Make a model on the server and the client that trains it: fresh, or from a checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from tinkex import types
from tinkex.client.futures import Waiting
from tinkex.client.http.options import Options, without_key
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.session.holder import Holder
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import APIStatusError, InvalidInputError
from tinkex.types.account.checkpoints import TinkerPath
from tinkex.wire.endpoints import ENDPOINTS

logger = logging.getLogger(__name__)


async def create_model(
    holder: Holder,
    base_model: str,
    lora: types.LoraConfig,
    user_metadata: dict[str, str] | None,
    optimizer: Any,
    waiting: Waiting,
    options: Options = None,
) -> TrainingClient:
    """A fresh LoRA adapter on a base model."""
    assert holder.session_id is not None
    number = holder.session.next_number("model")
    request = types.CreateModelRequest(
        session_id=holder.session_id,
        model_seq_id=number,
        base_model=base_model,
        user_metadata=user_metadata,
        lora_config=lora,
        optimizer_config=optimizer or types.AdamOptimizerConfig(),
    )
    kind = types.CreateModelResponse
    created = await holder.promised(
        "create_model", request, kind, waiting, window=False, options=options
    )
    return TrainingClient(holder, number, created.model_id, base_model)


async def create_from_state(
    holder: Holder, wanted: types.LoadWeightsRequest, waiting: Waiting, options: Options = None
) -> TrainingClient:
    """A new model that begins as a checkpoint; `wanted` says which, and how much of it."""
    if not holder.flags.create_model_via_load_weights:
        return await _create_then_load(holder, wanted, waiting, options)
    number = holder.session.next_number("model")
    request = wanted.model_copy(update={"session_id": holder.session_id, "model_seq_id": number})
    kind = types.LoadWeightsResponse
    await holder.promised("load_weights", request, kind, waiting, options=options)
    model_id = f"{holder.session_id}:train:{number}"
    client = TrainingClient(holder, number, model_id, wanted.base_model)
    client._calls.steps.loaded()
    return client


def with_name(metadata: dict[str, str] | None, name: str | None) -> dict[str, str] | None:
    """The metadata of a new run that is called `name`: where every server keeps it.

    Raises:
        InvalidInputError: The metadata names it otherwise, or it cannot be a name.
    """
    if name is None:
        return metadata
    ENDPOINTS["describe_run"].request(name=name)  # refuses what is no name
    if (metadata or {}).get("name", name) != name:
        raise InvalidInputError(
            f"is {name!r}, and user_metadata names the run {(metadata or {})['name']!r}; give one",
            path="name",
        )
    return {**(metadata or {}), "name": name}


async def continue_run(
    client: TrainingClient, path: str, step: int, options: Options = None
) -> None:
    """Make a client's run the last segment of the run whose checkpoint it was made from."""
    before = TinkerPath.parse(path).run_id
    try:
        await RestClient(client.holder).describe_run(
            client.model_id, continues=(before, step), options=without_key(options)
        )
    except APIStatusError as exc:
        if exc.status_code not in (404, 405):
            raise
        # A server without segments lists the two runs one beside the other, and trains as well.
        logger.info("this server does not join runs: %s", exc)


async def _create_then_load(
    holder: Holder, wanted: types.LoadWeightsRequest, waiting: Waiting, options: Options = None
) -> TrainingClient:
    """The way of servers that cannot create by loading: look, create, load (5.8)."""
    token = wanted.weights_access_token
    info = await holder.post(
        "weights_info",
        types.WeightsInfoRequest(tinker_path=wanted.path),
        types.WeightsInfoResponse,
        headers={"X-API-Key": token} if token else None,
        options=without_key(options),
        waiting=waiting,
    )
    lora = types.LoraConfig(
        rank=info.lora_rank or 32,
        train_unembed=info.train_unembed is not False,
        train_mlp=info.train_mlp is not False,
        train_attn=info.train_attn is not False,
    )
    family = info.optimizer_config if wanted.optimizer else wanted.optimizer_config
    base_model = wanted.base_model or info.base_model
    client = await create_model(
        holder, base_model, lora, wanted.user_metadata, family, waiting, options
    )
    await client._load(wanted.path, token, without_key(options), optimizer=wanted.optimizer)
    return client
