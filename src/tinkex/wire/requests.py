"""Every request body, by the name of its endpoint, in both dialects and for both sides.

Names are the last part of the path (`optim_step`, `asample`); where that is not unique, what the
call does (`finish_session`, `set_checkpoint_ttl`). Endpoints that have only a query string are not
here. A server that must number a request before it judges it reads in two steps, with
`proto_requests` and `json_requests`, which `decode` joins.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tinkex import types
from tinkex.errors import InvalidInputError, WireError
from tinkex.types._value import Value, short
from tinkex.wire import json_codec, json_requests, proto_requests
from tinkex.wire.body import DEFAULT_MAX_BYTES, Body, unpack
from tinkex.wire.generation import JSON, PROTOBUF, Generation, is_protobuf
from tinkex.wire.json_requests import PASSES

ENDPOINTS: dict[str, type[BaseModel] | type[Value]] = {
    **PASSES,
    "asample": types.SampleRequest,
    "assign_session_project": types.AssignSessionProjectRequest,
    "cancel_future": types.CancelFutureRequest,
    "client_config": types.ClientConfigRequest,
    "client_dynamic_config": types.ClientConfigRequest,
    "copy_weights": types.CopyWeightsRequest,
    "create_custom_loss": types.CreateCustomLossRequest,
    "create_model": types.CreateModelRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "create_session": types.CreateSessionRequest,
    "finish_session": types.FinishSessionRequest,
    "get_info": types.GetInfoRequest,
    "join_sampling_session": types.JoinSamplingSessionRequest,
    "load_weights": types.LoadWeightsRequest,
    "optim_step": types.OptimStepRequest,
    "retrieve_future": types.FutureRetrieveRequest,
    "retrieve_futures": types.FuturesRetrieveRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "search_sessions": types.SessionSearchRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "set_checkpoint_ttl": types.SetCheckpointTtlRequest,
    "telemetry": types.TelemetrySendRequest,
    "unload_model": types.UnloadModelRequest,
    "weights_info": types.WeightsInfoRequest,
}
# Where None is a statement ("keep it for good") and is sent as null in every dialect.
_EXPLICIT_NULL = frozenset({"finish_session", "set_checkpoint_ttl"})
# Bodies that carry user data may be large; the rest are a few fields, and an error list of a
# hostile one must stay small.
_LARGE = frozenset({"asample", "forward", "forward_backward"})
_MEDIUM = frozenset({"create_custom_loss", "telemetry"})


def max_bytes(name: str) -> int:
    """The size limit of an endpoint's body unless the caller sets one."""
    if name in _LARGE:
        return DEFAULT_MAX_BYTES
    return 4 * 1024 * 1024 if name in _MEDIUM else 1024 * 1024


def encode(
    name: str,
    request: Any,
    generation: Generation = Generation.V0_36,
    *,
    compress: bool = False,
) -> Body:
    """A request as the bytes of a generation.

    In `V0_36` a `ForwardRequest` travels to `/forward_backward` with its forward-only flag; in
    `V0_4` it goes to `/forward`. `compress` puts passes under zstd; only if the server asked.

    Raises:
        InvalidInputError: The request has a value that cannot travel.
        NotSupportedError: It sets a field that this generation does not have.
    """
    expected = _kind(name)
    accepted: Any = tuple(PASSES.values()) if name in PASSES else expected
    if not isinstance(request, accepted):
        raise InvalidInputError(f"{name} takes {expected.__name__}, got {type(request).__name__}")
    if name in PASSES:
        body = (
            Body(proto_requests.encode(request), PROTOBUF)
            if generation is Generation.V0_36
            else Body(json_requests.encode(name, request), JSON)
        )
        return body.compressed() if compress else body
    if generation is Generation.V0_4:
        return Body(json_codec.dumps_v04(request), JSON)
    return Body(json_codec.dumps_v36(request, keep_none=name in _EXPLICIT_NULL), JSON)


def decode(
    name: str,
    content: bytes,
    content_type: str | None = JSON,
    content_encoding: str | None = None,
    *,
    limit_bytes: int | None = None,
) -> Any:
    """The request in a body, whichever generation wrote it.

    Unknown fields are ignored; wrong types, sizes and non-finite numbers are not. A protobuf pass
    with its forward-only flag gives a `ForwardRequest`.

    Raises:
        WireError: With the path of the first thing that is wrong.
    """
    kind = _kind(name)
    limit = max_bytes(name) if limit_bytes is None else limit_bytes
    raw = unpack(content, content_encoding, max_bytes=limit)
    if name in PASSES:
        if is_protobuf(content_type):
            return proto_requests.read(proto_requests.parse(raw))
        return json_requests.read(name, json_codec.loads_object(raw))
    if is_protobuf(content_type):
        raise WireError(f"{name} is sent as JSON, got {short(content_type)}")
    return json_codec.validate(kind, raw)  # type: ignore[type-var]


def _kind(name: str) -> type[BaseModel] | type[Value]:
    if name not in ENDPOINTS:
        raise InvalidInputError(f"unknown endpoint {name!r}; known: {', '.join(sorted(ENDPOINTS))}")
    return ENDPOINTS[name]
