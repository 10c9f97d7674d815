"""Losses over a vocabulary of which every rank of a group has a shard of the logits.

A row's softmax needs three numbers of each rank: its largest logit, its sum of exponentials, and
the logits of targets that are among its tokens. So 4 bytes a row and target travel, not the
vocabulary. All ranks end up with the same logprobs, evaluate the same loss, and have the gradient
of their own logits.

Shapes: N rows of a chunk, n of one piece, v the rank's shard of the vocabulary, K targets of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinkex.engine.collectives.group import Group
from tinkex.engine.numerics.softmax import total

if TYPE_CHECKING:
    from tinkex.engine.train.scoring import ScoredRows


class ShardedSoftmax:
    """The softmax over all ranks' logits, in the memory of this rank's; see `scoring._Softmax`."""

    def __init__(
        self, logits_Nv: Tensor, pieces: Sequence[ScoredRows], group: Group, first: int
    ) -> None:
        """`first` is the token of the first column."""
        self._first = first
        # The largest logit of all ranks: exponentials that are summed must have one scale.
        logits_Nv -= group.all_reduce_max(logits_Nv.amax(1, keepdim=True))
        picked = []
        for piece in pieces:
            mine_nK, column_nK = self._mine(piece, logits_Nv.shape[1])
            picked.append(logits_Nv[piece.rows].gather(1, column_nK) * mine_nK)
        self._exp_Nv = logits_Nv.exp_()
        # One all-reduce for the rows' sums and their targets' logits.
        sums = torch.cat([total(self._exp_Nv).flatten(), *(p.flatten() for p in picked)])
        num_rows = len(logits_Nv)
        sums = group.all_reduce(sums)
        self._total_N1, rest = sums[:num_rows, None], sums[num_rows:]
        log_total_N1 = self._total_N1.log()
        logits = rest.split([p.numel() for p in picked])
        self.logprobs = [
            logit.view_as(p) - log_total_N1[piece.rows]
            for piece, p, logit in zip(pieces, picked, logits, strict=True)
        ]

    def _mine(self, piece: ScoredRows, width: int) -> tuple[Tensor, Tensor]:
        """(which targets are among this rank's tokens, their columns; 0 for others)."""
        column_nK = piece.columns() - self._first
        mine_nK = (column_nK >= 0) & (column_nK < width)
        return mine_nK, column_nK.masked_fill(~mine_nK, 0)

    def backward(self, pieces: Sequence[ScoredRows]) -> Tensor:
        """d loss / d logits of this rank's tokens."""
        scale_N1 = torch.zeros_like(self._total_N1)
        for piece in pieces:
            if piece.slopes_nK is not None:
                scale_N1[piece.rows] = -piece.slopes_nK.sum(dim=1, keepdim=True)
        self._exp_Nv.mul_(scale_N1.div_(self._total_N1))
        for piece in pieces:
            if piece.slopes_nK is not None:
                mine_nK, column_nK = self._mine(piece, self._exp_Nv.shape[1])
                self._exp_Nv[piece.rows].scatter_add_(1, column_nK, piece.slopes_nK * mine_nK)
        return self._exp_Nv
