"""How to sample, and the request that asks for it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from tinkex.contract import sampling
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.bounds import Count, Id, Name, Number, Path, listing, text
from tinkex.types.fields.message import Request, all_known

StopText: TypeAlias = Annotated[str, text(sampling.MAX_STOP_CHARACTERS, 1)]
StopTexts: TypeAlias = Annotated[list[StopText], *listing(sampling.MAX_STOP_TEXTS)]
StopTokens: TypeAlias = Annotated[list[Count], *listing(sampling.MAX_STOP_TOKENS)]
StopBoth: TypeAlias = Annotated[list[StopText | Count], *listing(sampling.MAX_STOP_TEXTS)]
"""Texts and token ids in one list: Tinkex servers only."""
_DRAW, _OPTIONS = sampling.DrawSettings(), sampling.SampleOptions()


class SamplingParams(Request):
    """How tokens are drawn.

    `stop` is a string, or a list of strings, of token ids, or of both. None means the model's own
    end tokens; an empty list means that nothing but `max_tokens` ends a sequence. Meanings and
    ranges of the others are in docs/sampling.md.
    """

    max_tokens: sampling.MaxTokens | None = _DRAW.max_tokens
    seed: sampling.Seed | None = _DRAW.seed
    stop: StopText | StopTexts | StopTokens | StopBoth | None = None
    temperature: sampling.Temperature = _DRAW.temperature
    top_k: sampling.TopK = _DRAW.top_k
    top_p: sampling.TopP = _DRAW.top_p
    min_p: sampling.MinP | None = _DRAW.min_p
    logit_bias: sampling.LogitBias | None = _DRAW.logit_bias


class SampleRequest(Request):
    """Sample from a prompt. `prompt_logprobs` left out, None and False differ on the wire."""

    num_samples: sampling.NumSamples = _OPTIONS.num_samples
    prompt: ModelInput
    sampling_params: Annotated[SamplingParams, all_known(SamplingParams)]
    base_model: Name | None = None
    model_path: Path | None = None
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: sampling.NumLikeliest = _OPTIONS.topk_prompt_logprobs
    topk_sample_logprobs: sampling.NumLikeliest = _OPTIONS.topk_sample_logprobs
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: sampling.NumAlternatives = _OPTIONS.prompt_alt_tokens_k
    prompt_logprobs_last_n: sampling.LastN | None = _OPTIONS.prompt_logprobs_last_n
    routed_experts: bool | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class CreateSamplingSessionRequest(Request):
    """Open a sampler for a base model or a saved checkpoint."""

    session_id: Id
    sampling_session_seq_id: Number = 0
    base_model: Name | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    """Ask for a number that tells this copy of a sampling client from the others."""

    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"
