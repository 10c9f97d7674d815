"""Collect listings page by page until the caller's limit or the server's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def collect(
    fetch: Callable[[int, int], tuple[Sequence[T], Any]], *, limit: int, offset: int, page: int
) -> tuple[list[T], int | None]:
    """Call `fetch(limit, offset)` as often as needed. `limit` 0 means everything.

    Returns the rows and the server's total count, when it gave one.
    """
    rows: list[T] = []
    total: int | None = None
    while True:
        want = page if limit == 0 else min(page, limit - len(rows))
        batch, cursor = fetch(want, offset + len(rows))
        total = getattr(cursor, "total_count", total)
        rows.extend(batch)
        # A short page is the end, whatever the total says: a run may be deleted while we read.
        if len(batch) < want or (limit and len(rows) >= limit):
            return rows, total
