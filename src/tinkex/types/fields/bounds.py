"""How much a message may carry: the kinds of text, number, list and map its fields are made of.

Every field of a request is declared with one of these, so the client, the server, OpenAPI and the
fuzz tests know the same bounds. They are generous: honest use stays far below them, and a hostile
body ends at them. Text is what every database stores: no NUL, no lone surrogates.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING
from tinkex.types.fields.message import FirstErrorOnly, all_texts

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_ID, MAX_NAME, MAX_TEXT = 512, 1024, 65_536
MAX_DEPTH, MAX_PARTS, MAX_CHARACTERS = 32, 20_000, 1_000_000
MAX_LISTED = 16_384
"""Characters of what a user says of a thing, which every listing of such things repeats."""
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

Count: TypeAlias = Annotated[int, Between(0, INT32, becomes=NOTHING)]
"""A number by which something is told from others: a token, a place in a session."""
Number: TypeAlias = Annotated[int, Between(0, INT64, becomes=NOTHING)]
"""A sequence number or a cursor: it fits the databases' int64."""
SeqId: TypeAlias = Annotated[int, Between(1, INT64, becomes=NOTHING)]
"""The place of a training request in its model's stream, from 1."""
Seed: TypeAlias = Annotated[int, Between(-(2**63), 2**64 - 1, becomes=NOTHING)]
TtlSeconds: TypeAlias = Annotated[int, Between(MIN_TTL_S, MAX_TTL_S, becomes=NOTHING)]


def listing(max_length: int, min_length: int = 0) -> tuple[Any, ...]:
    """The annotations of a bounded list; its first wrong element ends the check."""
    return Field(min_length=min_length, max_length=max_length), FirstErrorOnly()


Ids: TypeAlias = Annotated[list[Id], *listing(50_000)]
Names: TypeAlias = Annotated[list[Name], *listing(256)]


def listed(value: Any) -> Any:
    """Refuse more than a page of a thousand such things can hold."""
    # Objects that JSON does not know are refused where they are written, not here.
    if (size := len(json.dumps(value, ensure_ascii=False, default=str))) > MAX_LISTED:
        raise ValueError(
            f"must have at most {MAX_LISTED} characters as JSON, since every listing repeats it; "
            f"got {size}"
        )
    return value


Metadata: TypeAlias = Annotated[
    dict[Name, Text],
    Field(max_length=256),
    BeforeValidator(all_texts),
    AfterValidator(listed),
]
"""Text by name, as it is kept with a checkpoint or a session."""
Tags: TypeAlias = Annotated[Names, AfterValidator(listed)]


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


def storable(value: Any) -> Any:
    """Plain objects whose texts every database stores: a NUL or a lone surrogate becomes `?`."""
    if isinstance(value, str):
        return value.replace("\x00", "?").encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
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
PlainMetadata: TypeAlias = Annotated[Plain, AfterValidator(listed)]
"""JSON by name, as it is kept with a run or a session."""
PlainList: TypeAlias = Annotated[
    list[Any],
    AfterValidator(plain),
    WithJsonSchema({"type": "array", "maxItems": MAX_PARTS, **_JSON_SCHEMA}),
]
