"""Whether a user may store more: the one way in for every byte that outlives its request.

Whoever is about to keep something for a user, in a row or in a folder, calls `admit` with the name
under which the store will commit it (a request id, the name of a folder) and its size, and
`release` when nothing came of it. The commit of that name turns the reservation into stored bytes,
so a thousand requests at once have no more room than one after another. How large a folder is may
be known only when it is written: `admit` then comes before the row that lists it, and the folder
goes when it is refused.

To keep something of a new kind, declare it in `store.stored_bytes.KINDS`, have the writes of its
rows tell `StoredBytes.add`, and admit it here. What is judged is what `tinkex disk` and the
administrators' pages show. A refusal is final (400, `quota`): more room comes from a deletion, not
from waiting, so no client tries the same request again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinkex.errors import InvalidInputError
from tinkex.store.stored_bytes import KINDS, StoredBytes

NUM_NAMED = 3
"""Kinds that a refusal names, those that take most first."""
REPLAY_SHARE = 16
"""A model's state is saved when its requests since take this part of the quota, or earlier."""


class OverQuotaError(InvalidInputError):
    """A user has as many bytes on the disk as they may have."""

    code = "quota"


class DiskQuota:
    def __init__(self, stored: StoredBytes, limit: Callable[[str], float]) -> None:
        """`limit`: the quota `disk_bytes` of a user; 0 means none."""
        self._stored = stored
        self._limit = limit

    def admit(self, name: str, user_id: str, num_bytes: int, *, freed: int = 0) -> None:
        """Reserve bytes for what will be committed under `name`.

        Another call with the same name replaces the first one's reservation.

        Args:
            freed: Bytes of the user's own that go with the same commit.

        Raises:
            OverQuotaError: The user would have more than they may. Nothing is reserved.
        """
        self._judge(user_id, num_bytes, freed, besides=name)
        self._stored.reserve(name, user_id, num_bytes)

    def hold(self, name: str, user_id: str, num_bytes: int) -> None:
        """Count bytes that were accepted before their size was known, until `release`."""
        self._stored.reserve(name, user_id, num_bytes)

    def release(self, name: str) -> None:
        """End a reservation that came to nothing; one that was committed has ended already."""
        self._stored.release(name)

    @contextmanager
    def admitted(
        self, name: str, user_id: str, num_bytes: int, *, freed: int = 0
    ) -> Iterator[None]:
        """`admit` for the length of a block in which `name` is committed, or fails to be."""
        self.admit(name, user_id, num_bytes, freed=freed)
        try:
            yield
        finally:
            self.release(name)

    def require(self, user_id: str, num_bytes: int = 1, *, freed: int = 0) -> None:
        """Refuse what will take so many bytes, or an unknown number, without reserving them.

        Raises:
            OverQuotaError: There is no room for them now.
        """
        self._judge(user_id, num_bytes, freed)

    def _judge(self, user_id: str, num_bytes: int, freed: int, *, besides: str = "") -> None:
        limit = self._limit(user_id)
        if limit and self._stored.total(user_id, besides=besides) + num_bytes - freed > limit:
            raise OverQuotaError(self._refusal(user_id, num_bytes, limit))

    def left(self, user_id: str) -> int | None:
        """The bytes that a user may still store; None where there is no quota."""
        limit = self._limit(user_id)
        return max(0, int(limit - self._stored.total(user_id))) if limit else None

    def replay_bytes(self, user_id: str, most: int) -> float:
        """Bytes of a model's requests after which its state should be saved, so that they go."""
        limit = self._limit(user_id)
        return min(most, limit / REPLAY_SHARE) if limit else most

    def _refusal(self, user_id: str, num_bytes: int, limit: float) -> str:
        stored = self._stored.of(user_id).most_common(NUM_NAMED)
        kinds = [(KINDS[name], size) for name, size in stored]
        held = ", ".join(f"{megabytes(size)} of {kind.says}" for kind, size in kinds)
        ways = "; ".join(f"{kind.says}: {kind.way_out}" for kind, _ in kinds)
        return (
            f"Your disk quota on this server is {megabytes(limit)} ('disk_bytes'). You have "
            f"{megabytes(self._stored.total(user_id))}, and this needs {megabytes(num_bytes)} more"
            f"{f'. Most of it is {held}' if held else ''}. Make room, then send it again under a "
            f"new number{f' ({ways})' if ways else ''}; or ask an administrator of this server for "
            "more."
        )


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f} MB"
