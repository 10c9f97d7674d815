"""What REST bodies, paths and queries are made of, and how times are written.

Text that no database stores (NUL, lone surrogates) is refused here once, for all routes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict


def _storable(text: str) -> str:
    if "\x00" in text:
        raise ValueError("must not contain NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError("must be valid Unicode text") from exc
    return text


Text = Annotated[str, AfterValidator(_storable)]
AccessScope = Annotated[Literal["owned", "accessible"], Query()]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**62)]


class Body(BaseModel):
    """A request body: fields of newer clients are ignored, ours are checked."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


def rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def cursor(offset: int, limit: int, total_count: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total_count}
