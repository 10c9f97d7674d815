"""`SampleResponse` and `ForwardBackwardOutput` as protobuf, both ways (contract 8.3)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.data.loss import LossFnOutput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.data.topk_logprobs import TopkLogprobs
from tinkex.types.sampling.response import PromptAltTokens, SampledSequence, SampleResponse
from tinkex.types.sampling.stop_reason import StopReason
from tinkex.types.training.forward_backward import ForwardBackwardOutput
from tinkex.wire import budget
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.paths import at
from tinkex.wire.tensors import (
    decode_tensor,
    dtype_code,
    encode_tensor,
    float32s,
    from_bytes,
    int32s,
    item_size,
)

ARRAY_RECORD = "ArrayRecord"
_STOP_REASONS = {
    pb.STOP_REASON_STOP: StopReason.STOP,
    pb.STOP_REASON_LENGTH: StopReason.LENGTH,
}

# ------------------------------------------------------------------------------------ samples


def encode_sample(response: SampleResponse) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        _fill_sequence(message.sequences.add(), sequence)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.tobytes()
    if response.topk_prompt_logprobs_np is not None:
        _fill_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        encode_tensor(response.target_prompt_logprobs, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        encode_tensor(response.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        encode_tensor(response.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    if response.prompt_routed_experts is not None:
        encode_tensor(response.prompt_routed_experts, message.prompt_routed_experts)
    return message.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def _fill_sequence(message: Any, sequence: SampledSequence) -> None:
    is_length = sequence.stop_reason.is_length
    message.stop_reason = pb.STOP_REASON_LENGTH if is_length else pb.STOP_REASON_STOP
    message.tokens = sequence.tokens_np.tobytes()
    if sequence.logprobs_np is not None:
        message.logprobs = sequence.logprobs_np.tobytes()
    if sequence.topk_logprobs_np is not None:
        _fill_topk(message.topk_sampled_logprobs, sequence.topk_logprobs_np)
    if sequence.routed_experts is not None:
        encode_tensor(sequence.routed_experts, message.routed_experts)


def _fill_topk(message: Any, topk: TopkLogprobs) -> None:
    message.token_ids = topk.token_ids.tobytes()
    message.logprobs = topk.logprobs.tobytes()
    message.length, message.k = topk.token_ids.shape


def decode_sample(content: bytes, sequence_ids: Sequence[str] | None = None) -> SampleResponse:
    """The response in the bytes. Ids do not travel in it; they came with the promise."""
    budget.check_protobuf(content, budget.SAMPLE)
    try:
        message = pb.SampleResponse.FromString(content)
    except DecodeError as exc:
        raise WireError(f"the body is not a valid SampleResponse: {exc}") from exc
    if sequence_ids is not None and len(sequence_ids) != len(message.sequences):
        raise WireError(
            f"expected {len(sequence_ids)} sequences, got {len(message.sequences)}",
            path="sequences",
        )
    sequences = []
    for index, item in enumerate(message.sequences):
        with at(f"sequences[{index}]"):
            sequences.append(_read_sequence(item, sequence_ids[index] if sequence_ids else ""))
    prompt = None
    if message.HasField("prompt_logprobs"):
        prompt = float32s(message.prompt_logprobs, path="prompt_logprobs")
    return SampleResponse(
        sequences,
        prompt,
        _read_topk(message, "topk_prompt_logprobs"),
        _read_optional_tensor(message, "target_prompt_logprobs"),
        message.prompt_cache_hit_tokens,
        _read_alternatives(message),
        prompt_routed_experts=_read_optional_tensor(message, "prompt_routed_experts"),
    )


def _read_sequence(message: Any, sequence_id: str) -> SampledSequence:
    # A reason of a newer server: the sample itself is whole.
    reason = _STOP_REASONS.get(message.stop_reason) or StopReason(f"code_{message.stop_reason}")
    tokens = int32s(message.tokens, path="tokens")
    logprobs = float32s(message.logprobs, path="logprobs") if message.logprobs else None
    if logprobs is not None and len(logprobs) != len(tokens):
        raise WireError(f"expected {len(tokens)} values, got {len(logprobs)}", path="logprobs")
    topk = _read_topk(message, "topk_sampled_logprobs")
    experts = _read_optional_tensor(message, "routed_experts")
    return SampledSequence.wrap(reason, sequence_id, tokens, logprobs, topk, routed_experts=experts)


def _read_topk(message: Any, name: str) -> TopkLogprobs | None:
    if not message.HasField(name):
        return None
    topk = getattr(message, name)
    shape = (topk.length, topk.k)
    if not topk.length or not topk.k:
        return None
    ids = int32s(topk.token_ids, path=f"{name}.token_ids")
    values = float32s(topk.logprobs, path=f"{name}.logprobs")
    for label, array in (("token_ids", ids), ("logprobs", values)):
        if array.size != topk.length * topk.k:
            raise WireError(
                f"expected {topk.length * topk.k} values, got {array.size}", path=f"{name}.{label}"
            )
    return TopkLogprobs.wrap(ids.reshape(shape), values.reshape(shape))


def _read_optional_tensor(message: Any, name: str) -> TensorData | None:
    if not message.HasField(name):
        return None
    with at(name):
        return decode_tensor(getattr(message, name))


def _read_alternatives(message: Any) -> PromptAltTokens | None:
    if not message.HasField("prompt_alt_tokens"):
        return None
    with at("prompt_alt_tokens.tokens"):
        tokens = decode_tensor(message.prompt_alt_tokens.tokens)
    with at("prompt_alt_tokens.logprobs"):
        return PromptAltTokens(tokens, decode_tensor(message.prompt_alt_tokens.logprobs))


# ------------------------------------------------------------------------------------ passes


def encode_pass(output: ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type)
    # One record per run of datums whose tensors agree in name, dtype and trailing shape.
    for layout, group in groupby(output.loss_fn_outputs, key=_layout):
        _fill_record(message.loss_fn_outputs.add(), layout, list(group))
    for name, value in output.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def _layout(output: LossFnOutput) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    return tuple(
        (name, dtype_code(tensor.array), tuple(tensor.shape or ())[1:])
        for name, tensor in sorted(output.items())
    )


def _fill_record(message: Any, layout: Any, outputs: list[LossFnOutput]) -> None:
    message.type_tag = ARRAY_RECORD
    message.num_datums = len(outputs)
    for name, code, trailing in layout:
        arrays = [_dense(output[name]) for output in outputs]
        ends = accumulate(array.nbytes for array in arrays)
        field = message.fields[name]
        field.data = b"".join(array.data for array in arrays)
        field.offsets = struct.pack(f"<{len(arrays) + 1}q", 0, *ends)
        field.dtype = code
        if trailing:
            field.trailing_shape.extend(trailing)


def _dense(tensor: TensorData) -> NDArray[Any]:
    return tensor.to_numpy() if tensor.is_sparse else np.ascontiguousarray(tensor.array)


def decode_pass(content: bytes) -> ForwardBackwardOutput:
    budget.check_protobuf(content, budget.PASS)
    try:
        message = pb.ForwardBackwardOutput.FromString(content)
    except DecodeError as exc:
        raise WireError(f"the body is not a valid ForwardBackwardOutput: {exc}") from exc
    kind = message.loss_fn_output_type.rpartition(":")[2]
    if not kind and not message.loss_fn_outputs:
        kind = ARRAY_RECORD
    outputs: list[LossFnOutput] = []
    names: set[str] | None = None
    for index, record in enumerate(message.loss_fn_outputs):
        fields = set(record.fields)
        if names is not None and fields != names:
            raise WireError(
                f"fields {sorted(fields)} differ from the first record's {sorted(names)}",
                path=f"loss_fn_outputs[{index}]",
            )
        names = fields
        with at(f"loss_fn_outputs[{index}]"):
            outputs += _read_record(record)
    return ForwardBackwardOutput(kind, outputs, dict(message.metrics))


def _read_record(record: Any) -> list[LossFnOutput]:
    columns: dict[str, list[TensorData]] = {}
    for name, field in record.fields.items():
        with at(name):
            columns[name] = _read_batched(field)
    num_datums = record.num_datums or max((len(c) for c in columns.values()), default=0)
    if columns:
        for name, column in columns.items():
            if len(column) != num_datums:
                raise WireError(f"expected {num_datums} tensors, got {len(column)}", path=name)
        if len(columns) == 1:
            return [{name: tensor} for tensor in column]
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]
    if not 0 <= num_datums <= _MAX_EMPTY_DATUMS:
        raise WireError(f"{num_datums} datums without a field", path="num_datums")
    return [{} for _ in range(num_datums)]


# num_datums is a bare number: without a bound, ten bytes would ask for billions of dicts.
_MAX_EMPTY_DATUMS = 100_000


def _read_batched(field: Any) -> list[TensorData]:
    raw_offsets = from_bytes(field.offsets, pb.DTYPE_INT64)
    data, code = field.data, field.dtype
    trailing = tuple(field.trailing_shape)
    row_items = 1
    for size in trailing:
        if size < 1:
            raise InvalidInputError(f"sizes must be 1 or more, got {trailing}", path="trailing")
        row_items *= size
    step = item_size(code) * row_items
    _check_offsets(raw_offsets, len(data), step)
    flat = from_bytes(data, code)
    if trailing:
        flat = flat.reshape((-1, *trailing))
    bounds = (raw_offsets // step).tolist()
    wrap = TensorData.wrap
    return [wrap(flat[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def _check_offsets(offsets: NDArray[np.int64], num_bytes: int, step: int) -> None:
    if not offsets.size or offsets[0] != 0 or offsets[-1] != num_bytes:
        raise WireError(f"must run from 0 to {num_bytes}, the number of bytes", path="offsets")
    if (np.diff(offsets) < 0).any() or (offsets % step).any():
        raise WireError(f"must rise in steps of {step} bytes", path="offsets")
