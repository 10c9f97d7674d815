"""Blocks are shared only where keys and values are equal, and never lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.sample.kv_cache import BlockPool, chain_key, root_key


def keys(version: str, *blocks: list[int]) -> list[bytes]:
    chain = [root_key(version)]
    for tokens in blocks:
        chain.append(chain_key(chain[-1], tokens))
    return chain[1:]


def filled(pool: BlockPool, chain: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(chain))
    assert blocks is not None
    for block, key in zip(blocks, chain, strict=True):
        pool.publish(block, key)
    return blocks


def test_a_prefix_is_found_and_what_differs_is_not():
    pool = BlockPool(8, 2)
    blocks = filled(pool, keys("v", [1, 2], [3, 4]))
    assert pool.match(keys("v", [1, 2], [3, 4], [5, 6])) == blocks
    assert pool.match(keys("v", [1, 2], [9, 9])) == blocks[:1]
    assert pool.match(keys("other adapter", [1, 2])) == []
    assert pool.match(keys("v", [3, 4])) == []


def test_equal_tokens_after_another_prefix_have_another_key():
    assert keys("v", [1, 2], [3, 4])[1] != keys("v", [0, 0], [3, 4])[1]


def test_a_released_block_is_still_found_until_its_room_is_needed():
    pool = BlockPool(2, 2)
    chain = keys("v", [1, 2])
    block = filled(pool, chain)
    pool.release(block)
    assert pool.num_available == 2
    assert pool.match(chain) == block
    pool.release(block)
    assert pool.allocate(2) is not None
    assert pool.match(chain) == []


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head():
    pool = BlockPool(3, 2)
    chain = keys("v", [1, 2], [3, 4], [5, 6])
    pool.release(filled(pool, chain))
    assert pool.allocate(1) is not None
    assert len(pool.match(chain)) == 2


def test_allocating_too_much_changes_nothing():
    pool = BlockPool(3, 2)
    assert pool.allocate(4) is None
    assert pool.num_available == 3


def test_a_shared_block_is_free_after_its_last_holder():
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.num_available == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=60))
def test_whatever_happens_every_block_is_held_idle_or_empty(actions):
    """The pool's books balance after any run of allocate, match, publish and release."""
    pool, held, chains = (
        BlockPool(6, 1),
        [],
        [keys("v", *[[i + n] for n in range(4)]) for i in range(5)],
    )
    for action, n in actions:
        if action == 0 and (blocks := pool.allocate(n)) is not None:
            held.append(blocks)
            for block, key in zip(blocks, chains[n], strict=False):
                pool.publish(block, key)
        elif action == 1:
            held.append(pool.match(chains[n]))
        elif action == 2 and held:
            pool.release(held.pop(n % len(held)))
        in_use = {block for blocks in held for block in blocks}
        assert pool.num_available == 6 - len(in_use)
