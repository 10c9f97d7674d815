"""A listing read page by page: with `for` where one may wait, with `async for` in a loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

from tinkex.client.futures import APIFuture
from tinkex.errors import InvalidInputError

T = TypeVar("T")


class Paged(Generic[T]):
    """Every entry of a listing, once. A page is asked for when the one before it is used up."""

    def __init__(self, page_at: Callable[[int], APIFuture[Any]], rows: str) -> None:
        """`page_at` asks for the page at an offset, whose entries are its field `rows`."""
        self._page_at = page_at
        self._rows = rows
        self._here: list[T] = []
        self._offset = 0
        self._is_last = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._is_used_up():
            self._take(self._page_at(self._offset).result())
        if not self._here:
            raise StopIteration
        return self._here.pop()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._is_used_up():
            self._take(await self._page_at(self._offset))
        if not self._here:
            raise StopAsyncIteration
        return self._here.pop()

    def _is_used_up(self) -> bool:
        return not self._here and not self._is_last

    def _take(self, page: Any) -> None:
        entries = getattr(page, self._rows)
        self._offset += len(entries)
        cursor = page.cursor
        self._is_last = not entries or cursor is None or self._offset >= cursor.total_count
        self._here = entries[::-1]  # the next one is taken from the end


def page(limit: int, offset: int) -> dict[str, int]:
    """The part of a query that asks for a page; refuses what is no number of entries."""
    for name, value in (("limit", limit), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInputError(f"must be a whole number from 0, got {value!r}", path=name)
    return {"limit": limit, "offset": offset}
