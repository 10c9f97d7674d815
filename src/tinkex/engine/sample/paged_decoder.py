"""The parts of a sampling pass that a decoder may bring itself, because its device has better ones.

The sampler attends with `paged.PagedAttend` and records nothing, unless its decoder says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.attention import Attend
from tinkex.engine.sample.expert_pages import ExpertPages
from tinkex.engine.sample.paged import PagedCache
from tinkex.engine.sample.scheduler import Chunk
from tinkex.engine.sample.states import StateCache


class PassAttend(Attend, Protocol):
    """Attention over the paged cache; `begin` comes before each forward pass."""

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Prepare one pass whose rows are the tokens of `chunks`, in order."""


class RecordedSteps(Protocol):
    """Decode steps of one token per sequence that are recorded once and replayed."""

    def run(
        self,
        chunks: Sequence[Chunk],
        lora: LoraBatch | None,
        drawn: tuple[Tensor, Sequence[int]] | None = None,
    ) -> Tensor | None:
        """Logits [B, V] of one-token chunks, in their order; None where no recording fits.

        `drawn` holds tokens on the device that the host does not know yet, and which of them each
        chunk feeds in. The result is overwritten by the next call.
        """


@runtime_checkable
class PagedDecoder(Protocol):
    """A decoder that attends over pages in its own way."""

    def paged(
        self, cache: PagedCache, states: StateCache | None, experts: ExpertPages | None
    ) -> tuple[PassAttend, RecordedSteps | None]: ...
