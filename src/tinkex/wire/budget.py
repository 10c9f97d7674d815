"""Refuse bodies that are small on the wire and huge in memory, before anything is parsed.

An empty JSON list costs two bytes to send and sixty to hold, an empty protobuf message even more.
What is counted here is the number of parts, never their meaning; honest bodies, which are a few
parts around long arrays, stay far below the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkex.contract.cost import JSON, PROTOBUF, Cost
from tinkex.errors import WireError
from tinkex.wire import tinker_public_pb2 as pb

# Below this size no amplification is worth counting.
_SMALL_BYTES = 128 * 1024

# A protobuf schema: field number -> schema of the message in it. PACKED marks a list of small
# numbers, of which every byte may become eight.
Schema = dict[int, Any]
PACKED: Schema = {0: None}


def _schema_of(message: Any) -> Schema:
    """Text and bytes are left out: they cost what they weigh. No message of ours holds itself."""
    schema: Schema = {}
    for field in message.fields:
        if field.message_type is not None:
            schema[field.number] = _schema_of(field.message_type)
        elif field.default_value == []:  # repeated, however old the library is that says so
            schema[field.number] = PACKED
    return schema


REQUEST = _schema_of(pb.ForwardBackwardRequest.DESCRIPTOR)
SAMPLE = _schema_of(pb.SampleResponse.DESCRIPTOR)
PASS = _schema_of(pb.ForwardBackwardOutput.DESCRIPTOR)


def check_json(content: bytes) -> None:
    """Refuse JSON that would become too many Python objects."""
    if len(content) <= _SMALL_BYTES:
        return
    _require(
        JSON,
        Cost(
            sent_bytes=len(content),
            containers=content.count(b"[") + content.count(b"{"),
            texts=content.count(b'"') // 2,
            values=content.count(b","),
        ),
    )


@dataclass(frozen=True, slots=True)
class JsonWeights:
    """Bytes of memory that each part of a JSON text takes, beside its characters."""

    container: int
    value: int
    text: int = 0


PARSED = JsonWeights(container=200, value=40, text=60)
"""Plain objects of Python."""
CHECKED = JsonWeights(container=800, value=120)
"""Objects of Python, and the pydantic models that were made of them."""


def quick_json_cost(content: bytes) -> Cost:
    """At most what the text holds: every bracket, colon and comma counts, those in texts too."""
    containers = content.count(b"{") + content.count(b"[")
    return _cost(content, containers, content.count(b":"), content.count(b","), containers)


def _cost(content: bytes, containers: int, keys: int, commas: int, depth: int) -> Cost:
    return Cost(
        sent_bytes=len(content),
        containers=containers,
        keys=keys,
        values=commas + containers,
        depth=depth,
    )


def parsed_json_bytes(content: bytes, cost: Cost, weights: JsonWeights = PARSED) -> int:
    """About what JSON becomes: its objects, and its texts, as one letter makes them wide."""
    is_narrow = content.isascii() and b"\\u" not in content
    characters = len(content) * (2 if is_narrow else 5)
    texts = weights.text * content.count(b'"') // 2 if weights.text else 0
    objects = weights.container * cost.containers + weights.value * cost.values
    return characters + objects + texts


_PIECE_BYTES = 1024 * 1024


def json_cost(content: bytes) -> Cost:
    """Count what a parser would build, exactly as far as the content is valid JSON.

    Texts inside are not looked at.

    Numpy does it without the interpreter's lock, a megabyte at a time.
    """
    containers = keys = commas = depth = deepest = at = 0
    is_inside = np.uint8(0)  # a text that the last piece began
    while at < len(content):
        piece = content[at : at + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape is not cut in two
            piece = content[at : at + _PIECE_BYTES + 1]
        at += len(piece)
        codes = np.frombuffer(piece.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        if not codes.size:
            continue
        inside = np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) ^ is_inside
        is_inside = inside[-1]
        outside = inside == 0
        folded = codes | 0x20  # "[" becomes "{", and "]" becomes "}"
        opened, closed = (folded == ord("{")) & outside, (folded == ord("}")) & outside
        containers += int(np.count_nonzero(opened))
        keys += int(np.count_nonzero((codes == ord(":")) & outside))
        commas += int(np.count_nonzero((codes == ord(",")) & outside))
        levels = np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int32) + depth
        deepest, depth = max(deepest, int(levels.max())), int(levels[-1])
    return _cost(content, containers, keys, commas, deepest)


def check_protobuf(content: bytes, schema: Schema) -> None:
    """Refuse protobuf that would become too many messages."""
    if len(content) > _SMALL_BYTES:
        _walk(content, 0, len(content), schema, PROTOBUF.values)


def _walk(raw: bytes, at: int, end: int, schema: Schema, budget: int) -> int:
    """Count the fields of a message, and of the messages in it; returns what is left."""
    while at < end:
        budget = _spend(budget, 1)
        tag, at = _varint(raw, at, end)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(raw, at, end)
            inner = schema.get(tag >> 3)
            if inner is PACKED:
                budget = _spend(budget, size)
            elif inner is not None:
                budget = _walk(raw, at, min(at + size, end), inner, budget)
            at += size
        elif kind == 0:
            _, at = _varint(raw, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return budget  # groups do not occur; the parser will say what is wrong
    return budget


def _spend(budget: int, parts: int) -> int:
    if parts > budget:
        _require(PROTOBUF, Cost(values=PROTOBUF.values + parts - budget))
    return budget - parts


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return value, end


def _require(limit: Cost, asked: Cost) -> None:
    if exceeded := limit.exceeded(asked):
        raise WireError(f"the body has at least {exceeded}")
