"""How many bytes the sparse inputs of one training request, or datum, may become.

An engine computes on dense arrays. A sparse input says its shape in a few bytes and stores what it
likes of it, so the request is judged by what it becomes: all cells of all sparse inputs of all
datums, in their own type. Honest inputs are candidates of each position, a few hundred columns at
most, and stay far below. A token costs the engine many times the bytes that it is allowed here, but
a pass at a time, and all sparse inputs are dense at once: what tokens allow has an end. Each datum
is judged by its own tokens too, because it goes through one pass.
"""

from __future__ import annotations

FLAT_BYTES = 8 * 2**20
"""For all, so that small ones need no thought."""
BYTES_PER_TOKEN = 4096
"""More for each token of the model inputs: 340 candidates of a position with their weights."""
MOST_FOR_TOKENS = 256 * 2**20
"""The most that tokens allow together: a million that stand in a few bytes are no reason."""
TIMES_STORED = 8
"""More for the bytes that were sent, indices included."""


def dense_limit(num_tokens: int, stored_bytes: int) -> int:
    """The most bytes that sparse inputs of `stored_bytes` may take when they are dense."""
    for_tokens = min(BYTES_PER_TOKEN * num_tokens, MOST_FOR_TOKENS)
    return FLAT_BYTES + for_tokens + TIMES_STORED * stored_bytes
