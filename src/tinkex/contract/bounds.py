"""Which numbers are allowed, alone and by token.

A bound stands beside the type of a field, `num_samples: Annotated[int, Between(1, 4096)] = 1`, in
a plain dataclass as in a pydantic model: pydantic asks `__get_pydantic_core_schema__`, refuses by
it and prints it into JSON schemas. Knows no names and no messages; see `settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

Limit: TypeAlias = float | str | None
"""A number, or the name of another setting whose value is the limit."""


@dataclass(frozen=True, slots=True)
class Between:
    """A range of numbers: `Between(0, below=1)` is 0 <= x < 1."""

    at_least: Limit = None
    at_most: Limit = None
    above: Limit = None
    below: Limit = None
    becomes: str = ""
    """The unit of `cost.Cost` in which so many of something are asked for; `nothing` for a number
    that only names, orders, dates or narrows."""

    def holds(self, value: float) -> bool:
        """Whether a number is inside. Limits that are names are not looked at."""
        least, most, above, below = self.at_least, self.at_most, self.above, self.below
        return (
            (least is None or isinstance(least, str) or value >= least)
            and (most is None or isinstance(most, str) or value <= most)
            and (above is None or isinstance(above, str) or value > above)
            and (below is None or isinstance(below, str) or value < below)
        )

    @property
    def names(self) -> dict[str, str]:
        """The limits that are other settings: `{"at_least": "clip_low_threshold"}`."""
        return _names(self)

    def schema(self) -> dict[str, float]:
        """The range in words of JSON schema."""
        return {_SCHEMA[word]: limit for word, limit in _limits(self) if _is_number(limit)}

    def __str__(self) -> str:
        words = [
            f"{word.replace('_', ' ')} {f'{limit:.12g}' if isinstance(limit, float) else limit}"
            for word, limit in _limits(self)
        ]
        return " and ".join(words)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        limits = {_PYDANTIC[word]: limit for word, limit in _limits(self) if _is_number(limit)}
        return {**handler(source), **limits}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(schema) | ({"x-becomes": self.becomes} if self.becomes else {})


# Asked for at every sample, and always the same.
@cache
def _limits(rule: Between) -> tuple[tuple[str, Any], ...]:
    given = ((word, getattr(rule, word)) for word in _SCHEMA)
    return tuple((word, limit) for word, limit in given if limit is not None)


@cache
def _names(rule: Between) -> dict[str, str]:
    return {word: limit for word, limit in _limits(rule) if isinstance(limit, str)}


_SCHEMA = {
    "at_least": "minimum",
    "above": "exclusiveMinimum",
    "at_most": "maximum",
    "below": "exclusiveMaximum",
}
_PYDANTIC = {"at_least": "ge", "above": "gt", "at_most": "le", "below": "lt"}


def _is_number(limit: Any) -> bool:
    return isinstance(limit, int | float)


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """A number for each of some token ids. In JSON the ids are text, as all keys are."""

    between: Between
    at_most: int
    """Most ids."""

    def read(self, value: Any) -> dict[int, float]:
        """The numbers by id.

        Raises:
            ValueError: Says what they must be.
        """
        if not isinstance(value, Mapping) or len(value) > self.at_most:
            raise ValueError(f"must be {self}")
        return {self._id(key): self._number(number) for key, number in value.items()}

    def _id(self, key: Any) -> int:
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key) if str(int(key)) == key else None
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
            raise ValueError(f"must be {self}; {str(key)[:80]!r} is no token id")
        return key

    def _number(self, number: Any) -> float:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not self.between.holds(number) or number != number:
            raise ValueError(f"must be {self}; got {str(number)[:80]}")
        return float(number)

    def __str__(self) -> str:
        return f"numbers {self.between} by token id, for at most {self.at_most} ids"

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$", "maxLength": 10},
            "additionalProperties": {"type": "number", **self.between.schema()},
            "maxProperties": self.at_most,
        }

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {"type": "function-plain", "function": {"type": "no-info", "function": self.read}}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        return self.schema()
