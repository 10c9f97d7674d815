"""How a value was given, where only the bytes of SDK 0.4.1 show it.

That SDK leaves out what was never set, sends None as null, and does not round floats. A value that
was given in such a way keeps the fact in its slot `_as_given`, which is empty otherwise;
`wire.sdk_0_4` alone reads it. Equality, hash and every other dialect are blind to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError
from tinkex.types.fields.value import Value, set_field


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()
"""The default of a field whose None is sent as null and whose absence is not."""


def as_given(value: Value) -> Any:
    """The fact that was remembered; None where nothing was."""
    return getattr(value, "_as_given", None)


def remember_field(value: Value, field: Any) -> Any:
    """The field, None for `NOT_GIVEN`; the value remembers that it was given."""
    if field is NOT_GIVEN:
        return None
    set_field(value, "_as_given", True)
    return field


def remember_type(value: Value, given: str | None, expected: str) -> None:
    """Check the `type` that a caller named; the value remembers that he did."""
    if given is None:
        return
    if given != expected:
        raise InvalidInputError(f"expected {expected!r}, got {given!r}", path="type")
    set_field(value, "_as_given", True)


def remember_doubles(value: Value, doubles: NDArray[np.float64]) -> None:
    """Keep the doubles that float32 does not hold."""
    set_field(value, "_as_given", doubles)
