"""Requests as SDK 0.4.1 writes them, for servers of that generation.

JSON everywhere, training data included. Fields that were never set are left out, and None is sent
as null. A field that came later is refused, unless an older server computes the same without it
(`_OPTIONAL`); those are left out.
"""

from __future__ import annotations

import base64
from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from tinkex.contract.losses import LOGPROBS
from tinkex.errors import NotSupportedError
from tinkex.types.data.chunks import DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.given import as_given
from tinkex.types.fields.value import short
from tinkex.types.training.optimizer import AdamParams, OptimStepRequest
from tinkex.wire.json_codec import dumps_slowly
from tinkex.wire.json_requests import INPUT_FIELD, Pass

# Fields SDK 0.4.1 knows, in its order, for the requests that have changed since.
_KNOWN = {
    "AdamParams": "learning_rate beta1 beta2 eps",
    "CreateModelRequest": "session_id model_seq_id base_model user_metadata lora_config type",
    "CreateSessionRequest": "tags user_metadata sdk_version type",
    "FutureRetrieveRequest": "request_id",
    "LoadWeightsRequest": "model_id path seq_id type",
    "OptimStepRequest": "optim_params model_id seq_id type",
    "SampleRequest": (
        "num_samples prompt sampling_params base_model model_path sampling_session_id seq_id "
        "prompt_logprobs topk_prompt_logprobs type"
    ),
    "SaveWeightsForSamplerRequest": "model_id path sampling_session_seq_id seq_id type",
    "SaveWeightsRequest": "model_id path seq_id type",
    "TelemetrySendRequest": "events platform sdk_version session_id",
}
FIELDS = {name: tuple(fields.split()) for name, fields in _KNOWN.items()}
# Newer fields an older server can do without: leaving them out changes nothing it computes.
_OPTIONAL = frozenset(
    {"allow_metadata_only", "display_name", "process_uuid", "project_id", "record_stability_info"}
)


def encode(request: Any) -> bytes:
    """A request as SDK 0.4.1 writes it: set fields only, None as null."""
    return dumps_slowly(_plain(request))


def encode_pass(name: str, request: Pass) -> bytes:
    """Training data as SDK 0.4.1 writes it."""
    batch = request.input
    inner: dict[str, Any] = {"data": batch.data, "loss_fn": str(batch.loss_fn)}
    if as_given(batch):
        inner["loss_fn_config"] = batch.loss_fn_config and dict(batch.loss_fn_config)
    outer: dict[str, Any] = {INPUT_FIELD[name]: inner, "model_id": request.model_id}
    if as_given(request):
        outer["seq_id"] = request.seq_id
    return encode(outer)


def _plain(value: Any) -> Any:
    """A value as the plain objects that SDK 0.4.1 would send."""
    if isinstance(value, BaseModel):
        return _model(value)
    if isinstance(value, (ModelInput, Datum, TensorData)):
        return _HOT[type(value)](value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return to_jsonable_python(value)


def _model(model: BaseModel) -> dict[str, Any]:
    kind = type(model).__name__
    known = FIELDS.get(kind) or tuple(type(model).model_fields)
    for name in model.model_fields_set.difference(known, _OPTIONAL):
        value = getattr(model, name)
        if value is not None and value != type(model).model_fields[name].default:
            raise NotSupportedError(
                f"a server of the 0.4.1 generation does not know this field (value {short(value)})",
                path=f"{kind}.{name}",
            )
    plain = {name: _plain(getattr(model, name)) for name in known if name in model.model_fields_set}
    if isinstance(model, OptimStepRequest):
        return _optim_step(model, plain)
    return plain


def _optim_step(request: OptimStepRequest, plain: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(request.optim_params, AdamParams):
        raise NotSupportedError(
            "a server of the 0.4.1 generation knows Adam only", path="OptimStepRequest.optim_params"
        )
    return {"adam_params": plain.pop("optim_params"), **plain}


def _model_input(value: ModelInput) -> dict[str, Any]:
    return {"chunks": [_chunk(chunk) for chunk in value.chunks]}


def _chunk(chunk: Any) -> dict[str, Any]:
    kind = {"type": chunk.type} if as_given(chunk) else {}
    if isinstance(chunk, EncodedTextChunk):
        return {"tokens": chunk.tokens, **kind}
    if isinstance(chunk, ImageChunk):
        data = base64.b64encode(chunk.data).decode()
        return {"data": data, "format": chunk.format, **_image_size(chunk), **kind}
    if isinstance(chunk, ImageAssetPointerChunk):
        size = _image_size(chunk)
        ordered = {"height": None, "location": chunk.location, **size}
        return {
            "format": chunk.format,
            **{k: v for k, v in ordered.items() if v is not None},
            **kind,
        }
    assert isinstance(chunk, DmelChunk)
    raise NotSupportedError("a server of the 0.4.1 generation does not take audio", path="dmel")


def _image_size(chunk: ImageChunk | ImageAssetPointerChunk) -> dict[str, int]:
    """The pixel fields of 0.4.1 when they are known, else the one field that replaced them."""
    if chunk.height is not None and chunk.width is not None:
        return {"height": chunk.height, "tokens": chunk.length, "width": chunk.width}
    return {} if chunk.expected_tokens is None else {"expected_tokens": chunk.expected_tokens}


def _datum(datum: Datum) -> dict[str, Any]:
    for name, tensor in datum.loss_fn_inputs.items():
        if name == LOGPROBS.name and tensor.is_sparse:
            raise NotSupportedError(
                "a server of the 0.4.1 generation has no sparse form, and a candidate that is left "
                "out has no logprob that JSON can write",
                path=f"loss_fn_inputs.{name}",
            )
    inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return {"loss_fn_inputs": inputs, "model_input": _model_input(datum.model_input)}


def _tensor(tensor: TensorData) -> dict[str, Any]:
    if tensor.is_sparse:  # 0.4.1 has no sparse form; the dense one means the same
        tensor = TensorData.wrap(tensor.to_numpy())
    doubles = as_given(tensor)
    data = tensor.data if doubles is None else doubles.tolist()
    shape = {} if tensor.shape is None else {"shape": tensor.shape}
    return {"data": data, "dtype": str(tensor.dtype), **shape}


_HOT: dict[type, Any] = {
    ModelInput: _model_input,
    Datum: _datum,
    TensorData: _tensor,
}
