"""Every request body, by the name of its endpoint, in both dialects and for both sides.

Names are the last part of the path (`optim_step`, `asample`); where that is not unique, what the
call does (`finish_session`, `set_checkpoint_ttl`). Endpoints that have only a query string are not
here.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel

from tinkex import types
from tinkex.errors import InvalidInputError, WireError
from tinkex.types._value import Value, short
from tinkex.types.forward_backward import ForwardBackwardRequest, ForwardRequest
from tinkex.wire import json_codec, proto_requests
from tinkex.wire.body import DEFAULT_MAX_BYTES, Body, unpack
from tinkex.wire.generation import JSON, PROTOBUF, Generation, is_protobuf
from tinkex.wire.paths import at

_PASSES: dict[str, type[ForwardRequest] | type[ForwardBackwardRequest]] = {
    "forward": ForwardRequest,
    "forward_backward": ForwardBackwardRequest,
}
_INPUT_FIELD = {"forward": "forward_input", "forward_backward": "forward_backward_input"}

ENDPOINTS: dict[str, type[BaseModel] | type[Value]] = {
    **_PASSES,
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
    accepted: Any = tuple(_PASSES.values()) if name in _PASSES else expected
    if not isinstance(request, accepted):
        raise InvalidInputError(f"{name} takes {expected.__name__}, got {type(request).__name__}")
    if name in _PASSES:
        body = _encode_pass(name, request, generation)
        return body.compressed() if compress else body
    if generation is Generation.V0_4:
        return Body(json_codec.dumps_v04(request), JSON)
    return Body(json_codec.dumps_v36(request, keep_none=name in _EXPLICIT_NULL), JSON)


def _encode_pass(name: str, request: Any, generation: Generation) -> Body:
    if generation is Generation.V0_36:
        return Body(proto_requests.encode(request), PROTOBUF)
    given = request.input
    inner: dict[str, Any] = {"data": [], "loss_fn": str(given.loss_fn)}
    for datum in given.data:
        inner["data"].append(json_codec.plain_v04(datum))
    if given._given:
        inner["loss_fn_config"] = given.loss_fn_config and dict(given.loss_fn_config)
    outer = {_INPUT_FIELD[name]: inner, "model_id": request.model_id}
    if request._given:
        outer["seq_id"] = request.seq_id
    return Body(json_codec.dumps_v04(outer), JSON)


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
    if name in _PASSES:
        if is_protobuf(content_type):
            return proto_requests.decode(raw)
        return _decode_pass(name, json_codec.loads_object(raw))
    if is_protobuf(content_type):
        raise WireError(f"{name} is sent as JSON, got {short(content_type)}")
    return json_codec.validate(kind, raw)  # type: ignore[type-var]


def _kind(name: str) -> type[BaseModel] | type[Value]:
    if name not in ENDPOINTS:
        raise InvalidInputError(f"unknown endpoint {name!r}; known: {', '.join(sorted(ENDPOINTS))}")
    return ENDPOINTS[name]


def _decode_pass(name: str, body: dict[str, Any]) -> ForwardBackwardRequest | ForwardRequest:
    field = _INPUT_FIELD[name]
    inner = _object(body, field)
    listed = inner.get("data")
    if not isinstance(listed, list):
        raise WireError("expected a list", path=f"{field}.data")
    data = []
    for index, item in enumerate(listed):
        with at(f"data[{index}]"):
            datum = types.Datum._validate_object(item)
            for key, tensor in datum.loss_fn_inputs.items():
                with at(f"loss_fn_inputs.{key}"):
                    proto_requests.checked_finite(tensor)
            data.append(datum)
    loss_fn = inner.get("loss_fn")
    if not isinstance(loss_fn, str):
        raise WireError(f"expected text, got {short(loss_fn)}", path=f"{field}.loss_fn")
    given = (
        types.ForwardBackwardInput(data, loss_fn, _config(inner["loss_fn_config"], field))
        if "loss_fn_config" in inner
        else types.ForwardBackwardInput(data, loss_fn)
    )
    model_id = body.get("model_id")
    if not isinstance(model_id, str):
        raise WireError(f"expected text, got {short(model_id)}", path="model_id")
    if "seq_id" not in body:
        return _PASSES[name](given, model_id)
    return _PASSES[name](given, model_id, _seq_id(body["seq_id"]))


def _object(body: dict[str, Any], field: str) -> dict[str, Any]:
    value = body.get(field)
    if not isinstance(value, dict):
        raise WireError(f"expected an object, got {type(value).__name__}", path=field)
    return value


def _config(value: Any, field: str) -> dict[str, float | str] | None:
    path = f"{field}.loss_fn_config"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise WireError(f"expected an object, got {type(value).__name__}", path=path)
    for key, item in value.items():
        if isinstance(item, bool) or not isinstance(item, (int, float, str)):
            raise WireError(f"expected a number or text, got {short(item)}", path=f"{path}.{key}")
        if isinstance(item, (int, float)) and not math.isfinite(item):
            raise WireError(f"must be finite, got {item}", path=f"{path}.{key}")
    return value


def _seq_id(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise WireError(f"expected a number from 0, got {short(value)}", path="seq_id")
    return value
