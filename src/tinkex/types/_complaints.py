"""What pydantic found wrong with a value, as one line in our own words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from tinkex.errors import InvalidInputError
from tinkex.types._value import nest, short

__all__ = ["from_validation"]


def from_validation(error: ValidationError, name: str, fields: Iterable[str]) -> InvalidInputError:
    """The complaint about the first wrong field: its path, the value and what would be right."""
    found = error.errors(include_url=False)
    first = found[0]
    location = first["loc"][:1]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return nest(cause, str(location[0])) if location else cause
    path = str(location[0]) if location else ""
    if first["type"] in ("extra_forbidden", "missing") and len(first["loc"]) > 1:
        word = "is missing" if first["type"] == "missing" else "is no field of it"
        return InvalidInputError(f"{first['loc'][-1]!r} {word}", path=path)
    if first["type"] == "extra_forbidden":
        return InvalidInputError(f"{name} has no such field; it has {', '.join(fields)}", path=path)
    if first["type"] == "missing":
        return InvalidInputError(f"{name} needs it", path=path)
    if cause is not None:
        return InvalidInputError(str(cause), path=path)
    # A field of several types complains once for each of them.
    wanted = _wanted([item["msg"] for item in found if item["loc"][:1] == location])
    return InvalidInputError(f"{wanted}, got {short(_given(found, location))}", path=path)


def _given(found: Sequence[Any], location: tuple[Any, ...]) -> Any:
    """The field's whole value where a complaint shows it; else the element it is about."""
    own = [item for item in found if item["loc"][:1] == location]
    return min(own, key=lambda item: len(item["loc"]))["input"]


def _wanted(messages: Iterable[str]) -> str:
    texts = [
        text.removeprefix("Input should be ").partition(", ")[0].replace("a valid ", "a ")
        for text in dict.fromkeys(messages)
    ]
    return "must be " + " or ".join(dict.fromkeys(texts)).replace("a integer", "an integer")
