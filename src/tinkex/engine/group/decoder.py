"""The decoder of one member: its heads, its columns of the MLP, its experts, its tokens of the
vocabulary.

It is the plain decoder over a smaller model (`cut.ModelCut.local`), which meets the others at the
edges of each block: once where attention or a delta rule ends, once where an MLP or a mixture does,
each a sum of [T, D]; the same twice in a backward pass. Embeddings are looked up by whoever has the
token. Every member keeps the whole residual stream, so norms and routers need nobody.

The kernels of `engine.cuda` are not used: they fuse across the edges at which members meet.

Shapes: T tokens, D hidden, V vocabulary, v the member's part of it, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from tinkex.engine.group.cut import ModelCut, check_divides
from tinkex.engine.group.group import Group
from tinkex.engine.group.vocabulary import VocabularyPart
from tinkex.engine.lora.adapter import LoraBatch, LoraTerm
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import Decoder, LayerWeights, compute_dtype, native_targets
from tinkex.engine.model.layers import rms_norm, wide
from tinkex.engine.model.loading import Loader, check_room
from tinkex.engine.model.mixture import MixtureWeights, Routing, mixture
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import WeightReader, expected_shapes, open_weights


class GroupDecoder(Decoder):
    """`config` is that of the member's part; `targets` are those of the whole model, as files have
    them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        name: str = "the model",
    ) -> None:
        self.group = group
        self.cut = ModelCut(config, group.size, name)
        (self._tokens,) = self.cut.vocabulary()[group.rank]
        super().__init__(self.cut.local, weights, device=group.device, dtype=dtype)
        self.targets = native_targets(config)
        # Where bits count, losses take the very logits that the sampler draws from.
        self.vocabulary = None if group.exact else VocabularyPart(self, group, self._tokens.start)

    def _loader(self, weights: WeightReader, keep_packed: bool) -> Loader:
        return _PartLoader(self.cut, self.group.rank, weights, self.device, self.dtype)

    def _recomputed_layer(self, *args: Any) -> Tensor:
        # To its end, when it is computed again: others wait for its sums.
        with set_checkpoint_early_stop(False):
            return super()._recomputed_layer(*args)

    def _embed(self, tokens_T: Tensor) -> Tensor:
        mine_T = (tokens_T >= self._tokens.start) & (tokens_T < self._tokens.stop)
        at_T = (tokens_T - self._tokens.start).clamp(0, len(self._tokens) - 1)
        x_TD = self.group.sum(F.embedding(at_T, self.embed_VD) * mine_T[:, None])
        # All members have one graph, whichever adapters they have: they meet in its backward too.
        return x_TD.requires_grad_() if torch.is_grad_enabled() else x_TD

    # ------------------------------------------------------------------------------- the head

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """The logits of the whole vocabulary, for all members."""
        part_Nv = self.head_part(hidden_ND, lora)
        part_Nv = F.pad(part_Nv, (0, self.cut.vocabulary_step - part_Nv.shape[1]))
        whole_NV = torch.cat(self.group.parts(part_Nv), dim=1)
        return whole_NV[:, : self.config.vocab_size].contiguous()

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        mine = slice(self._tokens.start, self._tokens.stop)
        return self.head_part_backward(dlogits_NV[:, mine].contiguous(), hidden_ND, lora)

    def head_part(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """The logits [N, v] of the member's own tokens."""
        return super().head(hidden_ND, lora)

    def head_part_backward(
        self, dlogits_Nv: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        return self.group.sum(super().head_backward(dlogits_Nv, hidden_ND, lora))

    # ------------------------------------------------------------------------ edges of a block

    def _enter(self, x_TD: Tensor) -> Tensor:
        return self.group.enter(x_TD)

    def _leave(
        self,
        product: Callable[..., Tensor],
        x_TI: Tensor,
        weight_DI: Tensor,
        bias_D: Tensor | None,
        terms: tuple[LoraTerm, ...],
        x_TD: Tensor,
    ) -> Tensor:
        sum_TD = self.group.leave(product(x_TI, weight_DI, None, terms))
        if bias_D is not None:
            sum_TD = sum_TD + bias_D
        return x_TD + sum_TD

    def _mixture(
        self,
        index: int,
        weights: MixtureWeights,
        x_TD: Tensor,
        lora: LoraBatch | None,
        routing: Routing | None,
    ) -> Tensor:
        assert self.config.experts is not None
        y_TD = rms_norm(self.group.enter(x_TD), self.layers[index].mlp_norm, self.config.norm_eps)
        agree = self.group.same
        part_TD = mixture(self.config.experts, weights, index, y_TD, lora, routing, agree)
        return self.group.leave(part_TD)

    def _norm_heads(self, layer: LayerWeights, q_T: Tensor, k_T: Tensor) -> tuple[Tensor, Tensor]:
        if not self.config.wide_qk_norm:
            return super()._norm_heads(layer, q_T, k_T)
        normed: tuple[Tensor, Tensor] = _CutNorm.apply(  # type: ignore[no-untyped-call]
            q_T, k_T, layer.q_norm, layer.k_norm, self.config.norm_eps, self.group
        )
        return normed


class _CutNorm(torch.autograd.Function):
    """Root-mean-square norms of queries and keys over the heads of all members."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        means = _means(group, wide(q).square(), wide(k).square())
        inverses = [(mean + eps).rsqrt() for mean in means]
        ctx.group = group
        ctx.save_for_backward(q, k, q_weight, k_weight, *inverses)
        q_out, k_out = (
            (wide(x) * inverse).to(x.dtype).mul_(weight)
            for x, inverse, weight in zip((q, k), inverses, (q_weight, k_weight), strict=True)
        )
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        q, k, q_weight, k_weight, q_inverse, k_inverse = ctx.saved_tensors
        q_unit, k_unit = wide(q) * q_inverse, wide(k) * k_inverse
        gq, gk = wide(dq) * q_weight, wide(dk) * k_weight
        q_inner, k_inner = _means(ctx.group, gq * q_unit, gk * k_unit)
        dq = ((gq - q_unit * q_inner) * q_inverse).to(q.dtype)
        dk = ((gk - k_unit * k_inner) * k_inverse).to(k.dtype)
        return dq, dk, None, None, None, None


def _means(group: Group, *parts: Tensor) -> list[Tensor]:
    """The means [T, 1] over the columns of all members, with one meeting for all tensors."""
    sums_Tn = group.sum(torch.stack([part.sum(-1) for part in parts], dim=-1))
    widths = [part.shape[-1] * group.size for part in parts]
    return [sums_Tn[:, i : i + 1] / width for i, width in enumerate(widths)]


class _PartLoader(Loader):
    """Reads whole tensors, checks them as for the whole model, and keeps the member's part."""

    def __init__(
        self,
        cut: ModelCut,
        rank: int,
        weights: WeightReader,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(cut.local, weights, device, dtype)
        self._shapes = dict(expected_shapes(cut.whole))
        self._cut, self._rank = cut, rank

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return self._cut.weight(name, tensor, self._rank)

    def mixture(self, prefix: str) -> MixtureWeights:
        block = super().mixture(prefix)
        return replace(block, first=self._rank * block.down_EDM.shape[0])


def load_part(
    source: ModelSource,
    group: Group,
    *,
    dtype: torch.dtype | None = None,
    weights: WeightReader | None = None,
) -> GroupDecoder:
    """One member's part of a base model."""
    config = source.config()
    check_divides(config, group.size, source.name)
    dtype = compute_dtype(group.device, dtype)
    # Members on one CPU share its memory; on CUDA each has a card of its own.
    parts = 1 if group.device.type == "cpu" else group.size
    check_room(config, source.name, group.device, dtype, parts)
    reader = weights or open_weights(source, config)
    return GroupDecoder(config, reader, group, dtype=dtype, name=source.name)
