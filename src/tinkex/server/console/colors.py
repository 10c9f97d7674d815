"""The colour of a run: the same in the list, in a legend and in a chart, in every browser."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

NUM_COLORS = 20
"""Classes `c0` and on in `static/charts.css`."""
NUM_HUES = 10
"""Colours that are so far from each other look alike."""


def color_of(run_id: str) -> int:
    digest = hashlib.blake2b(run_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % NUM_COLORS


def colors_of(run_ids: Sequence[str]) -> list[int]:
    """The colours of runs in one chart. Of two with a like hue, the later takes the next free one.

    Ten runs have ten hues; further ones share a hue, not a colour.
    """
    taken: list[int] = []
    for run_id in run_ids:
        own = color_of(run_id)
        around = [(own + by) % NUM_COLORS for by in range(NUM_COLORS)]
        hues = {color % NUM_HUES for color in taken}
        free = [color for color in around if color % NUM_HUES not in hues]
        free += [color for color in around if color not in taken]
        taken.append(free[0] if free else own)
    return taken
