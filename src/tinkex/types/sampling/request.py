"""How to sample, and the request that asks for it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.types._bounds import INT32, Count, Id, Name, Number, Path, Seed, listing, text
from tinkex.types._models import Request
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData

StopText: TypeAlias = Annotated[str, text(4096, 1)]
StopTexts: TypeAlias = Annotated[list[StopText], *listing(256)]
StopTokens: TypeAlias = Annotated[list[Count], *listing(4096)]
TopK: TypeAlias = Annotated[int, Field(ge=0, le=1024)]
"""How many of the likeliest tokens are told at each position."""


class SamplingParams(Request):
    """How tokens are drawn.

    `stop` is a string, a list of strings or a list of token ids. None means the model's own end
    tokens; an empty list means that nothing but `max_tokens` ends a sequence.
    """

    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | StopTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] = -1
    top_p: Annotated[float, Field(ge=1e-9, le=1)] = 1.0


class SampleRequest(Request):
    """Sample from a prompt. `prompt_logprobs` left out, None and False differ on the wire."""

    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: Name | None = None
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: TopK = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CreateSamplingSessionRequest(Request):
    """Open a sampler for a base model or a saved checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    """Ask for a number that tells this copy of a sampling client from the others."""

    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"
