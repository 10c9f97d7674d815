"""The metrics of a run as a file: a row a step, a column a metric, as CSV or as JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import orjson

from tinkex.server.runs.curves import Curve

Kind = Literal["csv", "jsonl"]
MEDIA = {"csv": "text/csv", "jsonl": "application/jsonl"}


def metric_file(curves: Mapping[str, Curve], kind: Kind) -> Iterator[bytes]:
    """The file in pieces, in the order of steps."""
    rows = _rows(curves)
    if kind == "jsonl":
        for row in rows:
            yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        return
    names = sorted(curves)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "time", *(_plain(name) for name in names)])
    for row in rows:
        writer.writerow([row["step"], row["time"], *(row.get(name, "") for name in names)])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _rows(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    rows: dict[float, dict[str, Any]] = {}
    for name, curve in sorted(curves.items()):
        for step, value, at in zip(curve.steps, curve.values, curve.moments, strict=True):
            # A metric called "step" or "time" gives way to the row's own.
            row = rows.setdefault(step, {"step": step, "time": at})
            row.setdefault(name, value)
    return [rows[step] for step in sorted(rows)]


def _plain(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" else name
