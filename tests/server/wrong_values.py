"""Make each value of a JSON body wrong in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

MISSING = object()
WRONG: tuple[Any, ...] = (MISSING, None, "", "\x00", -1, 2**70, True, 1.5, [], {}, [{}], "x" * 300)


def wrong_versions(
    body: dict[str, Any], thorough: bool = True
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The body with one value replaced or left out, for every value at every depth."""
    for index, path in enumerate(_paths(body)):
        for wrong in WRONG if thorough else WRONG[index % 3 :: 3]:
            changed = copy.deepcopy(body)
            inside: Any = changed
            for part in path[:-1]:
                inside = inside[part]
            if wrong is MISSING:
                del inside[path[-1]]
            else:
                inside[path[-1]] = wrong
            yield f"{'.'.join(map(str, path))} = {str(wrong)[:12]!r}", changed


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in items:
        yield (*prefix, key)
        if isinstance(inner, dict | list):
            yield from _paths(inner, (*prefix, key))
