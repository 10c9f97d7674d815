"""The base of the hot types: frozen, slotted, compared by content, cheap to make.

A training step builds thousands of these, so they are plain classes over numpy rather than pydantic
models. They still work as fields of pydantic models. Nothing here knows how a value travels.
"""

from __future__ import annotations

from itertools import repeat
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from tinkex.errors import InvalidInputError

__all__ = ["Value", "comparable", "kept", "nest", "readonly", "set_field", "short"]

set_field = object.__setattr__
"""How a frozen value is filled."""

if TYPE_CHECKING:
    kept = property
else:

    def kept(make):
        """A property that is computed once and kept in the slot `_name`, empty until then."""
        slot = f"_{make.__name__}"

        def read(self):
            try:
                return getattr(self, slot)
            except AttributeError:
                pass
            set_field(self, slot, make(self))
            return getattr(self, slot)

        return property(read, doc=make.__doc__)


class Value:
    """Frozen after construction; equal when the class and the content are equal."""

    __slots__ = ()
    _FIELDS: ClassVar[tuple[str, ...]]
    """The names of the parts, in order: filling, copying and comparing go over these."""

    def _fill(self, *parts: Any) -> None:
        assert len(parts) == len(self._FIELDS), self._FIELDS
        for _ in map(set_field, repeat(self), self._FIELDS, parts):
            pass

    @classmethod
    def _make(cls, *parts: Any) -> Self:
        """Take all parts as they are, without a check or a copy."""
        made = cls.__new__(cls)
        made._fill(*parts)
        return made

    def _replace(self, **changes: Any) -> Self:
        """A copy with some parts changed."""
        parts = [changes[name] if name in changes else getattr(self, name) for name in self._FIELDS]
        return self._make(*parts)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{type(self).__name__} is frozen: cannot set {name!r}. Make a new one instead."
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name!r}.")

    def _content(self) -> tuple[Any, ...]:
        """The parts as equality and hash see them."""
        return tuple(_compared(getattr(self, name)) for name in self._FIELDS)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._content()))

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            set_field(self, name, value)

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        """Build from parsed JSON, ignoring unknown keys."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The value as plain Python objects, ready for `json.dumps`; bytes are base64."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """The value that `to_dict` wrote; unknown keys are left out.

        Raises:
            InvalidInputError: With the path of the first thing that is wrong.
        """
        return cls._validate_object(value)

    @classmethod
    def _validate(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls._from_dict(value)
        raise InvalidInputError(
            f"expected a {cls.__name__} or an object, got {type(value).__name__}"
        )

    @classmethod
    def _validate_object(cls, value: object) -> Self:
        """From parsed JSON only, with an `InvalidInputError` for anything else."""
        if not isinstance(value, dict):
            raise InvalidInputError(f"expected an object, got {type(value).__name__}")
        return cls._from_dict(value)

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        """The value in JSON schema, for OpenAPI."""
        raise NotImplementedError

    @classmethod
    def _object_schema(cls, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
        shape = {"type": "object", "properties": properties, "required": required}
        return {"title": cls.__name__, **shape}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return cls._schema()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.to_dict, when_used="json"
            ),
        )


def readonly(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same array, protected from writes."""
    array.setflags(write=False)
    return array


def comparable(array: np.ndarray[Any, Any] | None) -> bytes | None:
    """Bytes that are equal when the values are: NaN is NaN, and zero has no sign."""
    if array is None or array.dtype.kind != "f":
        return None if array is None else array.tobytes()
    plain = array + np.float32(0)
    plain[np.isnan(plain)] = np.nan
    return plain.tobytes()


def _compared(part: Any) -> Any:
    return comparable(part) if isinstance(part, np.ndarray) else part


def nest(error: InvalidInputError, prefix: str) -> InvalidInputError:
    """The same error, its path now starting at `prefix`."""
    text = str(error).removeprefix(f"{error.path}: ") if error.path else str(error)
    joint = "" if not error.path or error.path.startswith("[") else "."
    return InvalidInputError(text, path=f"{prefix}{joint}{error.path}")
