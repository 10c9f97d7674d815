"""How to sample, and the request that asks for it."""

from __future__ import annotations

from typing import Literal

from tinkex.types._models import Listing, Request
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData


class SamplingParams(Request):
    """How tokens are drawn.

    `stop` is a string, a list of strings or a list of token ids. None means the model's own end
    tokens; an empty list means that nothing but `max_tokens` ends a sequence.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Listing[str] | Listing[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(Request):
    """Sample from a prompt. `prompt_logprobs` left out, None and False differ on the wire."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CreateSamplingSessionRequest(Request):
    """Open a sampler for a base model or a saved checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    """Ask for a number that tells this copy of a sampling client from the others."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"
