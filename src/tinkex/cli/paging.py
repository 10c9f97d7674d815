"""Collect listings page by page until the caller's limit or the server's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["collect", "counted"]


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
