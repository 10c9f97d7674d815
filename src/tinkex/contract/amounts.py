"""Amounts as people write them on a command line: `5M`, `50G`, `0.5`."""

from __future__ import annotations

import math

_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def amount_of(text: str) -> float:
    """The number of a text, which may end in k, M, G or T; NaN where it is none."""
    scale = _SCALES.get(text[-1:].lower())
    try:
        return float(text) if scale is None else float(text[:-1]) * scale
    except ValueError:
        return math.nan
