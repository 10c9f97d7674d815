"""JSON in both dialects.

The official SDKs write JSON with Python's own encoder, whose spelling of floats (`1e-05`) differs
from faster ones, so requests do too: their bytes are a promise. Prompts, which hold no floats,
reading and results use orjson.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from tinkex.errors import InvalidInputError, NotSupportedError, WireError
from tinkex.types._value import short
from tinkex.types.data.chunks import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
)
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.sampling.request import SampleRequest
from tinkex.types.training.optimizer import AdamParams, OptimStepRequest
from tinkex.wire.budget import check_json
from tinkex.wire.paths import from_validation, wire_error

ModelT = TypeVar("ModelT", bound=BaseModel)

# Fields SDK 0.4.1 knows, in its order, for the requests that have changed since.
_FIELDS_V04: dict[str, tuple[str, ...]] = {
    "AdamParams": ("learning_rate", "beta1", "beta2", "eps"),
    "CreateModelRequest": (
        "session_id",
        "model_seq_id",
        "base_model",
        "user_metadata",
        "lora_config",
        "type",
    ),
    "CreateSessionRequest": ("tags", "user_metadata", "sdk_version", "type"),
    "FutureRetrieveRequest": ("request_id",),
    "LoadWeightsRequest": ("model_id", "path", "seq_id", "type"),
    "OptimStepRequest": ("optim_params", "model_id", "seq_id", "type"),
    "SampleRequest": (
        "num_samples",
        "prompt",
        "sampling_params",
        "base_model",
        "model_path",
        "sampling_session_id",
        "seq_id",
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "type",
    ),
    "SaveWeightsForSamplerRequest": (
        "model_id",
        "path",
        "sampling_session_seq_id",
        "seq_id",
        "type",
    ),
    "SaveWeightsRequest": ("model_id", "path", "seq_id", "type"),
    "TelemetrySendRequest": ("events", "platform", "sdk_version", "session_id"),
}
# Newer fields an older server can do without: leaving them out changes nothing it computes.
_OPTIONAL_V04 = frozenset({"allow_metadata_only", "display_name", "process_uuid", "project_id"})


# ------------------------------------------------------------------------------------ writing


@contextmanager
def _writing() -> Iterator[None]:
    """What no encoder can write - an object, a lone surrogate, NaN - is the caller's mistake."""
    try:
        yield
    except InvalidInputError:
        raise
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidInputError(f"the request cannot be written as JSON: {exc}") from exc


def dumps_v04(request: Any) -> bytes:
    """A request as SDK 0.4.1 writes it: set fields only, None as null."""
    with _writing():
        return _dumps(plain_v04(request))


def dumps_v36(request: BaseModel, *, keep_none: bool = False) -> bytes:
    """A request as SDK 0.36 writes it: defaults included, None left out unless `keep_none`."""
    with _writing():
        if isinstance(request, SampleRequest):
            return _sample_v36(request)
        fields = request.model_dump(mode="json", exclude_none=not keep_none)
        if isinstance(request, OptimStepRequest):
            is_adam = isinstance(request.optim_params, AdamParams)
            fields["adam_params" if is_adam else "optimizer_params"] = fields.pop("optim_params")
        return _dumps(fields)


def _sample_v36(request: SampleRequest) -> bytes:
    """A sample request, its prompt written from the arrays: long ones are most of the work."""
    fields = request.model_dump(mode="json", exclude_none=True, exclude={"num_samples", "prompt"})
    prompt = {"chunks": [_chunk_v36(chunk) for chunk in request.prompt.chunks]}
    raw = orjson.dumps(prompt, option=orjson.OPT_SERIALIZE_NUMPY)
    return b'{"num_samples":%d,"prompt":%b,%b' % (request.num_samples, raw, _dumps(fields)[1:])


def _chunk_v36(chunk: ModelInputChunk) -> dict[str, Any]:
    if isinstance(chunk, EncodedTextChunk):
        return {"tokens": chunk.tokens_np, "type": chunk.type}
    fields = chunk.to_dict()
    if isinstance(chunk, (ImageChunk, ImageAssetPointerChunk)):
        # The pixel fields of 0.4.1 are gone; their token count lives on under another name.
        for name in ("height", "width", "tokens", "expected_tokens", "type"):
            fields.pop(name, None)
        count = chunk.tokens if chunk.expected_tokens is None else chunk.expected_tokens
        fields |= (
            {"type": chunk.type}
            if count is None
            else {"expected_tokens": count, "type": chunk.type}
        )
    return fields


