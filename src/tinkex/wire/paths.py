"""One spelling of the path to what is wrong."""

from __future__ import annotations

from tinkex.errors import InvalidInputError
from tinkex.types.fields.value import nest


class at:
    """`with at(prefix)`: errors raised inside get `prefix` in front of their path.

    A class, because it stands around every datum and a generator costs three times as much.
    """

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if isinstance(error, InvalidInputError):
            raise nest(error, self._prefix) from error
