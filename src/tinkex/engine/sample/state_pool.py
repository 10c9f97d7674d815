"""Which slot of the delta layers' states belongs to whom.

A delta layer carries one state per sequence instead of keys and values. Every running sequence has
a slot; further slots hold states saved at the end of a full block, under the key of that block, so
that a prompt whose beginning was computed before can go on from there. The saved state that nobody
asked for longest goes first. Knows slots and keys, never tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tinkex.engine.sample.kv_cache import Key

Copy = tuple[int, int]
"""(from, to)."""


class StatePool:
    """Slots 0 to `num_live` - 1 belong to running sequences, the others to saved states."""

    def __init__(self, num_live: int, num_saved: int) -> None:
        self.num_live, self._num_saved = num_live, num_saved
        self._free = list(range(num_live - 1, -1, -1))
        self._unused = list(range(num_live + num_saved - 1, num_live - 1, -1))
        self._saved: OrderedDict[Key, int] = OrderedDict()

    def emptied(self) -> StatePool:
        """A pool of the same slots in which nothing is."""
        return StatePool(self.num_live, self._num_saved)

    def take(self) -> int:
        """A slot for a sequence that starts to run; there are as many as may run."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def longest(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many of the leading blocks end at a saved state, and its slot; (0, -1) for none."""
        # From the longest down: unlike keys and values, a state cannot be cut back to fewer tokens.
        for count in range(len(keys), 0, -1):
            if (slot := self._saved.get(keys[count - 1])) is not None:
                self._saved.move_to_end(keys[count - 1])
                return count, slot
        return 0, -1

    def save(self, key: Key) -> int | None:
        """The slot to copy a state into; None when it is saved already, or there is no room."""
        if key in self._saved:
            self._saved.move_to_end(key)
            return None
        if self._unused:
            slot = self._unused.pop()
        elif self._saved:
            _, slot = self._saved.popitem(last=False)
        else:
            return None
        self._saved[key] = slot
        return slot
