"""One spelling of the path to what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.errors import InvalidInputError
from tinkex.types._value import nest


@contextmanager
def at(prefix: str) -> Iterator[None]:
    """Errors raised inside get `prefix` in front of their path."""
    try:
        yield
    except InvalidInputError as exc:
        raise nest(exc, prefix) from exc
