"""From logits to tokens and logprobs, for a batch of rows with different settings.

Uniform numbers of a row's own decide (see `rng`), so its draw depends on nothing but its logits and
settings: one picks a group of 4,096 cells by its share of the weight, one 64 of these, one the
cell. A single number for all cells would make a token depend on the sum of all weights before it,
and rounding that moves this sum by a millionth would change tokens that are rarer than that.
Weights are whole numbers (the likeliest token's is 2^40), so their sums are exact in whatever order
a device adds. The bias comes first, then temperature, top_k, top_p on what is left, and min_p. The
reported logprob is that of the distribution sampled from; a greedy row, whose distribution is a
single point, reports its logprob at temperature 1, bias included. So at temperature 1 without
filters and bias it is what the trainer computes, by the same function (`softmax.log_total`).

Knows tensors only. Nothing here waits for the device except `nucleus` on a CPU, where that is free.

Shapes: N rows, V vocabulary, K candidates, X some cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.contract.sampling import EMPTY_LOGPROB, DrawSettings
from tinkex.engine.numerics.ops import CPU, Ops
from tinkex.engine.numerics.picking import log_weight, whole_weights

_FEW = 512
"""Candidates tried before a whole vocabulary is sorted for top_p."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How each row of a batch is drawn."""

    greedy_N: Tensor
    inverse_temperature_N1: Tensor
    """1 for greedy rows."""
    top_k_N: Tensor
    """Vocabulary size where off."""
    top_p_N: Tensor
    log_min_p_N: Tensor
    """-inf where off. The scaled logit of a row's likeliest token is 0."""
    bias: tuple[Tensor, Tensor, Tensor] | None
    """Rows, token ids and what is added to their logits; None where no row has a bias."""
    any_greedy: bool
    any_scaled: bool
    max_top_k: int
    """Largest top_k of the batch; 0 when some row has none."""
    any_filter: bool
    ops: Ops

    @classmethod
    def of(
        cls,
        rows: Sequence[DrawSettings],
        vocab_size: int,
        ops: Ops = CPU,
    ) -> Settings:
        """The settings of a batch of jobs, one per row."""
        greedy = [row.temperature == 0 for row in rows]
        # A temperature below what fp32 can divide by is as good as the smallest it can.
        inverse = [1.0 if t == 0 else min(1.0 / t, 1e30) for t in (r.temperature for r in rows)]
        top_k = [min(r.top_k, vocab_size) if r.top_k > 0 else vocab_size for r in rows]
        active = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
        filtered = any(top_k[i] < vocab_size or rows[i].top_p < 1 or rows[i].min_p for i in active)
        widest = max((top_k[i] for i in active), default=0)
        return cls(
            greedy_N=ops.send(greedy),
            inverse_temperature_N1=ops.send(inverse)[:, None],
            top_k_N=ops.send(top_k),
            top_p_N=ops.send([row.top_p for row in rows]),
            log_min_p_N=ops.send([math.log(r.min_p) if r.min_p else -math.inf for r in rows]),
            bias=_bias(rows, ops),
            any_greedy=any(greedy),
            any_scaled=any(x != 1.0 for x in inverse),
            max_top_k=widest if widest < vocab_size else 0,
            any_filter=filtered,
            ops=ops,
        )

    def is_plain_N(self, vocab_size: int) -> Tensor:
        """Rows without a filter; a greedy row has none."""
        off_N = (self.top_k_N == vocab_size) & (self.top_p_N >= 1)
        return off_N & (self.log_min_p_N == -math.inf) | self.greedy_N


def _bias(rows: Sequence[DrawSettings], ops: Ops) -> tuple[Tensor, Tensor, Tensor] | None:
    cells = [
        (row, *cell) for row, draw in enumerate(rows) for cell in (draw.logit_bias or {}).items()
    ]
    if not cells:
        return None
    at, ids, added = zip(*cells, strict=True)
    return ops.send(at), ops.send(ids), ops.send(added)


def draw(logits_NV: Tensor, settings: Settings, uniform_N3: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [N], logprobs [N]). Overwrites `logits_NV`."""
    if settings.bias is not None:
        rows_X, ids_X, added_X = settings.bias
        logits_NV[rows_X, ids_X] += added_X.to(logits_NV.dtype)
    greedy_tokens_N = logits_NV.argmax(1) if settings.any_greedy else None
    # Not by the whole weights that are drawn from: to the bit as the trainer will compute it.
    scaled_NV, log_total_N1 = _scaled(logits_NV, settings)
    tokens_N = settings.ops.pick(scaled_NV, uniform_N3)[0]
    if greedy_tokens_N is not None:
        tokens_N = torch.where(settings.greedy_N, greedy_tokens_N, tokens_N)
    logprobs_N = (scaled_NV.gather(1, tokens_N[:, None]) - log_total_N1)[:, 0]
    if settings.any_filter:
        kept_N, kept_logprobs_N = nucleus(scaled_NV, settings, uniform_N3)
        plain_N = settings.is_plain_N(logits_NV.shape[1])
        tokens_N = torch.where(plain_N, tokens_N, kept_N)
        logprobs_N = torch.where(plain_N, logprobs_N, kept_logprobs_N)
    return tokens_N, logprobs_N


def _scaled(logits_NV: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Logits over temperature, the largest of each row 0, in place; the logs of their totals."""
    if settings.any_scaled:
        logits_NV -= logits_NV.amax(1, keepdim=True)
        logits_NV *= settings.inverse_temperature_N1
        return logits_NV, settings.ops.log_total(logits_NV)[1]
    top_N1, log_total_N1 = settings.ops.log_total(logits_NV)
    logits_NV -= top_N1
    return logits_NV, log_total_N1


