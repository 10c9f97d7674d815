"""Which experts of a mixture the tokens passed, as it travels from a sample into training.

`routed_experts` has a row per token: int64 [tokens, layers with experts, words]. A word holds four
numbers of experts of 16 bits each, the lowest first; as little-endian memory that is an int16
array. A token passes `per_token` experts of a layer, best first; what a word has beyond them is -1.
A row of -1 alone was not recorded: there the router chooses.

A sample returns one tensor for its prompt and one per sequence, so that both together have a row
per token; the last token sampled was computed by nobody and is not recorded. A datum takes the rows
of its model input. Slicing and joining along the first dimension is all that a loop needs to do.
"""

from __future__ import annotations

from dataclasses import dataclass

NAME = "routed_experts"
PER_WORD = 4
NOT_RECORDED = -1


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """How a mixture routes: what `routed_experts` of its tokens look like."""

    count: int
    """Experts of a layer."""
    per_token: int
    layers: int
    """How many layers have experts."""

    @property
    def num_words(self) -> int:
        return -(-self.per_token // PER_WORD)

    @property
    def bytes_per_token(self) -> int:
        return 8 * self.num_words * self.layers
