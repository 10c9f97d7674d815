"""Per-module settings of a PEFT folder: which key of `alpha_pattern` means which module.

PEFT runs each key as a regular expression over the end of a module's name. A folder comes from a
stranger and an expression can run for years, so none is run here: a key is a module name, or an end
of one, in which `.` stands for itself (or is written `\\.`), `.*` for anything, and `|` separates
alternatives. Other expressions are refused by name. Matching takes time in proportion to the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.errors import InvalidInputError, NotSupportedError

MAX_KEYS = 10_000
MAX_WILDCARDS = 64
MAX_GAPS = 8
MAX_CHARACTERS = 512
_SPECIAL = frozenset("*+?{}[]()^$")


class ModulePatterns:
    """The keys of one map, read once; the first key that matches wins, as in PEFT."""

    def __init__(self, patterns: Mapping[str, Any] | None, *, field: str) -> None:
        self._names: dict[str, tuple[int, Any]] = {}
        self._wildcards: list[tuple[int, list[str], Any]] = []
        if patterns is not None and not isinstance(patterns, Mapping):
            raise InvalidInputError(f"{field} must map module names to numbers", path=field)
        if len(patterns or {}) > MAX_KEYS:
            raise InvalidInputError(f"{field} has more than {MAX_KEYS} keys", path=field)
        for order, (key, value) in enumerate((patterns or {}).items()):
            for part in _alternatives(key, field):
                self._add(order, part, value, field)

    def _add(self, order: int, part: list[str], value: Any, field: str) -> None:
        if len(part) == 1:
            self._names.setdefault(part[0], (order, value))
            return
        self._wildcards.append((order, part, value))
        if len(self._wildcards) > MAX_WILDCARDS:
            raise NotSupportedError(
                f"{field} has more than {MAX_WILDCARDS} keys with '.*'; name the modules",
                path=field,
            )

    def get(self, module: str, default: Any) -> Any:
        ends = list(_ends(module))
        found = [self._names[end] for end in ends if end in self._names]
        found += [(order, value) for order, part, value in self._wildcards if _matches(part, ends)]
        return min(found, key=lambda pair: pair[0])[1] if found else default


def _alternatives(key: str, field: str) -> list[list[str]]:
    """Each alternative as the texts between its `.*`."""
    if len(key) > MAX_CHARACTERS:
        raise NotSupportedError(f"{field} has a key of {len(key)} characters", path=field)
    found = []
    for text in key.removeprefix("^").removesuffix("$").split("|"):
        parts = [part.replace("\\.", ".") for part in text.split(".*")]
        if (
            not text
            or len(parts) > MAX_GAPS + 1
            or any(_SPECIAL & set(part) or "\\" in part for part in parts)
        ):
            raise NotSupportedError(
                f"{field} {key[:80]!r} is too elaborate; name modules, with '.*' and '|' at most",
                path=field,
            )
        found.append(parts)
    return found


def _ends(module: str) -> list[str]:
    """The name, and what follows each of its dots."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _matches(parts: list[str], ends: list[str]) -> bool:
    return any(_covers(parts, text) for text in ends)


def _covers(parts: list[str], text: str) -> bool:
    """Whether the texts lie in `text` in this order, from its start to its end."""
    first, *middle, last = parts
    if not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return at <= end
