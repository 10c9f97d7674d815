"""A page of a search whose last conditions the database does not check.

Metadata is JSON, which the databases of a server read in different ways: rows are looked at here,
a bounded number of them for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tinkex import types
from tinkex.server.guard.auth import user_id_of_urn
from tinkex.server.rest.views import texts
from tinkex.store import User

Row = TypeVar("Row")
Position = tuple[float, str]
"""When a row was made and what it is called: the order of a search, newest first."""
SCAN_PAGE = 200
MAX_SCANNED = 5000
"""Most rows one search looks at; a cursor then lets the caller go on."""


def matching_page(
    rows_before: Callable[[Position | None, int], list[Row]],
    position: Callable[[Row], Position],
    matches: Callable[[Row], bool],
    *,
    before: Position | None,
    limit: int,
) -> tuple[list[Row], Position | None]:
    """Up to `limit` rows that match, and the position after which the next page starts."""
    matching: list[Row] = []
    for _ in range(MAX_SCANNED // SCAN_PAGE):
        page = rows_before(before, SCAN_PAGE)
        for row in page:
            if matches(row):
                matching.append(row)
            if len(matching) == limit:
                return matching, position(row)
        if len(page) < SCAN_PAGE:
            return matching, None
        before = position(page[-1])
    return matching, before


def has_metadata(stored: Mapping[str, Any] | None, asked: Mapping[str, str]) -> bool:
    """Whether every asked pair of metadata is among the stored ones."""
    known = texts(stored) or {}
    return all(known.get(key) == value for key, value in asked.items())


def includes(owner: types.SearchOwner, user: User) -> bool:
    """Whether a search looks at what the caller owns; nobody sees more than that here."""
    if isinstance(owner, types.UserSearchOwner):
        return user.user_id in map(user_id_of_urn, owner.owner_urns)
    return True
