"""`ForwardBackwardRequest` as protobuf, both ways.

Writing is done by hand: the message is a few headers around large arrays, and joining them once is
several times faster than copying each array into message objects. Map entries are sorted by key, so
equal requests have equal bytes. `encode_slowly` builds the same message with the generated classes
and is the oracle of the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.data.chunks import DmelChunk, EncodedTextChunk, ImageChunk, ModelInputChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.provenance import PromptProvenanceSpan, ProvenanceSpan
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.value import nest, short
from tinkex.types.training.forward_backward import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinkex.wire import budget
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.json_requests import Pass
from tinkex.wire.paths import at
from tinkex.wire.tensors import check_finite, decode_tensor, dtype_code, encode_tensor, int32s

_Piece = Any  # bytes, or an array whose memory is joined without a copy in between

# ------------------------------------------------------------------------------------ writing


def encode(request: Pass) -> bytes:
    """The request as protobuf bytes."""
    given = request.input
    pieces: list[_Piece] = []
    _head(pieces, request.model_id, request.seq_id)
    for index, datum in enumerate(given.data):
        try:
            _datum(pieces, datum)
        except InvalidInputError as exc:
            raise nest(exc, f"data[{index}]") from exc
    _tail(pieces, given.loss_fn, given.loss_fn_config, isinstance(request, ForwardRequest))
    return b"".join(pieces)


def _head(pieces: list[_Piece], model_id: str, seq_id: int | None) -> None:
    pieces.append(_text(0x0A, model_id))
    if seq_id:
        if not 0 < seq_id < 2**31:
            raise InvalidInputError(f"must be in 0..2147483647, got {seq_id}", path="seq_id")
        pieces.append(b"\x10" + _varint(seq_id))


def _tail(
    pieces: list[_Piece],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    forward_only: bool,
) -> None:
    pieces.append(_text(0x22, loss_fn))
    numbers, values = [], []
    for key in sorted(config or {}):
        value = (config or {})[key]
        name = _text(0x0A, key, keep_empty=True)
        if isinstance(value, str):
            inner = _text(0x12, value, keep_empty=True)
        else:
            double = _double(value, path=f"loss_fn_config.{key}")
            # A map value is always written, a oneof member too, even when it is zero.
            numbers.append(_framed(0x2A, name + b"\x11" + double))
            inner = b"\x09" + double
        values.append(_framed(0x3A, name + _framed(0x12, inner)))
    pieces += numbers
    if forward_only:
        pieces.append(b"\x30\x01")
    pieces += values


def _double(value: Any, *, path: str) -> bytes:
    if isinstance(value, (int, float, np.number)):
        return struct.pack("<d", value)
    raise InvalidInputError(f"expected a number or text, got {short(value)}", path=path)


def _datum(pieces: list[_Piece], datum: Datum) -> None:
    """Append field 3 of the request."""
    inner: list[_Piece] = [b""]  # the first slot is for the header, known last
    size = 0
    for index, chunk in enumerate(datum.model_input.chunks):
        if isinstance(chunk, EncodedTextChunk):
            frame = _text_frame(len(chunk.tokens_np) * 4)
            inner += (frame, chunk.tokens_np)
            size += len(frame) + chunk.tokens_np.nbytes
        else:
            raw = _framed(0x0A, _other_chunk(chunk, f"model_input.chunks[{index}]"))
            inner.append(raw)
            size += len(raw)
    for name in sorted(datum.loss_fn_inputs):
        size += _tensor(inner, name, datum.loss_fn_inputs[name])
    for tag, spans in ((0x1A, datum.model_input_spans), (0x22, datum.loss_fn_input_spans)):
        for span in spans or ():
            raw = _framed(tag, _span(span))
            inner.append(raw)
            size += len(raw)
    inner[0] = b"\x1a" + _varint(size)
    pieces += inner


@lru_cache(maxsize=4096)
def _text_frame(num_bytes: int) -> bytes:
    """Everything of `Datum.model_input[i]` that precedes the tokens."""
    if num_bytes == 0:
        # proto3 leaves empty bytes out, but not the empty message that is the member of a oneof.
        return b"\x0a\x02\x0a\x00"
    tokens = b"\x0a" + _varint(num_bytes)
    chunk = b"\x0a" + _varint(len(tokens) + num_bytes) + tokens
    return b"\x0a" + _varint(len(chunk) + num_bytes) + chunk


def _other_chunk(chunk: ModelInputChunk, path: str) -> bytes:
    if isinstance(chunk, ImageChunk):
        raw = _blob(0x0A, chunk.data) + _text(0x12, chunk.format)
        count = chunk.tokens if chunk.expected_tokens is None else chunk.expected_tokens
        if count is not None:
            raw += b"\x18" + _varint(count)
        return _framed(0x12, raw)
    if isinstance(chunk, DmelChunk):
        return _framed(0x1A, _blob(0x0A, chunk.dmel))
    raise InvalidInputError(
        f"{type(chunk).__name__} cannot be trained on: give the image as bytes in an ImageChunk",
        path=path,
    )


def _tensor(pieces: list[_Piece], name: str, tensor: TensorData) -> int:
    """Append one entry of `Datum.loss_fn_inputs`."""
    array = np.ascontiguousarray(tensor.array)
    if tensor.crow_array is None or tensor.col_array is None:
        code = dtype_code(array)
        head, tail = _tensor_frame(name, array.nbytes, code, tuple(tensor.shape or ()))
        pieces += (head, array, tail)
        return len(head) + array.nbytes + len(tail)
    message = pb.Tensor()
    encode_tensor(tensor, message)
    value = message.SerializeToString(deterministic=True)
    raw = _framed(0x12, _text(0x0A, name, keep_empty=True) + _framed(0x12, value))
    pieces.append(raw)
    return len(raw)


@lru_cache(maxsize=4096)
def _tensor_frame(
    name: str, num_bytes: int, code: int, shape: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """The bytes before and after those of a dense tensor in its map entry."""
    dense = b"\x0a" + _varint(num_bytes)
    tail = b"\x18" + _varint(code)
    if shape:
        tail += _framed(0x22, b"".join(_varint(size) for size in shape))
    value = b"\x12" + _varint(len(dense) + num_bytes + len(tail)) + dense
    key = _text(0x0A, name, keep_empty=True)
    entry = b"\x12" + _varint(len(key) + len(value) + num_bytes + len(tail))
    return entry + key + value, tail


def _span(span: ProvenanceSpan) -> bytes:
    raw = _text(0x0A, span.sequence_id)
    if span.offset:
        raw += b"\x10" + _varint(span.offset)
    if span.length:
        raw += b"\x18" + _varint(span.length)
    return _framed(0x0A if isinstance(span, PromptProvenanceSpan) else 0x12, raw)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _framed(tag: int, raw: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(raw)) + raw


def _blob(tag: int, raw: bytes) -> bytes:
    return _framed(tag, raw) if raw else b""


def _text(tag: int, text: str, *, keep_empty: bool = False) -> bytes:
    if not isinstance(text, str):
        raise InvalidInputError(f"expected text, got {short(text)}")
    try:
        raw = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{short(text)} is not valid unicode: {exc}") from exc
    return _framed(tag, raw) if raw or keep_empty else b""


def encode_slowly(request: Pass) -> bytes:
    """The same message as `encode`, by the generated classes."""
    given = request.input
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id or 0,
        loss_fn=given.loss_fn,
        forward_only=isinstance(request, ForwardRequest),
    )
    for datum in given.data:
        _fill_datum(message.data.add(), datum)
    for key, value in (given.loss_fn_config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
    return message.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def _fill_datum(message: Any, datum: Datum) -> None:
    for chunk in datum.model_input.chunks:
        added = message.model_input.add()
        if isinstance(chunk, EncodedTextChunk):
            added.encoded_text.tokens = chunk.tokens_np.tobytes()
        else:
            added.MergeFromString(_other_chunk(chunk, "model_input"))
    for name, tensor in datum.loss_fn_inputs.items():
        encode_tensor(tensor, message.loss_fn_inputs[name])
    for spans, target in (
        (datum.model_input_spans, message.model_input_spans),
        (datum.loss_fn_input_spans, message.loss_fn_input_spans),
    ):
        for span in spans or ():
            target.add().MergeFromString(_span(span))


# ------------------------------------------------------------------------------------ reading


def parse(content: bytes) -> Any:
    """The message as it arrived: its `model_id` and `seq_id` count, its arrays are not read yet."""
    budget.check_protobuf(content, budget.REQUEST)
    try:
        return pb.ForwardBackwardRequest.FromString(content)
    except DecodeError as exc:
        raise WireError(f"the body is not a valid ForwardBackwardRequest: {exc}") from exc


def read(message: Any) -> Pass:
    """The request in a message; `forward_only` gives a `ForwardRequest`.

    Arrays are views of the message's bytes where the types agree. Spans, which say where tokens
    came from, are not looked at.
    """
    data = []
    for index, item in enumerate(message.data):
        with at(f"data[{index}]"):
            data.append(_read_datum(item))
    given = ForwardBackwardInput(data, message.loss_fn, _read_config(message))
    given.check_bounds()
    kind = ForwardRequest if message.forward_only else ForwardBackwardRequest
    return kind(given, message.model_id, message.seq_id)


def _read_config(message: Any) -> dict[str, float | str] | None:
    """Both maps; where they differ the newer one counts."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidInputError(
                "has neither a number nor a text", path=f"loss_fn_config.{key[:80]}"
            )
        config[key] = getattr(value, kind)
    for key, value in config.items():
        if not isinstance(value, str) and not np.isfinite(value):
            raise InvalidInputError(f"must be finite, got {value}", path=f"loss_fn_config.{key}")
    return config or None


def _read_datum(message: Any) -> Datum:
    chunks = []
    for index, item in enumerate(message.model_input):
        with at(f"model_input.chunks[{index}]"):
            chunks.append(_read_chunk(item))
    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        with at(f"loss_fn_inputs.{name[:80]}"):
            inputs[name] = check_finite(decode_tensor(tensor), name)
    return Datum.wrap(ModelInput.wrap(chunks), inputs)


def _read_chunk(message: Any) -> ModelInputChunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        return EncodedTextChunk.wrap(int32s(message.encoded_text.tokens, path="tokens"))
    if kind == "image":
        image = message.image
        count = image.expected_tokens if image.HasField("expected_tokens") else None
        return ImageChunk(image.data, image.format, count)
    if kind == "dmel":
        return DmelChunk(message.dmel.dmel)
    raise WireError("is neither text, image nor audio; send encoded_text")
