"""What pydantic found wrong with a value, as one line in our own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tinkex.errors import InvalidInputError
from tinkex.types.fields.value import nest, short

__all__ = ["explain", "wanted"]

# Kinds of complaint whose own words do not read well here.
_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda limits: f"at least {_shown(limits['ge'])}",
    "greater_than": lambda limits: f"above {_shown(limits['gt'])}",
    "less_than_equal": lambda limits: f"at most {_shown(limits['le'])}",
    "less_than": lambda limits: f"below {_shown(limits['lt'])}",
    "string_too_short": lambda limits: "a non-empty text",
    "string_too_long": lambda limits: f"a text of at most {limits['max_length']} characters",
    "string_pattern_mismatch": lambda limits: "a text without NUL characters",
    "string_unicode": lambda limits: "valid Unicode text",
    "literal_error": lambda limits: str(limits["expected"]),
    "enum": lambda limits: str(limits["expected"]),
    "union_tag_invalid": lambda limits: _tagged(limits["discriminator"], limits["expected_tags"]),
    "union_tag_not_found": lambda limits: f"an object with a {limits['discriminator']}",
    "model_type": lambda limits: "an object",
    "model_attributes_type": lambda limits: "an object",
    "timezone_aware": lambda limits: "a time with its zone",
    "too_short": lambda limits: f"at least {limits['min_length']} long",
    "too_long": lambda limits: f"at most {limits['max_length']} long",
}


def explain(
    error: ValidationError, given: Any, name: str = "", fields: Sequence[str] = ()
) -> InvalidInputError:
    """The complaint about the first wrong field of `given`: its path, value and what is right.

    `name` and `fields` are those of the class, for a field that it does not have.
    """
    complaints = error.errors(include_url=False)
    first = complaints[0]
    path, value, missing = _followed(first["loc"], given)
    if first["loc"][-1:] == ("[key]",):  # the name of an entry is wrong, not what stands under it
        path, value = path.rpartition(".")[0], first["input"]
        right = wanted(first)
        return InvalidInputError(
            f"a name of an entry must be {right}, got {short(value)}", path=path
        )
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return nest(cause, path) if path else cause
    if first["type"] == "extra_forbidden":
        if path == first["loc"][0]:
            return InvalidInputError(
                f"{name} has no such field; it has {', '.join(fields)}", path=path
            )
        return InvalidInputError("there is no such field", path=path)
    if first["type"] == "missing":
        whole = f"{path}.{missing}" if path else str(missing)
        return InvalidInputError(f"{name} needs it" if name else "is needed", path=whole)
    if cause is not None:
        return InvalidInputError(str(cause), path=path)
    # A field of several types complains once for each of them.
    words = [
        wanted(item) for item in complaints if _followed(item["loc"], given)[0].startswith(path)
    ]
    text = " or ".join(dict.fromkeys(words))
    return InvalidInputError(f"must be {text}, got {short(value)}", path=path)


def _followed(location: tuple[Any, ...], given: Any) -> tuple[str, Any, Any]:
    """The path to the value, the value, and a part that is missing.

    pydantic also names the members of a union on the way; what is not in the value is left out.
    """
    path, missing = "", None
    for part in location:
        inside = given.get(part, _ABSENT) if isinstance(given, Mapping) else _ABSENT
        if isinstance(given, list | tuple) and isinstance(part, int) and part < len(given):
            inside = given[part]
            path += f"[{part}]"
        elif inside is not _ABSENT:
            path += f".{str(part)[:80]}" if path else str(part)[:80]
        else:
            missing = part
            continue
        given = inside
    return path, given, missing


_ABSENT = object()


def wanted(item: Any) -> str:
    """The value that one of pydantic's complaints asks for, in words."""
    if (words := _WORDS.get(item["type"])) is not None:
        return words(item.get("ctx", {}))
    text = item["msg"].removeprefix("Input should be ").partition(", ")[0]
    return str(text.replace("a valid ", "a ").replace("a integer", "an integer"))


def _tagged(field: str, tags: str) -> str:
    return f"an object with a {field} of {' or '.join(tags.rsplit(', ', 1))}"


def _shown(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
