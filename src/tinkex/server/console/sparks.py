"""Small pictures of curves, as SVG made here: they need no script."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 120, 28


def spark(values: Sequence[float]) -> str:
    """The points of a polyline that shows `values`; empty when there is nothing to show."""
    shown = [float(value) for value in values]
    if len(shown) < 2:
        return ""
    step = max(len(shown) // WIDTH, 1)
    shown = shown[::step]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    last = len(shown) - 1
    return " ".join(
        f"{WIDTH * index / last:.1f},{2 + (HEIGHT - 4) * (high - value) / span:.1f}"
        for index, value in enumerate(shown)
    )
