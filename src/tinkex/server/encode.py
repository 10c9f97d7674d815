"""Turn engine results into what travels: protobuf for today's clients, JSON for older ones.

A result is encoded once, as protobuf, and kept like that; the JSON of older generations is made
from it when asked for. Arrays are copied into the message once and never looped over in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tinkex.engine.jobs import Array, CsrArray, SampleResult, TopK, TrainResult
from tinkex.types import ForwardBackwardOutput, OptimStepResponse, SampleResponse
from tinkex.wire import results
from tinkex.wire import tinker_public_pb2 as pb

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
OUTPUT_TYPE = "ArrayRecord"


# ------------------------------------------------------------------------------------ protobuf


def train_payload(result: TrainResult) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    record = message.loss_fn_outputs.add()
    record.type_tag = OUTPUT_TYPE
    record.num_datums = len(result.outputs)
    for name in result.outputs[0] if result.outputs else ():
        _fill_batched(record.fields[name], [output[name] for output in result.outputs])
    for name, value in result.metrics.items():
        message.metrics[name] = float(value)
    return bytes(message.SerializeToString())


def _fill_batched(target: Any, arrays: Sequence[Array]) -> None:
    kind = np.dtype("<i8") if arrays[0].dtype.kind in "iu" else np.dtype("<f4")
    flat = [np.ascontiguousarray(array, dtype=kind) for array in arrays]
    target.data = b"".join(array.tobytes() for array in flat)
    ends = np.cumsum([0, *(array.nbytes for array in flat)], dtype="<i8")
    target.offsets = ends.tobytes()
    target.dtype = pb.DTYPE_INT64 if kind.kind == "i" else pb.DTYPE_FLOAT32
    target.trailing_shape.extend(flat[0].shape[1:])


def sample_payload(result: SampleResult) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        item = message.sequences.add()
        stopped = sequence.stop_reason == "stop"
        item.stop_reason = pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH
        item.tokens = np.ascontiguousarray(sequence.tokens, dtype="<i4").tobytes()
        item.logprobs = np.ascontiguousarray(sequence.logprobs, dtype="<f4").tobytes()
        if sequence.topk is not None:
            _fill_topk(item.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, result.topk_prompt)
    if result.target_prompt_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, result.target_prompt_logprobs)
    if result.prompt_alt is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, result.prompt_alt.token_ids)
        _fill_tensor(message.prompt_alt_tokens.logprobs, result.prompt_alt.logprobs)
    return bytes(message.SerializeToString())


def _fill_topk(target: Any, topk: TopK) -> None:
    target.token_ids = np.ascontiguousarray(topk.token_ids, dtype="<i4").tobytes()
    target.logprobs = np.ascontiguousarray(topk.logprobs, dtype="<f4").tobytes()
    target.length, target.k = topk.token_ids.shape


def _fill_tensor(target: Any, value: Array | CsrArray) -> None:
    if isinstance(value, CsrArray):
        csr = target.sparse_csr
        csr.values = value.values.astype("<f4").tobytes()
        csr.crow_indices = value.crow_indices.astype("<i8").tobytes()
        csr.col_indices = value.col_indices.astype("<i8").tobytes()
        target.dtype = pb.DTYPE_FLOAT32
        target.shape.extend(value.shape)
        return
    kind = {"i": ("<i4", pb.DTYPE_INT32), "f": ("<f4", pb.DTYPE_FLOAT32)}[value.dtype.kind]
    target.dense = np.ascontiguousarray(value, dtype=kind[0]).tobytes()
    target.dtype = kind[1]
    target.shape.extend(value.shape)


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
