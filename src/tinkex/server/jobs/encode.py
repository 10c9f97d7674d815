"""Turn engine results into messages, and those into what travels.

A result is encoded once, as protobuf, and kept like that; the JSON of older generations is made
from it when asked for. Arrays are wrapped, not copied, and never looped over in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinkex.engine.jobs import Array, CsrArray, SampledTokens, SampleResult, TopK, TrainResult
from tinkex.types import (
    ForwardBackwardOutput,
    OptimStepResponse,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire import proto_results, results
from tinkex.wire.generation import JSON, PROTOBUF

__all__ = ["JSON", "PROTOBUF", "metrics_json", "sample_json", "sample_payload", "train_json"]
OUTPUT_TYPE = "ArrayRecord"


def train_payload(result: TrainResult) -> bytes:
    outputs = [
        {name: _tensor(array) for name, array in output.items()} for output in result.outputs
    ]
    metrics = {name: float(value) for name, value in result.metrics.items()}
    message = ForwardBackwardOutput(OUTPUT_TYPE, outputs, metrics)
    return proto_results.encode_pass(message)


def sample_payload(result: SampleResult) -> bytes:
    message = SampleResponse(
        [_sequence(sequence) for sequence in result.sequences],
        result.prompt_logprobs,
        _topk(result.topk_prompt),
        None if (found := result.target_prompt_logprobs) is None else _tensor(found),
        result.prompt_cache_hit_tokens,
        _alternatives(result.prompt_alt),
        prompt_routed_experts=_experts(result.prompt_routed_experts),
    )
    return proto_results.encode_sample(message)


def _sequence(sequence: SampledTokens) -> SampledSequence:
    return SampledSequence.wrap(
        StopReason.STOP if sequence.stop_reason == "stop" else StopReason.LENGTH,
        "",
        sequence.tokens.astype("<i4", copy=False),
        sequence.logprobs.astype("<f4", copy=False),
        _topk(sequence.topk),
        routed_experts=_experts(sequence.routed_experts),
    )


def _topk(topk: TopK | None) -> TopkLogprobs | None:
    if topk is None:
        return None
    ids, values = topk.token_ids, topk.logprobs
    return TopkLogprobs.wrap(ids.astype("<i4", copy=False), values.astype("<f4", copy=False))


def _experts(words: Array | None) -> TensorData | None:
    return None if words is None else _tensor(words)


def _alternatives(topk: TopK | None) -> PromptAltTokens | None:
    return (
        None if topk is None else PromptAltTokens(_tensor(topk.token_ids), _tensor(topk.logprobs))
    )


def _tensor(value: Array | CsrArray) -> TensorData:
    if isinstance(value, CsrArray):
        crow, col = value.crow_indices.astype("<i8"), value.col_indices.astype("<i8")
        return TensorData.wrap(value.values.astype("<f4"), crow, col, tuple(value.shape))
    # The two kinds that the wire knows, little-endian as protobuf's packed bytes are.
    kind = "<i8" if value.dtype.kind in "iu" else "<f4"
    return TensorData.wrap(np.asarray(value, dtype=kind))


# ------------------------------------------------------------------------------------ JSON


def train_json(payload: bytes) -> bytes:
    """The ForwardBackwardOutput of clients up to 0.24."""
    return results.encode(results.decode(ForwardBackwardOutput, payload, PROTOBUF)).content


def sample_json(payload: bytes, sequence_ids: Sequence[str] = ()) -> bytes:
    """The SampleResponse of clients up to 0.24, and of streams."""
    response = results.decode(
        SampleResponse, payload, PROTOBUF, sequence_ids=list(sequence_ids) or None
    )
    return results.encode(response).content


def metrics_json(metrics: Mapping[str, float]) -> bytes:
    """The OptimStepResponse. NaN, which JSON cannot hold, travels as a name every client reads."""
    return results.encode(OptimStepResponse(metrics=dict(metrics))).content
