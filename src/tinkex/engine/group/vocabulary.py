"""Losses over a vocabulary of which every member has a part of the logits.

A row's softmax needs three numbers of each member: its largest logit, its sum of exponentials, and
the logits of targets that are among its tokens. So 4 bytes a row and target travel, not the
vocabulary. All members end up with the same logprobs, evaluate the same loss, and have the gradient
of their own logits.

Shapes: N rows of a chunk, n of one piece, v the member's part of the vocabulary, K targets of a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinkex.engine.group.group import Group
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.softmax import total
from tinkex.engine.train.scoring import PlainSoftmax, ScoredRows

if TYPE_CHECKING:
    from tinkex.engine.group.decoder import GroupDecoder


class VocabularyPart:
    """The head of one member, as losses use it."""

    def __init__(self, decoder: GroupDecoder, group: Group, first: int) -> None:
        self._decoder, self._group, self._first = decoder, group, first

    def softmax(
        self, hidden_ND: Tensor, lora: LoraBatch, pieces: Sequence[ScoredRows]
    ) -> PartSoftmax:
        logits_Nv = self._decoder.head_part(hidden_ND, lora)
        return PartSoftmax(logits_Nv, pieces, self._group, self._first)

    def backward(self, dlogits_Nv: Tensor, hidden_ND: Tensor, lora: LoraBatch) -> Tensor:
        """d loss / d hidden, the sum over all members."""
        return self._decoder.head_part_backward(dlogits_Nv, hidden_ND, lora)


class PartSoftmax(PlainSoftmax):
    """Of the logits of the member's own tokens; its gradient is theirs too."""

    def __init__(
        self, logits_Nv: Tensor, pieces: Sequence[ScoredRows], group: Group, first: int
    ) -> None:
        self._first = first
        logits_Nv -= group.largest(logits_Nv.amax(1, keepdim=True))
        picked = []
        for piece in pieces:
            here, at_nK = self._mine(piece, logits_Nv.shape[1])
            picked.append(logits_Nv[piece.rows].gather(1, at_nK) * here)
        self._exp_NV = logits_Nv.exp_()
        # One meeting for the rows' sums and their targets' logits.
        told = torch.cat([total(self._exp_NV).flatten(), *(p.flatten() for p in picked)])
        num_rows = len(logits_Nv)
        told = group.sum(told)
        self._total_N1, rest = told[:num_rows, None], told[num_rows:]
        log_total_N1 = self._total_N1.log()
        logits = rest.split([p.numel() for p in picked])
        self.logprobs = [
            logit.view_as(p) - log_total_N1[piece.rows]
            for piece, p, logit in zip(pieces, picked, logits, strict=True)
        ]

    def _mine(self, piece: ScoredRows, width: int) -> tuple[Tensor, Tensor]:
        """(which targets are among the member's tokens, their columns; 0 for others)."""
        at_nK = piece.columns() - self._first
        here = (at_nK >= 0) & (at_nK < width)
        return here, at_nK.masked_fill(~here, 0)

    def _add(self, piece: ScoredRows, slopes_nK: Tensor) -> None:
        here, at_nK = self._mine(piece, self._exp_NV.shape[1])
        self._exp_NV[piece.rows].scatter_add_(1, at_nK, slopes_nK * here)
