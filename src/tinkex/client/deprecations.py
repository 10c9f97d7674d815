"""Warnings at the line of the program, not of the SDK, whatever stands between the two.

`warn_once` tells that something still works, and what took its place since SDK 0.38: once a
process, because samples are asked for by the thousand. Recipes and commands of ours are told
nothing: whoever runs them cannot change their lines.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_told: set[str] = set()
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# A coroutine is stepped by asyncio, which stands between it and whoever made it.
_BETWEEN = tuple(str(Path(file).parent) + os.sep for file in (__file__, asyncio.__file__))


def warn_once(what: str, instead: str) -> None:
    """Warn that `what` is deprecated, unless this process was told."""
    if what in _told:
        return
    caller, level = _caller(sys._getframe())
    if caller is None or caller.f_code.co_filename.startswith(_PACKAGE):
        return
    _told.add(what)
    warnings.warn(
        f"{what} is deprecated since SDK 0.38 and goes on working: {instead}.",
        DeprecationWarning,
        stacklevel=level,
    )


def warn(text: str) -> None:
    """Warn that an argument or a method has no effect, or will have none."""
    warnings.warn(text, FutureWarning, stacklevel=_caller(sys._getframe())[1])


def _caller(frame: FrameType) -> tuple[FrameType | None, int]:
    """The first frame above `frame` that is neither the client's nor asyncio's, and how far."""
    level, caller = 1, frame.f_back
    while caller is not None:
        level += 1
        if not caller.f_code.co_filename.startswith(_BETWEEN):
            return caller, level
        caller = caller.f_back
    return None, level
