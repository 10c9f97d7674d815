"""Commands from forms: what a person filled in, as arguments of `tinkex`, and as a line to type.

A form is what `tinkex train forms` says of a command. Nothing here is given to a shell: arguments
stay a list, and a value that begins with a dash is no option.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.server.process.problems import ApiError

MAX_VALUE = 4000


def arguments(form: Mapping[str, Any], values: Mapping[str, str], *more: str) -> list[str]:
    """The arguments of a filled-in form, and `more` options; empty fields are left out.

    Raises:
        ApiError: 400, a required field is empty, or a value cannot be an argument.
    """
    options: list[str] = []
    positional: list[str] = []
    for field in form["fields"]:
        text = values.get(field["name"], "").strip()
        _check(field, text)
        if not text:
            continue
        parts = text.splitlines() if field["is_multiple"] else [text]
        if field["flag"] is None:
            positional += parts
        elif field["kind"] == "flag":
            options.append(field["flag"])
        else:
            options += [f"{field['flag']}={part.strip()}" for part in parts if part.strip()]
    options += more
    if any(value.startswith("-") for value in positional):
        return [*options, "--", *positional]
    return [*positional, *options]


def _check(field: Mapping[str, Any], value: str) -> None:
    name = field["flag"] or str(field["name"]).upper()
    if field["is_required"] and not value:
        raise ApiError(400, f"{name} is needed.")
    if len(value) > MAX_VALUE or "\0" in value:
        raise ApiError(400, f"{name} must be a text of at most {MAX_VALUE} characters.")
    if value and field["choices"] and not set(value.splitlines()) <= set(field["choices"]):
        raise ApiError(400, f"{name} is one of {', '.join(field['choices'])}, got {value[:60]!r}.")


def line(argv: Sequence[str]) -> str:
    """The command as one types it into a terminal."""
    return shlex.join(["tinkex", *argv])
