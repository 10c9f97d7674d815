"""Names that somebody misspelt: of arguments, and of variables of the environment."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping

logger = logging.getLogger("tinkex.config")

_OURS_ALONE = ("CLIENT_", "LOCAL_")
"""Prefixes of variables that nobody but the client reads."""
_SAID: set[str] = set()


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The known name that `name` was probably meant to be."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def warn_of_variables(env: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Say once of each misspelt `TINKEX_...` or `TINKER_...` that it has no effect.

    `known` has what stands behind the prefix, and the name that is right. Servers and other
    programs have variables of the same prefixes, so one that is like none of ours is let alone.
    """
    for variable in env:
        prefix, _, name = variable.partition("_")
        if prefix not in ("TINKEX", "TINKER") or name in known or variable in _SAID:
            continue
        near = nearest(name, known, cutoff=0.8)
        if near is None and not (prefix == "TINKEX" and name.startswith(_OURS_ALONE)):
            continue
        _SAID.add(variable)
        meant = f" Did you mean {prefix}_{known[near]}?" if near else ""
        logger.warning("%s has no effect: there is no such variable.%s", variable, meant)