def filtered(scaled_NV: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """(ids [N, K], scaled logits [N, K]) of what the filters leave, best first; -inf is out."""
    num_candidates = settings.max_top_k or scaled_NV.shape[1]
    few = min(_FEW, num_candidates)
    if scaled_NV.device.type == "cpu" and few < num_candidates and not settings.max_top_k:
        # Usually few tokens hold top_p of the mass; sorting all is the exception.
        values_NK, ids_NK = scaled_NV.topk(few, dim=1)
        mass_N = (values_NK.exp().sum(1) / scaled_NV.exp().sum(1)) - 1e-4
        enough_N = (mass_N >= settings.top_p_N) | (settings.top_k_N <= few)
        enough_N |= values_NK[:, -1] < settings.log_min_p_N
        # Its top_p is a share of what top_k leaves, and not all of that is among the few.
        is_wider_N = (settings.top_k_N > few) & (settings.top_k_N < scaled_NV.shape[1])
        enough_N &= ~(is_wider_N & (settings.top_p_N < 1))
        if bool((enough_N | settings.is_plain_N(scaled_NV.shape[1])).all()):
            return ids_NK, _cut(values_NK, settings, scaled_NV)
    values_NK, ids_NK = scaled_NV.topk(num_candidates, dim=1)
    return ids_NK, _cut(values_NK, settings, scaled_NV)


def _cut(values_NK: Tensor, settings: Settings, scaled_NV: Tensor) -> Tensor:
    """Sorted candidates, -inf from where a filter ends."""
    num_candidates, vocab_size = values_NK.shape[1], scaled_NV.shape[1]
    rank_K = torch.arange(num_candidates, device=values_NK.device)
    kept_NK = values_NK.masked_fill(rank_K >= settings.top_k_N[:, None], float("-inf"))
    weights_NK = whole_weights(kept_NK)
    whole_N = weights_NK.sum(1)
    if num_candidates < vocab_size and not settings.max_top_k:
        # Candidates are not all there is: rows without top_k measure top_p against everything.
        all_N = whole_weights(scaled_NV).sum(1)
        whole_N = torch.where(settings.top_k_N == vocab_size, all_N, whole_N)
    # Holtzman et al. (arXiv 1904.09751): a token stays while less than top_p lies before it.
    before_NK = weights_NK.cumsum(1) - weights_NK
    out_NK = before_NK >= (settings.top_p_N.double() * whole_N.double())[:, None]
    out_NK &= (rank_K > 0) & (settings.top_p_N < 1)[:, None]
    # Nguyen et al., min_p (arXiv 2407.01082): a share of the likeliest token's probability.
    out_NK |= values_NK < settings.log_min_p_N[:, None]
    return kept_NK.masked_fill(out_NK, float("-inf"))


def nucleus(scaled_NV: Tensor, settings: Settings, uniform_N3: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the candidates that the filters leave."""
    ids_NK, values_NK = filtered(scaled_NV, settings)
    place_N, log_total_N = settings.ops.pick(values_NK, uniform_N3)
    place_N1 = place_N[:, None]
    logprobs_N = values_NK.gather(1, place_N1)[:, 0] - log_total_N
    return ids_NK.gather(1, place_N1)[:, 0], logprobs_N


def top_logprobs(ops: Ops, logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids [N, k], logprobs [N, k]) of the likeliest tokens at temperature 1."""
    ids_NK = logits_NV.topk(min(k, logits_NV.shape[1]), dim=1).indices
    return ids_NK, ops.logprobs_of(logits_NV, ids_NK)


def top_sampled(scaled_NV: Tensor, settings: Settings, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of the distribution sampled from (temperature 1 for greedy rows).

    `scaled_NV` is what `draw` left in its logits. A cell that a filter removed is empty.
    """
    ids_NK, logprobs_NK = top_logprobs(settings.ops, scaled_NV, k)
    if settings.any_filter:
        kept_ids, kept = filtered(scaled_NV, settings)
        kept = kept - log_weight(whole_weights(kept).sum(1))[:, None]
        width = min(ids_NK.shape[1], kept.shape[1])
        use_N1 = ~settings.is_plain_N(scaled_NV.shape[1])[:, None]
        filled = torch.full_like(logprobs_NK, float("-inf"))
        filled[:, :width] = kept[:, :width]
        filled_ids = torch.zeros_like(ids_NK)
        filled_ids[:, :width] = kept_ids[:, :width]
        ids_NK = torch.where(use_N1, filled_ids, ids_NK)
        logprobs_NK = torch.where(use_N1, filled, logprobs_NK)
    gone_NK = logprobs_NK == float("-inf")
    return ids_NK.masked_fill(gone_NK, 0), logprobs_NK.masked_fill(gone_NK, EMPTY_LOGPROB)
