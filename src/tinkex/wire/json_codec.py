"""JSON as SDK 0.36 writes it, and reading it.

The official SDKs write JSON with Python's own encoder, whose spelling of floats (`1e-05`) differs
from faster ones, so requests do too: their bytes are a promise. Prompts, which hold no floats,
reading and results use orjson.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.data.chunks import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
)
from tinkex.types.fields.complaints import explain
from tinkex.types.sampling.request import SampleRequest
from tinkex.types.training.optimizer import AdamParams, OptimStepRequest
from tinkex.wire.budget import check_json

ModelT = TypeVar("ModelT", bound=BaseModel)

# ------------------------------------------------------------------------------------ writing


@contextmanager
def writing() -> Iterator[None]:
    """What no encoder can write - an object, a lone surrogate, NaN - is the caller's mistake."""
    try:
        yield
    except InvalidInputError:
        raise
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidInputError(f"the request cannot be written as JSON: {exc}") from exc


def encode(request: BaseModel, *, keep_none: bool = False) -> bytes:
    """A request as SDK 0.36 writes it: defaults included, None left out unless `keep_none`."""
    with writing():
        if isinstance(request, SampleRequest):
            return _sample(request)
        fields = request.model_dump(mode="json", exclude_none=not keep_none)
        if isinstance(request, OptimStepRequest):
            is_adam = isinstance(request.optim_params, AdamParams)
            fields["adam_params" if is_adam else "optimizer_params"] = fields.pop("optim_params")
        return dumps(fields)


def _sample(request: SampleRequest) -> bytes:
    """A sample request, its prompt written from the arrays: long ones are most of the work."""
    fields = request.model_dump(mode="json", exclude_none=True, exclude={"num_samples", "prompt"})
    prompt = {"chunks": [_chunk(chunk) for chunk in request.prompt.chunks]}
    raw = orjson.dumps(prompt, option=orjson.OPT_SERIALIZE_NUMPY)
    return b'{"num_samples":%d,"prompt":%b,%b' % (request.num_samples, raw, dumps(fields)[1:])


def _chunk(chunk: ModelInputChunk) -> dict[str, Any]:
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


def dumps(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


# ------------------------------------------------------------------------------------ reading


def loads(content: bytes, *, is_counted: bool = False) -> Any:
    """Parse JSON. NaN and Infinity are accepted, as Python peers send them.

    `is_counted`: the caller knows how much it holds, and holds it to bounds of its own.
    """
    if not is_counted:
        check_json(content)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        if b"NaN" not in content and b"Infinity" not in content:
            raise WireError(f"the body is not valid JSON: {exc}") from exc
    try:
        return json.loads(str(content, "utf-8"))  # of bytes it would guess UTF-16, too
    except (ValueError, RecursionError) as exc:
        raise WireError(f"the body is not valid JSON: {exc}") from exc


def loads_object(content: bytes, *, is_counted: bool = False) -> dict[str, Any]:
    """Parse JSON that must be an object."""
    value = loads(content, is_counted=is_counted)
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read(model: type[ModelT], body: dict[str, Any]) -> ModelT:
    """Check a parsed request: strict about types, lenient about unknown fields."""
    try:
        # What `model_validate` calls, without its look at other ways to be called.
        judge = model.__pydantic_validator__
        found: ModelT = judge.validate_python(body, strict=True, extra="ignore")
        return found
    except ValidationError as exc:
        raise explain(exc, body) from exc


def validate(model: type[ModelT], content: bytes) -> ModelT:
    """Parse and check a result: strict about types, lenient about unknown fields."""
    check_json(content)
    try:
        return model.model_validate_json(content, strict=True, extra="ignore")
    except ValidationError as exc:
        raise explain(exc, loads(content)) from exc
    except (ValueError, RecursionError) as exc:
        raise WireError(f"the body is not valid: {exc}") from exc
