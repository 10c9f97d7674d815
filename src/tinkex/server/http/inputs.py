"""What REST routes take from paths and queries, and how they write times and pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Query

from tinkex.types import Cursor
from tinkex.types.fields.bounds import text

Text = Annotated[str, text(2048)]
"""A part of a path or a query."""
AccessScope = Annotated[Literal["owned", "accessible"], Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
# Databases count in 64 bits; a larger number would fail there, as a 500.
Offset = Annotated[int, Query(ge=0, le=2**62)]


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def cursor(offset: int, limit: int, total_count: int) -> Cursor:
    return Cursor(offset=offset, limit=limit, total_count=total_count)
