"""Make a model on the server and the client that trains it: fresh, or from a checkpoint."""

from __future__ import annotations

from typing import Any

from tinkex import types
from tinkex.client.futures import Waiting
from tinkex.client.session.holder import Holder
from tinkex.client.training.training_client import TrainingClient


async def create_model(
    holder: Holder,
    base_model: str,
    lora: types.LoraConfig,
    user_metadata: dict[str, str] | None,
    optimizer: Any,
    waiting: Waiting,
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
    created = await holder.promised("create_model", request, kind, waiting, window=False)
    return TrainingClient(holder, number, created.model_id, base_model)


async def create_from_state(
    holder: Holder, wanted: types.LoadWeightsRequest, waiting: Waiting
) -> TrainingClient:
    """A new model that begins as a checkpoint; `wanted` says which, and how much of it."""
    if not holder.flags.create_model_via_load_weights:
        return await _create_then_load(holder, wanted, waiting)
    number = holder.session.next_number("model")
    request = wanted.model_copy(update={"session_id": holder.session_id, "model_seq_id": number})
    await holder.promised("load_weights", request, types.LoadWeightsResponse, waiting)
    model_id = f"{holder.session_id}:train:{number}"
    client = TrainingClient(holder, number, model_id, wanted.base_model)
    client._calls.steps.loaded()
    return client


async def _create_then_load(
    holder: Holder, wanted: types.LoadWeightsRequest, waiting: Waiting
) -> TrainingClient:
    """The way of servers that cannot create by loading: look, create, load (5.8)."""
    token = wanted.weights_access_token
    info = await holder.post(
        "weights_info",
        types.WeightsInfoRequest(tinker_path=wanted.path),
        types.WeightsInfoResponse,
        headers={"X-API-Key": token} if token else None,
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
    client = await create_model(holder, base_model, lora, wanted.user_metadata, family, waiting)
    await client._load(wanted.path, token, optimizer=wanted.optimizer)
    return client
