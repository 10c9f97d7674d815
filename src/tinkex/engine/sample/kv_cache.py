"""Which block of the KV cache belongs to whom, and which can be shared.

Keys and values live in blocks of `block_size` tokens. A full block has a key: the digest of the
adapter version, of all tokens before it and of its own tokens; two sequences whose keys are equal
share the block. Blocks are counted by reference; a block nobody holds keeps its content, and is
reused for something else only when no empty block is left, the longest unused first.

Knows block numbers and tokens, never tensors, so its tests need no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

Key = bytes


def root_key(version: str) -> Key:
    """The start of every chain of one tenant and adapter version."""
    return blake2b(version.encode(), digest_size=16).digest()


def chain_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a full block. It holds all that went before, since equal tokens after unequal
    prefixes, or under unequal adapters, have unequal KV."""
    return blake2b(np.asarray(tokens, np.int32).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Reference counts, the free list and the prefix index over `num_blocks` blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        self._block_of: dict[Key, int] = {}
        # Popped from the end, so low numbers are used first and stay warm in the processor's cache.
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    def emptied(self) -> BlockPool:
        """A pool of the same blocks in which nothing is."""
        return BlockPool(self.num_blocks, self.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still give: empty ones, and cached ones nobody holds."""
        return len(self._empty) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Take a reference on the longest run of cached blocks at the start of a chain."""
        blocks = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            # Held again, so it cannot be evicted.
            self._idle.pop(block, None)
            self._refs[block] += 1
            blocks.append(block)
        return blocks

    def num_idle_of(self, keys: Iterable[Key]) -> tuple[int, int]:
        """The number of blocks that `match` would find, and how many of them are available now."""
        num_found = num_idle = 0
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            num_found += 1
            num_idle += self._refs[block] == 0
        return num_found, num_idle

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, changing nothing, if so many are not
        available."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        # The longest unused: entries are added at the end and never moved.
        block, _ = self._idle.popitem(last=False)
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        return block

    def publish(self, block: int, key: Key) -> None:
        """Let others find a block that is now full. An equal block published earlier stays."""
        # Two sequences may have computed equal blocks; each goes on with its own.
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def is_held(self, block: int) -> bool:
        return self._refs[block] > 0

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Hide blocks whose content is not to be found again."""
        for block in blocks:
            if (key := self._key_of[block]) is not None:
                del self._block_of[key]
                self._key_of[block] = None

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that someone already holds."""
        for block in blocks:
            assert self._refs[block] > 0
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back on each. Later blocks grow idle first: a prefix outlives what
        followed it."""
        for block in reversed(blocks):
            assert self._refs[block] > 0
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key_of[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None
