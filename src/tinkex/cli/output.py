"""How results look: tables for people, JSON for programs, sizes and times in words.

Pure presentation. It never talks to a server and prints only to stdout.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

MISSING = "N/A"
_TO_COPY = re.compile(r"tinker://|[0-9a-f]{8}-[0-9a-f]{4}-")
"""Paths and ids are there to be copied: they are not folded."""
_BLANK_END = re.compile(r"(?:\x1b\[[0-9;]*m| )+$")
_NARROW = 30  # What a column of words should have before it is folded.
_PIPE_WIDTH = 1000  # Nobody wraps lines in a pipe: a cut id is worse than a long line.
_PROSE_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str | None = None
    styles: dict[str, str] = field(default_factory=dict)
    """Rich style by cell text, such as {"fail": "red"}."""
    is_prose: bool = False
    """Cells are sentences, to be read: in a pipe they are folded as on a terminal."""


def properties(title: str | None, pairs: dict[str, Any]) -> Table:
    """A table of one thing's fields."""
    return Table(title=title, columns=("Property", "Value"), rows=list(pairs.items()))


def print_table(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.columns:
        print(table.title or "")
        return
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    rows = [[cell(value) for value in row] for row in table.rows]
    wide, to_copy = 0, []
    for index, column in enumerate(table.columns):
        longest = max([len(column), *(len(row[index]) for row in rows)])
        whole = any(_TO_COPY.match(row[index]) for row in rows)
        shown.add_column(column, overflow="fold", no_wrap=whole)
        wide += longest + 3 if whole else min(longest, _NARROW) + 3
        to_copy += [index] if whole else []
    for row in rows:
        shown.add_row(*(Text(text, style=table.styles.get(text, "")) for text in row))
    console = Console(file=sys.stdout, highlight=False)
    terminal = console.width
    is_narrow = sys.stdout.isatty() and wide > terminal
    # A path is there to be copied: on a narrow terminal the line runs over, the path stays whole.
    in_pipe = _PROSE_WIDTH if table.is_prose else _PIPE_WIDTH
    console.width = max(console.width, wide) if sys.stdout.isatty() else in_pipe
    if table.title:
        # Text, not markup: in markup the `:train:` of a run's id becomes a picture of a tram.
        console.print(Text(table.title, style="table.title"), soft_wrap=True)
    if is_narrow and to_copy and len(table.columns) > 2:
        for line in stacked(table.columns, rows, to_copy):
            console.print(Text(line), soft_wrap=True)
    elif is_narrow:
        with console.capture() as drawn:
            console.print(shown)
        # Blanks behind the text would be a line of their own each, and so would half a rule.
        for line in drawn.get().rstrip().splitlines():
            is_rule = line.startswith(" \u2500")
            print(line[:terminal] if is_rule else _without_blank_end(line))
        print()
    else:
        console.print(shown)


def _without_blank_end(line: str) -> str:
    end = _BLANK_END.search(line)
    if end is None:
        return line
    return line[: end.start()] + ("\x1b[0m" if "\x1b" in end[0] else "")


def stacked(
    columns: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[int]
) -> list[str]:
    """A table for a narrow terminal: ids and paths stand below their row, whole."""
    beside = [index for index in range(len(columns)) if index not in below]
    widths = [max(len(columns[i]), *(len(row[i]) for row in rows)) for i in beside]

    def line(cells: Sequence[str]) -> str:
        padded = (cells[i].ljust(width) for i, width in zip(beside, widths, strict=True))
        return f" {'  '.join(padded)}".rstrip()

    lines = ["", line(columns), " " + "\u2500" * (sum(widths) + 2 * len(widths) - 2)]
    for row in rows:
        lines += [line(row), *(f"   {row[index]}" for index in below if row[index])]
    return [*lines, ""]


def cell(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "Yes" if value else "No"
    if isinstance(value, datetime):
        return ago(value)
    return str(value)


def print_json(data: Any) -> None:
    print(json.dumps(plain(data), indent=2, ensure_ascii=False))


def plain(value: Any, *, rfc3339: bool = False) -> Any:
    """Turn results into what `json.dumps` takes; datetimes as Python prints them, or RFC 3339."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {str(key): plain(item, rfc3339=rfc3339) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, rfc3339=rfc3339) for item in value]
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z") if rfc3339 else str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return str(value) if isinstance(value, str) else value
    return str(value)


def size(num_bytes: int | None) -> str:
    """`1536` -> `1.5 KB`, in steps of 1024."""
    if num_bytes is None:
        return MISSING
    if num_bytes < 1024:
        return f"{num_bytes} B"
    amount = float(num_bytes)
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        amount /= 1024
        if amount < 1024 or unit == "PB":
            break
    return f"{amount:.1f} {unit}"


def ago(moment: datetime | None, *, now: datetime | None = None) -> str:
    """How far a moment is from now: `5 minutes ago`, `in 2 days`; a date when it is far away."""
    if moment is None:
        return MISSING
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    words = _span(abs(seconds))
    if words is None:
        return moment.strftime("%Y-%m-%d")
    if words == "just now":
        return words
    return f"in {words}" if seconds < 0 else f"{words} ago"


def span(seconds: float) -> str:
    """A length of time in words: `90 days`, `1 hour`, `20 seconds`."""
    for length, noun in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            return _count(int(seconds // length), noun)
    return _count(int(seconds), "second")


def _span(seconds: float) -> str | None:
    if seconds < 60:
        return "just now"
    days = int(seconds // 86_400)
    if days > 30:
        return None
    if days > 7:
        return _count(days // 7, "week")
    if days:
        return _count(days, "day")
    if seconds >= 3600:
        return _count(int(seconds // 3600), "hour")
    return _count(int(seconds // 60), "minute")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
