"""Let training and sampling take turns by the time they used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class FairShare:
    """Turns by time used: whoever has used least, weighted, is next.

    A kind of work that was idle does not save up time: it starts level with the others.
    """

    weights: dict[str, float]
    _used: dict[str, float] = field(default_factory=dict)
    _active: frozenset[str] = frozenset()

    def pick(self, ready: Iterable[str]) -> str:
        """The kind that is next, of those that have work now."""
        now = frozenset(ready)
        assert now
        if now != self._active:
            self._level(now)
        return min(sorted(now), key=self._used.__getitem__)

    def _level(self, now: frozenset[str]) -> None:
        """Let kinds that come back begin level with those that go on."""
        level = min((self._used[kind] for kind in self._active & now), default=0.0)
        # Nobody who was active goes on: level with the highest, or a returning kind could spend
        # what it did not use while it slept.
        if not self._active & now:
            level = max(self._used.values(), default=0.0)
        for kind in now - self._active:
            self._used[kind] = max(self._used.get(kind, 0.0), level)
        self._active = now

    def charge(self, kind: str, seconds: float) -> None:
        self._used[kind] = self._used.get(kind, 0.0) + seconds / self.weights[kind]
