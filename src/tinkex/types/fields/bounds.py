"""How much a message may carry: the kinds of text, number, list and map its fields are made of.

Every field of a request is declared with one of these, so the client, the server, OpenAPI and the
fuzz tests know the same bounds. They are generous: honest use stays far below them, and a hostile
body ends at them. Text is what every database stores: no NUL, no lone surrogates.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from tinkex.types.fields.message import FirstErrorOnly, all_texts

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_ID, MAX_NAME, MAX_TEXT = 512, 1024, 65_536
MAX_DEPTH, MAX_PARTS, MAX_CHARACTERS = 32, 20_000, 1_000_000
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600
"""A checkpoint lives an hour to ten years, leap days included."""

_WITHOUT_NUL = r"^[^\x00]*$"


def text(max_length: int, min_length: int = 0) -> StringConstraints:
    return StringConstraints(max_length=max_length, min_length=min_length, pattern=_WITHOUT_NUL)


Id: TypeAlias = Annotated[str, text(MAX_ID, 1)]
"""A session, model, sampler, request, loss or event."""
Name: TypeAlias = Annotated[str, text(MAX_NAME)]
"""What people call things: projects, sessions, tags, base models, versions."""
Path: TypeAlias = Annotated[str, text(2 * MAX_NAME, 1)]
"""A `tinker://` path."""
Secret: TypeAlias = Annotated[str, text(16_384, 1)]
"""A credential in a body."""
Text: TypeAlias = Annotated[str, text(MAX_TEXT)]
"""A message, a reason, a traceback."""

Count: TypeAlias = Annotated[int, Field(ge=0, le=INT32)]
Number: TypeAlias = Annotated[int, Field(ge=0, le=INT64)]
"""A sequence number or a cursor: it fits the databases' int64."""
SeqId: TypeAlias = Annotated[int, Field(ge=1, le=INT64)]
"""The place of a training request in its model's stream, from 1."""
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
TtlSeconds: TypeAlias = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


def listing(max_length: int, min_length: int = 0) -> tuple[Any, ...]:
    """The annotations of a bounded list; its first wrong element ends the check."""
    return Field(min_length=min_length, max_length=max_length), FirstErrorOnly()


Ids: TypeAlias = Annotated[list[Id], *listing(50_000)]
Names: TypeAlias = Annotated[list[Name], *listing(256)]


Metadata: TypeAlias = Annotated[dict[Name, Text], Field(max_length=256), BeforeValidator(all_texts)]
"""Text by name, as it is kept with a checkpoint or a session."""


def plain(value: Any) -> Any:
    """Refuse JSON that is deep, has many parts or holds much text, by counting."""
    parts = characters = 0
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        parts += 1
        if isinstance(item, str):
            characters += _storable(item)
        elif isinstance(item, float) and not isfinite(item):
            raise ValueError(f"must hold finite numbers, got {item}")
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise ValueError(f"must be nested at most {MAX_DEPTH} deep")
            # Before the parts are queued: a hostile list has millions of them.
            if len(item) + parts > MAX_PARTS:
                raise ValueError(f"must have at most {MAX_PARTS} parts")
            if isinstance(item, dict):
                characters += sum(_storable(str(key)) for key in item)
                item = item.values()
            waiting.extend((inner, depth + 1) for inner in item)
        if parts > MAX_PARTS or characters > MAX_CHARACTERS:
            raise ValueError(
                f"must have at most {MAX_PARTS} parts and {MAX_CHARACTERS} characters of text"
            )
    return value


def _storable(text: str) -> int:
    if "\x00" in text:
        raise ValueError("must not contain NUL characters")
    return len(text)


_JSON_SCHEMA = {"description": f"at most {MAX_PARTS} parts, {MAX_DEPTH} deep"}
Plain: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(plain),
    WithJsonSchema({"type": "object", "maxProperties": MAX_PARTS, **_JSON_SCHEMA}),
]
"""Whatever JSON a caller wants to keep, by name, within bounds."""
PlainList: TypeAlias = Annotated[
    list[Any],
    AfterValidator(plain),
    WithJsonSchema({"type": "array", "maxItems": MAX_PARTS, **_JSON_SCHEMA}),
]
