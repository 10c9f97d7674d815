"""Curves of a run: a picture in its folder, and a plot of characters for the terminal.

What is measured at every step is drawn thin, with its smoothed course thick above it; what is
measured now and then, such as held-out rows, is drawn as points. Knows metrics by name only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.runs.run_log import RunLog

__all__ = ["Panel", "plot", "smoothed", "terminal_plot"]


_FEW = 8  # Points that are shown as they are.


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A pair of axes: metrics by name, with their labels."""

    metrics: Mapping[str, str]
    label: str
    """Of the vertical axis, with its unit."""


def plot(log: RunLog, panels: Sequence[Panel], title: str, name: str = "loss.png") -> Path | None:
    """Draw the panels one above the other.

    Returns None where matplotlib is not installed or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = log.read_metrics()
    shown = [panel for panel in panels if any(points_of(records, name) for name in panel.metrics)]
    if not shown:
        return None
    height = 1.2 + 2.8 * len(shown)
    figure, grid = plt.subplots(
        len(shown), 1, figsize=(7.5, height), dpi=120, sharex=True, squeeze=False
    )
    for axes, panel in zip(grid[:, 0], shown, strict=True):
        _draw(axes, panel, records)
    grid[0, 0].set_title(title)
    grid[-1, 0].set_xlabel("training steps done")
    grid[-1, 0].xaxis.get_major_locator().set_params(integer=True)  # no half steps
    target = log.folder / name
    figure.savefig(target, bbox_inches="tight")
    plt.close(figure)
    return target


def _draw(axes: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    for number, (name, label) in enumerate(panel.metrics.items()):
        points = points_of(records, name)
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        color = f"C{number}"
        if name.startswith("held_out") or len(points) < _FEW:
            line = "o" if name.startswith("held_out") else "o-"
            axes.plot(steps, values, line, color=color, label=label, linewidth=1, markersize=6)
            continue
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, smoothed(values), color=color, label=f"{label} (smoothed)", linewidth=2)
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    axes.margins(x=0.02)


def points_of(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(record["step"], float(record[name])) for record in records if name in record]


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a tenth of the run wide; nothing is shifted."""
    reach = max(1, round(len(values) / 20))
    means = []
    for index in range(len(values)):
        # As many on either side, so that a slope stays where it is at the ends, too.
        near = min(reach, index, len(values) - 1 - index)
        part = values[index - near : index + near + 1]
        means.append(sum(part) / len(part))
    return means


def terminal_plot(
    records: Sequence[Mapping[str, Any]], name: str, label: str, width: int = 64, height: int = 10
) -> str:
    """The course of one metric in characters, smoothed where there are many points.

    Empty where there are under two.
    """
    points = points_of(records, name)
    if len(points) < 2:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) >= _FEW:
        values, label = smoothed(values), f"{label} (smoothed)"
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells = [[" "] * width for _ in range(height)]
    for step, value in zip(steps, values, strict=True):
        x = round((step - steps[0]) / ((steps[-1] - steps[0]) or 1) * (width - 1))
        y = round((high - value) / span * (height - 1))
        cells[y][x] = "*"
    marks = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(len(mark) for mark in marks.values())
    lines = [f"{'':>{margin}}  {label}"]
    for row, line in enumerate(cells):
        lines.append(f"{marks.get(row, ''):>{margin}} |{''.join(line).rstrip()}")
    lines.append(f"{'':>{margin}} +{'-' * width}")
    ends = f"step {steps[0]}"
    lines.append(f"{'':>{margin}}  {ends}{f'step {steps[-1]}':>{width - len(ends)}}")
    return "\n".join(lines)
