"""Which bytes a training or sampling call sends, and how its result is read.

A thin layer over `tinkex.wire`: it picks the generation the server speaks and wraps bodies into
calls. The functions are pure; those over large batches run on worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import orjson

from tinkex import types
from tinkex.client.http.headers import PROTOBUF
from tinkex.client.http.transport import Call
from tinkex.client.polling import Expect
from tinkex.client.session.flags import ServerFlags
from tinkex.client.training.submission import CallPart
from tinkex.errors import InvalidInputError
from tinkex.types.data.tensor_data import from_list
from tinkex.wire import chunking, requests, results

if TYPE_CHECKING:
    from tinkex.client.sampling.sample_fields import SampleFields

__all__ = [
    "EXPECT_FORWARD",
    "EXPECT_FORWARD_BACKWARD",
    "EXPECT_SAMPLE",
    "decode_sample",
    "pass_parts",
    "sample_body",
    "target_tensor",
]


# -------------------------------------------------------------------------------- training


def pass_parts(
    flags: ServerFlags,
    model_id: str,
    data: Sequence[types.Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
) -> list[CallPart]:
    """The requests of one pass: the batch, cut as the server wants it."""
    limits = chunking.LIMITS_V04
    if not flags.old_generation:
        limits = chunking.ChunkLimits(
            max_datums=max(flags.fwdbwd_max_chunk_len, 1),
            max_size=max(flags.fwdbwd_max_chunk_bytes_count, 1),
        )
    parts = []
    for chunk in chunking.split(data, limits):
        # 0.4.1 tells "no config" from "a null config", so None is not passed on.
        config = () if loss_fn_config is None else (loss_fn_config,)
        asked = types.ForwardBackwardInput(chunk, loss_fn, *config)
        size_bytes = sum(map(chunking.datum_size, chunk))
        parts.append(CallPart(_pass_encoder(flags, model_id, asked, forward_only), size_bytes))
    return parts


def _pass_encoder(
    flags: ServerFlags, model_id: str, asked: types.ForwardBackwardInput, forward_only: bool
) -> Callable[[int], Call]:
    dialect = flags.generation
    path = "forward" if forward_only and flags.old_generation else "forward_backward"

    def encode(seq_id: int) -> Call:
        request: types.ForwardRequest | types.ForwardBackwardRequest
        if forward_only:
            request = types.ForwardRequest(asked, model_id, seq_id)
        else:
            request = types.ForwardBackwardRequest(asked, model_id, seq_id)
        body = requests.encode(path, request, dialect, compress=flags.proto_compress_fwdbwd)
        headers = {"Content-Encoding": body.content_encoding} if body.content_encoding else None
        return Call(
            method="POST",
            path=path,
            name="forward" if forward_only else "forward_backward",
            body=body.content,
            content_type=body.content_type,
            headers=headers,
        )

    return encode


EXPECT_FORWARD = Expect("Forward", types.ForwardBackwardOutput, in_protobuf=True)
EXPECT_FORWARD_BACKWARD = Expect("ForwardBackward", types.ForwardBackwardOutput, in_protobuf=True)


# -------------------------------------------------------------------------------- sampling


def decode_sample(content: bytes) -> types.SampleResponse:
    return results.decode(types.SampleResponse, content, PROTOBUF)


EXPECT_SAMPLE = Expect("Sample", types.SampleResponse, in_protobuf=True)


_SAMPLING_PARAMS = tuple(types.SamplingParams.model_fields)
_params_of = attrgetter(*_SAMPLING_PARAMS)


def sample_body(fields: SampleFields, sampling_session_id: str, seq_id: int) -> bytes:
    """The JSON of one sample; what `requests.encode` writes, made faster.

    The bytes are equal but for floats that have two spellings: 1e-05 there, 1e-5 here.
    """
    pairs = zip(_SAMPLING_PARAMS, _params_of(fields.params), strict=True)
    chosen = {
        # In JSON, keys are text.
        name: value if type(value) is not dict else {str(k): v for k, v in value.items()}
        for name, value in pairs
        if value is not None
    }
    body: dict[str, Any] = {
        "num_samples": fields.num_samples,
        "prompt": fields.prompt.to_dict(),
        "sampling_params": chosen,
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "prompt_logprobs": fields.prompt_logprobs,
        "topk_prompt_logprobs": fields.topk_prompt,
        "topk_sample_logprobs": fields.topk_sample,
    }
    if fields.target is not None:
        body["target_prompt_logprobs"] = fields.target.to_dict()
    body["prompt_alt_tokens_k"] = fields.alt_k
    if fields.last_n is not None:
        body["prompt_logprobs_last_n"] = fields.last_n
    if fields.routed_experts:
        body["routed_experts"] = True
    body["record_stability_info"] = fields.stability
    body["type"] = "sample"
    return orjson.dumps(body)


def target_tensor(value: Any) -> types.TensorData | None:
    """`target_prompt_logprobs` as a tensor of token ids: [length - 1, K], -1 skips a cell."""
    if value is None or isinstance(value, types.TensorData):
        tensor = value
    elif isinstance(value, (list, tuple)):
        tensor = from_list(value, types.TensorDtype.INT64)
    elif hasattr(value, "detach"):
        tensor = types.TensorData.from_torch_sparse(value, pad_value=-1)
    else:
        tensor = types.TensorData.from_numpy(value)
    if tensor is not None and tensor.dtype != "int64":
        raise InvalidInputError("expected token ids (int64)", path="target_prompt_logprobs")
    return tensor