def _dumps(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def plain_v04(value: Any) -> Any:
    """A value as the plain objects that SDK 0.4.1 would send."""
    if isinstance(value, BaseModel):
        return _model_v04(value)
    if isinstance(value, (ModelInput, Datum, TensorData)):
        return _HOT_V04[type(value)](value)
    if isinstance(value, dict):
        return {key: plain_v04(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_v04(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return to_jsonable_python(value)


def _model_v04(model: BaseModel) -> dict[str, Any]:
    kind = type(model).__name__
    known = _FIELDS_V04.get(kind) or tuple(type(model).model_fields)
    for name in model.model_fields_set.difference(known, _OPTIONAL_V04):
        value = getattr(model, name)
        if value is not None and value != type(model).model_fields[name].default:
            raise NotSupportedError(
                f"a server of the 0.4.1 generation does not know this field (value {short(value)})",
                path=f"{kind}.{name}",
            )
    plain = {
        name: plain_v04(getattr(model, name)) for name in known if name in model.model_fields_set
    }
    if isinstance(model, OptimStepRequest):
        return _optim_step_v04(model, plain)
    return plain


def _optim_step_v04(request: OptimStepRequest, plain: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(request.optim_params, AdamParams):
        raise NotSupportedError(
            "a server of the 0.4.1 generation knows Adam only", path="OptimStepRequest.optim_params"
        )
    return {"adam_params": plain.pop("optim_params"), **plain}


def _model_input_v04(value: ModelInput) -> dict[str, Any]:
    return {"chunks": [_chunk_v04(chunk) for chunk in value.chunks]}


def _chunk_v04(chunk: Any) -> dict[str, Any]:
    kind = {"type": chunk.type} if chunk._type_given else {}
    if isinstance(chunk, EncodedTextChunk):
        return {"tokens": chunk.tokens, **kind}
    if isinstance(chunk, ImageChunk):
        data = base64.b64encode(chunk.data).decode()
        return {"data": data, "format": chunk.format, **_image_size_v04(chunk), **kind}
    if isinstance(chunk, ImageAssetPointerChunk):
        size = _image_size_v04(chunk)
        ordered = {"height": None, "location": chunk.location, **size}
        return {
            "format": chunk.format,
            **{k: v for k, v in ordered.items() if v is not None},
            **kind,
        }
    assert isinstance(chunk, DmelChunk)
    raise NotSupportedError("a server of the 0.4.1 generation does not take audio", path="dmel")


def _image_size_v04(chunk: ImageChunk | ImageAssetPointerChunk) -> dict[str, int]:
    """The pixel fields of 0.4.1 when they are known, else the one field that replaced them."""
    if chunk.height is not None and chunk.width is not None:
        return {"height": chunk.height, "tokens": chunk.length, "width": chunk.width}
    return {} if chunk.expected_tokens is None else {"expected_tokens": chunk.expected_tokens}


def _datum_v04(datum: Datum) -> dict[str, Any]:
    inputs = {name: _tensor_v04(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return {"loss_fn_inputs": inputs, "model_input": _model_input_v04(datum.model_input)}


def _tensor_v04(tensor: TensorData) -> dict[str, Any]:
    if tensor.is_sparse:  # 0.4.1 has no sparse form; the dense one means the same
        tensor = TensorData.wrap(tensor.to_numpy())
    source = tensor._source
    if source is None:
        data = tensor.data
    else:
        data = [
            float(value) for value in (source.tolist() if hasattr(source, "tolist") else source)
        ]
    shape = {} if tensor.shape is None else {"shape": tensor.shape}
    return {"data": data, "dtype": str(tensor.dtype), **shape}


_HOT_V04: dict[type, Any] = {
    ModelInput: _model_input_v04,
    Datum: _datum_v04,
    TensorData: _tensor_v04,
}


# ------------------------------------------------------------------------------------ reading


def loads(content: bytes) -> Any:
    """Parse JSON. NaN and Infinity are accepted, as Python peers send them."""
    check_json(content)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        if b"NaN" not in content and b"Infinity" not in content:
            raise WireError(f"the body is not valid JSON: {exc}") from exc
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"the body is not valid JSON: {exc}") from exc


def loads_object(content: bytes) -> dict[str, Any]:
    """Parse JSON that must be an object."""
    value = loads(content)
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {type(value).__name__}")
    return value


def validate(model: type[ModelT], content: bytes) -> ModelT:
    """Parse and check one model: strict about types, lenient about unknown fields."""
    check_json(content)
    try:
        return model.model_validate_json(content, strict=True, extra="ignore")
    except ValidationError as exc:
        raise from_validation(exc) from exc
    except InvalidInputError as exc:
        raise wire_error(exc) from exc
    except (ValueError, RecursionError) as exc:
        raise WireError(f"the body is not valid: {exc}") from exc
