"""Logprobs of teachers that were computed before, by a digest of what they are of.

Bounded by bytes. Whoever asks makes the key, of the bytes that were scored and of names that the
server chose; see `work.teachers`.
"""

from __future__ import annotations

from collections import OrderedDict

from tinkex.engine.jobs import Array, CsrArray
from tinkex.server.jobs.teaching import Scores

CACHE_BYTES = 64 * 1024 * 1024


class ScoreCache:
    """Scores by digest; those unused for longest go first."""

    def __init__(self, room_bytes: int = CACHE_BYTES) -> None:
        self._room_bytes = room_bytes
        self._kept: OrderedDict[bytes, Scores] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: bytes) -> Scores | None:
        if (scores := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return scores

    def put(self, key: bytes, scores: Scores) -> None:
        if key in self._kept:
            return
        self._kept[key] = scores
        self.size_bytes += size_of(scores)
        while self.size_bytes > self._room_bytes:
            self.size_bytes -= size_of(self._kept.popitem(last=False)[1])


def size_of(scores: Scores) -> int:
    return 200 + sum(int(array.nbytes) for array in arrays_of(scores))


def arrays_of(value: Array | CsrArray) -> tuple[Array, ...]:
    if isinstance(value, CsrArray):
        return value.values, value.crow_indices, value.col_indices
    return (value,)
