"""Listings: which columns a kind of thing has, and how the server's pages of it are collected.

A `Listing` is declared once per kind. Its columns make the table of many items and the properties
of one; as JSON the items go out whole, below the listing's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.cli.output import Table

__all__ = ["Listing", "collect", "counted"]


@dataclass(frozen=True, slots=True)
class Listing:
    """The columns of one kind of thing."""

    key: str
    """Where the items stand in JSON."""
    noun: str
    """Title of the table, before the number of rows; empty for none."""
    columns: Mapping[str, str | Callable[[Any], Any]]
    """Title of a column -> the field of an item that it shows, or a function of the item."""
    styles: dict[str, str] = field(default_factory=dict)
    """Rich style by cell text, such as {"fail": "red"}."""

    def cells(self, item: Any) -> dict[str, Any]:
        """The text that each column shows of an item, by title."""
        return {title: _read(item, column) for title, column in self.columns.items()}

    def table(
        self, items: Sequence[Any], total: int | None = None, title: str | None = None
    ) -> Table:
        """The items as rows. `title` stands instead of the noun and the number of rows."""
        counts = counted(self.noun, items, total) if self.noun else None
        return Table(
            title=title or counts,
            columns=tuple(self.columns),
            rows=[tuple(self.cells(item).values()) for item in items],
            styles=self.styles,
        )


def _read(item: Any, column: str | Callable[[Any], Any]) -> Any:
    if callable(column):
        return column(item)
    return item[column] if isinstance(item, dict) else getattr(item, column)


def collect(
    fetch: Callable[..., Any], field: str, *, limit: int, offset: int, page: int
) -> tuple[list[Any], int | None]:
    """Call `fetch(limit=, offset=)` as often as needed. `limit` 0 means everything.

    Returns the rows, which stand in the answers' `field`, and the server's total count, when it
    gave one.
    """
    rows: list[Any] = []
    total: int | None = None
    while True:
        want = page if limit == 0 else min(page, limit - len(rows))
        answer = fetch(limit=want, offset=offset + len(rows)).result()
        batch = getattr(answer, field)
        total = getattr(getattr(answer, "cursor", None), "total_count", total)
        rows.extend(batch)
        # A short page is the end, whatever the total says: a run may be deleted while we read.
        if len(batch) < want or (limit and len(rows) >= limit):
            return rows, total


def counted(noun: str, rows: Sequence[Any], total: int | None) -> str:
    """`Training runs (20 of 35)`: the title of a listing."""
    is_part = total is not None and total != len(rows)
    return f"{noun} ({len(rows)} of {total})" if is_part else f"{noun} ({len(rows)})"
