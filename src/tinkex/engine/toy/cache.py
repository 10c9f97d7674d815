"""Memory of earlier jobs, within a limit: a prefix cache and snapshots.

Both forget what was used longest ago, as the real engine does under memory pressure. Knows keys and
values, not what they stand for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from tinkex.engine.jobs import Array

BLOCK = 16
MOST_BLOCKS = 65536
K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The `limit` entries used last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The entry, made and kept when it is not there."""
        value = self._entries[key] if key in self._entries else make()
        self.put(key, value)
        return value


class PrefixCache:
    """Blocks of prompts seen before, told apart by everything in front of them."""

    def __init__(self, num_blocks: int = MOST_BLOCKS) -> None:
        self._blocks: Recent[int, None] = Recent(num_blocks)

    def hits(self, version: str, prompt: Array) -> int:
        """Tokens in whole blocks that an earlier prompt of the same weights had; keeps this one."""
        tokens, key, hits, unbroken = np.asarray(prompt), hash(version), 0, True
        for end in range(BLOCK, len(tokens), BLOCK):
            key = hash((key, tokens[end - BLOCK : end].tobytes()))
            unbroken = unbroken and key in self._blocks
            hits += BLOCK * unbroken
            self._blocks.put(key, None)
        return hits
