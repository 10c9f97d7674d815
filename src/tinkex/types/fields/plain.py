"""Values as plain dicts and back: the two methods that every public type has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime
from typing import Any, Self

from tinkex.errors import InvalidInputError


class PlainRecord:
    """The base of the small frozen dataclasses, whose fields are plain already."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The value as plain Python objects, ready for `json.dumps`."""
        parts = asdict(self)  # type: ignore[call-overload]
        return {
            name: part.isoformat() if isinstance(part, datetime) else part
            for name, part in parts.items()
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """The value that `to_dict` wrote; keys of newer versions are left out.

        Raises:
            InvalidInputError: It is no such value.
        """
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"expected an object, got {type(value).__name__}")
        kinds = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        try:
            parts = {n: _read(part, kinds[n]) for n, part in value.items() if n in kinds}
            return cls(**parts)
        except (TypeError, ValueError) as exc:
            if isinstance(exc, InvalidInputError):
                raise
            raise InvalidInputError(f"not a {cls.__name__}: {exc}") from exc


def _read(part: Any, kind: Any) -> Any:
    if kind == "datetime" and isinstance(part, str):
        return datetime.fromisoformat(part)
    return tuple(part) if isinstance(part, list) else part
