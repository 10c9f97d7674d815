"""Tools as two of the dialects declare them: plain objects, checked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.chat.messages import Tool
from tinkex.errors import InvalidInputError

__all__ = ["declared_tool", "function_name"]

MAX_NAME = 256


def function_name(value: Any, path: str) -> str:
    """A name as it was given; one that is none, or too long, is refused."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise InvalidInputError(f"must be a text of 1 to {MAX_NAME} characters", path=path)
    return value


def declared_tool(given: Mapping[str, Any], path: str, *, schema: str) -> Tool:
    """A tool of the caller's own; `schema` is the field that has its JSON schema.

    Raises:
        InvalidInputError: A field is not what it must be; `path` names it.
    """
    description, parameters = given.get("description"), given.get(schema)
    if description is not None and not isinstance(description, str):
        raise InvalidInputError("must be a text", path=f"{path}.description")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidInputError("must be an object: a JSON schema", path=f"{path}.{schema}")
    return Tool(
        name=function_name(given.get("name"), f"{path}.name"),
        description=description or "",
        parameters=parameters or {},
    )
