"""How large a body may be, by route and encoding, and how many bytes of bodies may be in memory.

A route that carries training data or prompts takes much, everything else a little; JSON takes less
than protobuf, because it costs many times its size once parsed. `BodyBudget` is the sum over all
requests under way: whoever would exceed it waits for others to end, and no user can take it all.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from tinkex.server.compat.refusals import is_foreign
from tinkex.server.problems import ApiError
from tinkex.wire.endpoints import ENDPOINTS, MAX_BYTES

JSON_BYTES = 64 * 1024 * 1024
_SIZES = {row.path: row.size for row in ENDPOINTS.values()}
WAIT_S = 30.0


def body_limit(path: str, content_type: str, max_body_bytes: int) -> int:
    """Most bytes a body of that route may have, before and after it is unpacked."""
    size = _SIZES.get(path)
    if size is None:  # endpoints of other APIs carry conversations
        size = "medium" if is_foreign(path) else "small"
    if size != "large":
        return min(MAX_BYTES[size], max_body_bytes)
    is_proto = content_type.startswith("application/x-protobuf")
    return max_body_bytes if is_proto else min(JSON_BYTES, max_body_bytes)


class BodyBudget:
    """Bytes of request bodies held at a time, in all and by one user."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._per_user = total_bytes // 2
        self._held = 0
        self._by_user: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        return self._held

    async def reserve(self, user_id: str, num_bytes: int, *, own_bytes: int = 0) -> None:
        """Wait until there is room for so many bytes; give them back with `release`.

        One body alone always fits, so that a limit on bodies above the budget does not hang;
        `own_bytes` of it are held already.

        Raises:
            ApiError: 429, when there was none for long.
        """
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not self._fits(user_id, num_bytes, own_bytes):
            left = deadline - asyncio.get_running_loop().time()
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), left)
            except TimeoutError:
                raise ApiError(
                    429,
                    f"The server holds {self._held} bytes of requests under way; try again in a "
                    "moment, with fewer large requests at a time.",
                    headers={"Retry-After": "1"},
                ) from None
        self._held += num_bytes
        self._by_user[user_id] += num_bytes

    def release(self, user_id: str, num_bytes: int) -> None:
        self._held -= num_bytes
        self._by_user[user_id] -= num_bytes
        if self._by_user[user_id] <= 0:
            del self._by_user[user_id]
        self._freed.set()

    def _fits(self, user_id: str, num_bytes: int, own_bytes: int) -> bool:
        mine = self._by_user[user_id]
        fits_user = mine == own_bytes or mine + num_bytes <= self._per_user
        return fits_user and (self._held == own_bytes or self._held + num_bytes <= self._total)
