"""Models being trained: making one, asking about one, letting one go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tinkex.contract.bounds import Between
from tinkex.contract.models import MAX_RANK
from tinkex.types.fields.bounds import Count, Id, Name, PlainMetadata, Seed
from tinkex.types.fields.identifiers import ModelID
from tinkex.types.fields.message import Request, Response, all_known
from tinkex.types.training.optimizer import AdamOptimizerConfig, OptimizerConfig


class LoraConfig(Request):
    """The shape of a LoRA adapter: its rank, its seed, and which layers get one."""

    rank: Annotated[int, Between(1, MAX_RANK, becomes="memory_bytes")]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Scales the adapter by alpha / rank; Tinkex servers only. None: 32."""


class CreateModelRequest(Request):
    """Start a training run: a fresh adapter on a base model."""

    session_id: Id
    model_seq_id: Count = 0
    base_model: Name
    user_metadata: PlainMetadata | None = None
    lora_config: Annotated[LoraConfig, all_known(LoraConfig)] | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Response):
    """The id of the new model, which is also the id of its training run."""

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    """Ask what a model is."""

    model_id: Id
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    """The facts of a base model; `tokenizer_id` names the tokenizer to load."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Response):
    """The facts of a training run."""

    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class UnloadModelRequest(Request):
    """Free a model's memory; SDK 0.4.1 only sends this, Tinkex servers still honour it."""

    model_id: Id
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Response):
    """The model that was let go."""

    model_id: ModelID
    type: Literal["unload_model"] | None = None
