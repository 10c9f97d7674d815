"""Small pictures of curves, as SVG made here: they need no script."""

from __future__ import annotations

from collections.abc import Sequence


def spark(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """The points of a polyline that shows `values`; empty when there is nothing to show."""
    shown = [float(value) for value in values]
    if len(shown) < 2:
        return ""
    step = max(len(shown) // 120, 1)
    shown = shown[::step]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    last = len(shown) - 1
    return " ".join(
        f"{width * index / last:.1f},{2 + (height - 4) * (high - value) / span:.1f}"
        for index, value in enumerate(shown)
    )
