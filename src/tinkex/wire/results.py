"""Every result body, for both sides: what a server answers, and what a client makes of it.

Samples and passes travel as protobuf to peers that accept it and as JSON to older ones; everything
else is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.fields.value import short
from tinkex.types.sampling.response import SampleResponse
from tinkex.types.training.forward_backward import ForwardBackwardOutput
from tinkex.wire import json_codec, proto_results
from tinkex.wire.body import Body
from tinkex.wire.generation import JSON, PROTOBUF, names_protobuf

ResultT = TypeVar("ResultT")

# ------------------------------------------------------------------------------------ server


def encode(value: Any, accept: str | None = None) -> Body:
    """A result as the bytes a caller with this Accept header understands."""
    if isinstance(value, SampleResponse):
        if names_protobuf(accept):
            return Body(proto_results.encode_sample(value), PROTOBUF)
        return Body(_dumps(_plain_sample(value), is_finite=not _has_infinity(value)), JSON)
    if isinstance(value, ForwardBackwardOutput):
        if names_protobuf(accept):
            return Body(proto_results.encode_pass(value), PROTOBUF)
        return Body(_dumps(value.to_dict(), is_finite=_is_finite(value)), JSON)
    if isinstance(value, BaseModel):
        return Body(value.model_dump_json(exclude_none=True).encode(), JSON)
    raise InvalidInputError(f"{type(value).__name__} is not a result")


def _dumps(value: Any, *, is_finite: bool) -> bytes:
    """JSON, with `NaN` and `-Infinity` spelled as Python's own reader knows them."""
    if is_finite:
        return orjson.dumps(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _has_infinity(response: SampleResponse) -> bool:
    """Whether a logprob is infinite; a missing one (NaN) is null in JSON."""
    arrays = [response.prompt_logprobs_np, *(item.logprobs_np for item in response.sequences)]
    topks = [response.topk_prompt_logprobs_np]
    topks += [item.topk_logprobs_np for item in response.sequences]
    arrays += [topk.logprobs for topk in topks if topk is not None]
    return any(array is not None and bool(np.isinf(array).any()) for array in arrays)


def _is_finite(output: ForwardBackwardOutput) -> bool:
    tensors = (tensor for item in output.loss_fn_outputs for tensor in item.values())
    return all(map(math.isfinite, output.metrics.values())) and all(
        bool(np.isfinite(tensor.array).all()) for tensor in tensors
    )


def _plain_sample(response: SampleResponse) -> dict[str, Any]:
    plain = response.to_dict()
    for name in ("target_prompt_logprobs", "prompt_alt_tokens"):
        plain.pop(name, None)  # no JSON of an official SDK has them
    for sequence, given in zip(plain["sequences"], response.sequences, strict=True):
        # Older clients know two reasons only.
        sequence["stop_reason"] = "length" if given.stop_reason.is_length else "stop"
    return plain


# ------------------------------------------------------------------------------------ client


def decode(
    kind: type[ResultT],
    content: bytes,
    content_type: str | None = JSON,
    *,
    sequence_ids: Sequence[str] | None = None,
) -> ResultT:
    """The result of a known kind in a body.

    `sequence_ids` are the ones the promise of a sample carried; they become the sequences' ids.

    Raises:
        WireError: With the path of the first thing that is wrong.
    """
    if kind is SampleResponse:
        if names_protobuf(content_type):
            return proto_results.decode_sample(content, sequence_ids)  # type: ignore[return-value]
        return _sample_from_json(content, sequence_ids)  # type: ignore[return-value]
    if kind is ForwardBackwardOutput:
        if names_protobuf(content_type):
            return proto_results.decode_pass(content)  # type: ignore[return-value]
        output = ForwardBackwardOutput._from_dict(json_codec.loads_object(content))
        return output  # type: ignore[return-value]
    if not issubclass(kind, BaseModel):
        raise InvalidInputError(f"{kind.__name__} is not a result")
    if names_protobuf(content_type):
        raise WireError(f"{kind.__name__} is sent as JSON, got {short(content_type)}")
    return json_codec.validate(kind, content)


def _sample_from_json(content: bytes, sequence_ids: Sequence[str] | None) -> SampleResponse:
    response = SampleResponse._from_dict(json_codec.loads_object(content))
    return response if sequence_ids is None else with_sequence_ids(response, sequence_ids)


def with_sequence_ids(response: SampleResponse, sequence_ids: Sequence[str]) -> SampleResponse:
    """The same response with the ids its promise carried."""
    if len(sequence_ids) != len(response.sequences):
        raise WireError(
            f"expected {len(sequence_ids)} sequences, got {len(response.sequences)}",
            path="sequences",
        )
    named = [
        sequence._replace(sequence_id=name)
        for sequence, name in zip(response.sequences, sequence_ids, strict=True)
    ]
    return response._replace(sequences=named)
