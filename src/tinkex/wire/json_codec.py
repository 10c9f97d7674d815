"""JSON as SDK 0.36 writes it, and reading it.

The official SDKs write JSON with Python's own encoder, and their bytes are a promise. orjson writes
the same bytes several times as fast, but for the spelling of very small and very large floats
(`1e-05` there, `0.00001` here); `dumps` falls back to Python's encoder for those.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from tinkex.errors import WireError
from tinkex.types.data.chunks import (
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
)
from tinkex.types.fields.complaints import explain
from tinkex.types.sampling.request import SampleRequest, SamplingParams
from tinkex.types.training.optimizer import AdamParams, OptimStepRequest
from tinkex.wire.budget import check_json

ModelT = TypeVar("ModelT", bound=BaseModel)

# ------------------------------------------------------------------------------------ writing

# Numbers whose spelling may differ: those with an exponent, and those that have one in Python. The
# first pattern is quick and also finds hexadecimal ids, the second is slow and exact, but for
# texts that look like JSON, which cost time and change nothing.
_EXPONENT = re.compile(rb"e(?<=[0-9]e)[-+0-9]")
_TWO_SPELLINGS = re.compile(rb"[:,\[]-?(?:[0-9.]+e|0\.0000)")


def encode(request: BaseModel, *, keep_none: bool = False) -> bytes:
    """A request as SDK 0.36 writes it: defaults included, None left out unless `keep_none`."""
    if isinstance(request, SampleRequest):
        return _sample(request)
    # What `model_dump` calls, without its look at other ways to be called.
    fields = request.__pydantic_serializer__.to_python(
        request, mode="json", exclude_none=not keep_none
    )
    if isinstance(request, OptimStepRequest):
        is_adam = isinstance(request.optim_params, AdamParams)
        fields["adam_params" if is_adam else "optimizer_params"] = fields.pop("optim_params")
    return dumps(fields)


_SETTINGS = tuple(SamplingParams.model_fields)
_settings_of = attrgetter(*_SETTINGS)
_OPTIONS = tuple(SampleRequest.model_fields)[3:]
"""All fields but `num_samples`, `prompt` and `sampling_params`, which come first."""
_options_of = attrgetter(*_OPTIONS)


def _sample(request: SampleRequest) -> bytes:
    """A sample request: thousands are sent at once, so pydantic's serializer is not asked."""
    prompt = {"chunks": [_chunk(chunk) for chunk in request.prompt.chunks]}
    settings = _settings_of(request.sampling_params)
    try:
        written = _settings(*settings)
    except TypeError:  # a list or a dict, which cannot be a key
        written = _settings.__wrapped__(*settings)
    options = {
        name: value
        for name, value in zip(_OPTIONS, _options_of(request), strict=True)
        if value is not None
    }
    if (targets := request.target_prompt_logprobs) is not None:
        options["target_prompt_logprobs"] = targets.to_dict()
    return b'{"num_samples":%d,"prompt":%b,"sampling_params":%b,%b' % (
        request.num_samples,
        orjson.dumps(prompt, option=orjson.OPT_SERIALIZE_NUMPY),
        written,
        # Without targets these are texts, flags and whole numbers, which have one spelling.
        (orjson.dumps(options) if targets is None else dumps_slowly(options))[1:],
    )


@lru_cache(maxsize=256, typed=True)  # thousands of samples are alike; typed: 1 is not 1.0
def _settings(*values: Any) -> bytes:
    settings = {
        # In JSON, keys are text.
        name: value if type(value) is not dict else {str(key): v for key, v in value.items()}
        for name, value in zip(_SETTINGS, values, strict=True)
        if value is not None
    }
    return dumps(settings)


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
    """Plain objects without NaN and infinity as Python's encoder writes them."""
    try:
        raw = orjson.dumps(value)
    except TypeError:  # a whole number of more than 64 bits, among what nobody can write
        return dumps_slowly(value)
    if b"0.0000" not in raw and _EXPONENT.search(raw) is None:
        return raw
    return raw if _TWO_SPELLINGS.search(raw) is None else dumps_slowly(value)


def dumps_slowly(value: Any) -> bytes:
    """Plain objects as Python's encoder writes them; NaN and infinity are a ValueError."""
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
        validator = model.__pydantic_validator__
        message: ModelT = validator.validate_python(body, strict=True, extra="ignore")
        return message
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
