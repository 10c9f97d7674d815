"""How REST routes read their bodies, paths and queries, and how times are written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request

from tinkex.server.problems import ApiError
from tinkex.types import Cursor
from tinkex.types._bounds import text
from tinkex.wire import requests
from tinkex.wire.endpoints import ENDPOINTS

Text = Annotated[str, text(2048)]
"""A part of a path or a query."""
AccessScope = Annotated[Literal["owned", "accessible"], Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**62)]


async def read(request: Request, name: str) -> Any:
    """The request in the body, judged by the declaration of its endpoint."""
    raw = await request.body()
    if len(raw) > (limit := ENDPOINTS[name].max_bytes):
        raise ApiError(413, f"The body exceeds the {limit} bytes that this route takes.")
    return requests.decode(name, raw, request.headers.get("content-type"))


def moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def cursor(offset: int, limit: int, total_count: int) -> Cursor:
    return Cursor(offset=offset, limit=limit, total_count=total_count)
