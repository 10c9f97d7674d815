"""The log of a softmax's denominator: one definition for the trainer and the sampler.

A logprob is (logit - largest logit of its row) - log of the row's total, in fp32 and in this order.
A row is summed in an order that does not depend on the number of rows.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 64


def log_total(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """(the largest logit, the log of the sum of exp(logit - largest)) of each row, [N, 1]."""
    top_N1 = logits_NV.amax(1, keepdim=True)
    return top_N1, total(torch.sub(logits_NV, top_N1).exp_()).log_()


def total(weights_NV: Tensor) -> Tensor:
    """The sum of each row, [N, 1]; in groups, since torch halves a single long row by threads."""
    # [N, V] -> [N, V / 64, 64]: sums of 64 neighbours, then of the groups, then what is left.
    whole = weights_NV.shape[1] // _GROUP * _GROUP
    groups_NG: Tensor = weights_NV[:, :whole].unflatten(1, (-1, _GROUP)).sum(2)
    return groups_NG.sum(1, keepdim=True) + weights_NV[:, whole:].sum(1, keepdim=True)
