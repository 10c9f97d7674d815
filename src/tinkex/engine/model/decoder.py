"""One compact decoder for every native family, on flat packed tokens.

A layer is a mixer (attention, or a gated delta rule) and an MLP (dense, or a mixture of experts).
The decoder computes everything but what happens between tokens, which an `Attend` supplies together
with its masks, caches and states: the trainer passes whole sequences, the sampler a paged cache,
and both get the same numbers. Tokens of many sequences and tenants lie in one stream; a `LoraBatch`
says whose rows are whose. Base weights are frozen: fp32 on a CPU (bf16 matmuls can kill the process
there), bf16 on CUDA, while adapters and reductions stay fp32.

Shapes: T tokens, D hidden, H query heads, K key/value heads, d head size, V vocabulary, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tinkex.engine.collectives.group import Group
from tinkex.engine.lora.adapter import (
    NO_TERMS,
    Kind,
    LoraBatch,
    LoraTerm,
    Target,
    TargetPart,
    accumulate,
    low_rank_backward,
    low_rank_inner,
)
from tinkex.engine.model.attention import Attend, PackedCausal, RecurrentAttend
from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.layers import glu_linear, linear, norm_linear, rms_norm, rotate, wide
from tinkex.engine.model.loading import Loader
from tinkex.engine.model.mixture import (
    MixtureWeights,
    Routing,
    mixture,
    mixture_targets,
    mlp_targets,
)
from tinkex.engine.model.shape import ModelConfig, RopeConfig
from tinkex.engine.model.sharded_norm import norm_heads
from tinkex.engine.model.sharding import ModelShards
from tinkex.engine.model.weights import WeightReader
from tinkex.engine.numerics.ops import CPU, Ops


class DecoderLike(Protocol):
    """The part of a model that trainer and sampler use, ours or a foreign one."""

    config: ModelConfig
    targets: Mapping[str, Target]
    uncovered: Mapping[Kind, str] = {}
    """By kind, a weight that can carry no adapter: such a kind is not trained by halves."""
    ops: Ops
    """The operations of its device, for all that computes over it."""
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool = False
    """Whether no bit of a row's forward depends on the other rows of a pass."""
    keeps_pieces_apart: bool = False
    """Whether no bit of a piece's gradients (`LoraBatch.apart`) depends on the other pieces."""
    leaf_keys: Container[str] | None = None
    """Linears whose adapters get their gradients through leaves; None: all. See `start_grad`."""

    group: Group = Group()
    """The processes that hold the model together, each with a shard of it."""
    tokens: range = range(0)
    """The token ids whose logits `head_shard` gives; empty for models that are never sharded."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraBatch | None = None,
        *,
        room: float = math.inf,
        routing: Routing | None = None,
    ) -> Tensor: ...

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor: ...

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor: ...

    def head_shard(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Logits [N, v] of this rank's `tokens`."""
        return self.head(hidden_ND, lora)

    def head_shard_backward(
        self, dlogits_Nv: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        """As `head_backward`, from the logits of this rank's `tokens`."""
        return self.head_backward(dlogits_Nv, hidden_ND, lora)


@dataclass(slots=True)
class LayerWeights:
    """The frozen weights of one layer, linears that read the same input fused into one matrix."""

    attn_norm: Tensor
    qkv: Tensor
    """Of a delta layer: queries, keys, values, then gate, strength and decay; see `in_order`."""
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """Of a mixture: empty, and so is `down`; its matrices are in `mixture`."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None = None
    delta: DeltaWeights | None = None
    mixture: MixtureWeights | None = None


class Decoder(DecoderLike):
    """A frozen base model. All methods are functions of their arguments; nothing is kept.

    In a group of several processes each has the decoder of its shard: some heads, columns of the
    MLP, experts and tokens of the vocabulary. They come together at the edges of each block: once
    behind the mixer, once behind the MLP, each an all-reduce of [T, D], and the same twice in a
    backward pass. Every rank keeps the whole residual stream, so norms and routers need nobody.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        ops: Ops = CPU,
        dtype: torch.dtype | None = None,
        keep_packed: bool = False,
        group: Group | None = None,
    ) -> None:
        """`keep_packed` leaves experts in 4 bits that `weights` has so.

        `config` is that of the whole model; `self.config` is that of this rank's shard.
        """
        self.group = group or Group()
        self.shards = ModelShards(config, self.group.size)
        self.config = self.shards.local
        (self.tokens,) = self.shards.vocabulary()[self.group.rank]
        self.ops, self.device = ops, ops.device
        self.dtype = ops.compute_dtype(dtype)
        read = Loader(
            self.shards,
            self.group.rank,
            weights,
            self.device,
            self.dtype,
            keep_packed=keep_packed,
        )
        self.embed_VD = read.one("model.embed_tokens.weight")
        self.layers = [_read_layer(read, index) for index in range(config.num_layers)]
        self.final_norm_D = read.norm("model.norm.weight")
        self.head_VD = self.embed_VD if config.tied_head else read.one("lm_head.weight")
        # Of the whole model, as files have them.
        self.targets: Mapping[str, Target] = native_targets(config)
        rotary_size = config.rotary_size or config.head_size
        self._inv_freq_h = rope_frequencies(config.rope, rotary_size).to(self.device)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraBatch | None = None,
        *,
        room: float = math.inf,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states [T, D] behind the final norm, ready for `head`.

        `room` is how many bytes the layers may keep for the backward pass; if they need more, one
        tensor per layer is kept and the layer computed again. `routing` learns, or says, which
        experts of a mixture the rows pass.
        """
        lengths = attend.lengths if isinstance(attend, PackedCausal) else [len(tokens_T)]
        kept_bytes = self.config.kept_bytes(
            lengths, self.dtype.itemsize, with_pairs=self.ops.keeps_pairs
        )
        # Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
        recompute = kept_bytes > room
        x_TD = self._embed(tokens_T)
        cos_Th, sin_Th = self._rope(positions_T)
        for index in range(self.config.num_layers):
            if recompute and torch.is_grad_enabled():
                # In a group a layer is computed again to its end: others wait for its sums.
                with set_checkpoint_early_stop(self.group.size == 1):
                    x_TD = checkpoint(
                        self._layer,
                        *(index, x_TD, cos_Th, sin_Th, attend, lora, routing),
                        use_reentrant=False,
                    )
            else:
                x_TD = self._layer(index, x_TD, cos_Th, sin_Th, attend, lora, routing)
        return rms_norm(x_TD, self.final_norm_D, self.config.norm_eps)

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Logits [N, V] in fp32, on every rank. `lora` spans count rows of `hidden_ND`."""
        logits_Nv = self.head_shard(hidden_ND, lora)
        if self.group.size == 1:
            return logits_Nv
        # The last rank may have fewer tokens; collectives take equal shapes.
        logits_Nv = F.pad(logits_Nv, (0, self.shards.vocabulary_step - logits_Nv.shape[1]))
        whole_NV = torch.cat(self.group.all_gather(logits_Nv), dim=1)
        return whole_NV[:, : self.config.vocab_size].contiguous()

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        """d loss / d hidden from d loss / d logits; adapter gradients go to their `.grad`."""
        if self.group.size > 1:
            dlogits_NV = dlogits_NV[:, self.tokens.start : self.tokens.stop].contiguous()
        return self.head_shard_backward(dlogits_NV, hidden_ND, lora)

    def head_shard(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        return linear(hidden_ND, self.head_VD, None, _terms(lora, "head")).float()

    def head_shard_backward(
        self, dlogits_Nv: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        dlogits_Nv = dlogits_Nv.to(self.dtype)
        dhidden_ND = dlogits_Nv @ self.head_VD
        if terms := _terms(lora, "head"):
            scaled = low_rank_inner(hidden_ND, terms)
            grads = low_rank_backward(dlogits_Nv, hidden_ND, dhidden_ND, terms, scaled)
            accumulate(terms, grads)
        return self.group.all_reduce(dhidden_ND)

    def matrices(self) -> Iterator[Tensor]:
        """Every weight matrix that a token is multiplied with."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out)
            if layer.mixture is None:
                yield from (layer.gate_up, layer.down)
            elif layer.mixture.shared_gate_up is not None and layer.mixture.shared_down is not None:
                yield from (layer.mixture.shared_gate_up, layer.mixture.shared_down)
        yield self.head_VD

    def _embed(self, tokens_T: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens_T, self.embed_VD)
        # The rank that has a token looks it up; the others add zeros.
        mine_T = (tokens_T >= self.tokens.start) & (tokens_T < self.tokens.stop)
        row_T = (tokens_T - self.tokens.start).clamp(0, len(self.tokens) - 1)
        x_TD = self.group.all_reduce(F.embedding(row_T, self.embed_VD) * mine_T[:, None])
        # All ranks have one graph, whichever adapters they have: its backward has collectives too.
        return x_TD.requires_grad_() if torch.is_grad_enabled() else x_TD

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        # In fp32: in bf16 positions past 256 would fall together.
        angles_Th = positions_T.to(torch.float32)[:, None] * self._inv_freq_h
        factor = self.config.rope.attention_factor
        cos_Th, sin_Th = angles_Th.cos(), angles_Th.sin()
        if factor != 1.0:
            cos_Th, sin_Th = cos_Th * factor, sin_Th * factor
        return cos_Th.to(self.dtype), sin_Th.to(self.dtype)

    def _layer(
        self,
        index: int,
        x_TD: Tensor,
        cos_Th: Tensor,
        sin_Th: Tensor,
        attend: Attend,
        lora: LoraBatch | None,
        routing: Routing | None = None,
    ) -> Tensor:
        config, layer = self.config, self.layers[index]
        eps = config.norm_eps
        terms = _terms(lora, f"{index}.qkv")
        qkv = norm_linear(
            self.group.enter(x_TD), layer.attn_norm, eps, layer.qkv, layer.qkv_bias, terms
        )
        if layer.delta is not None:
            mixed = self._delta(index, layer.delta, qkv, attend)
        else:
            q, k, v, gate = self._heads(layer, qkv, cos_Th, sin_Th)
            mixed = attend(index, q, k, v, layer.sinks)
            mixed = (mixed if gate is None else mixed * gate.sigmoid()).flatten(1)
        terms = _terms(lora, f"{index}.o")
        # Pre-norm blocks: each reads a norm of the stream and adds its output to it.
        x_TD = self._leave(linear, mixed, layer.out, layer.out_bias, terms, x_TD)
        if layer.mixture is not None:
            return x_TD + self._mixture(index, layer.mixture, x_TD, lora, routing)
        terms = _terms(lora, f"{index}.gate_up")
        gate_up = norm_linear(
            self.group.enter(x_TD), layer.mlp_norm, eps, layer.gate_up, layer.gate_up_bias, terms
        )
        terms = _terms(lora, f"{index}.down")
        return self._leave(glu_linear, gate_up, layer.down, layer.down_bias, terms, x_TD)

    def _leave(
        self,
        product: Callable[..., Tensor],
        x_TI: Tensor,
        weight_DI: Tensor,
        bias_D: Tensor | None,
        terms: tuple[LoraTerm, ...],
        x_TD: Tensor,
    ) -> Tensor:
        """The stream with a block's output, which is a `product`, added."""
        if self.group.size == 1:  # the product adds bias and stream by itself
            return product(x_TI, weight_DI, bias_D, terms, x_TD, self.ops.adds_in_product)
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
        config, group = self.config, self.group
        assert config.experts is not None
        y_TD = rms_norm(group.enter(x_TD), self.layers[index].mlp_norm, config.norm_eps)
        # Routers may round differently: all ranks take the leader's choice of experts.
        part_TD = mixture(config.experts, weights, index, y_TD, lora, routing, group.broadcast)
        return group.leave(part_TD)

    def _norm_heads(self, layer: LayerWeights, q_T: Tensor, k_T: Tensor) -> tuple[Tensor, Tensor]:
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        eps = self.config.norm_eps
        if self.config.wide_qk_norm and self.group.size > 1:
            return norm_heads(q_T, k_T, layer.q_norm, layer.k_norm, eps, self.group)
        return rms_norm(q_T, layer.q_norm, eps), rms_norm(k_T, layer.k_norm, eps)

    def _delta(self, index: int, weights: DeltaWeights, fused: Tensor, attend: Attend) -> Tensor:
        """The input of a delta layer's output linear."""
        assert isinstance(attend, RecurrentAttend)
        delta = weights.config
        sizes = (delta.channels, delta.values, delta.value_heads, delta.value_heads)
        x_TC, z_T, b_TH, a_TH = weights.in_order(fused).split(sizes, dim=1)
        out_THv = attend.recur(index, weights, x_TC, *weights.gates(b_TH, a_TH))
        normed_THv = rms_norm(out_THv, weights.norm_v, self.config.norm_eps)
        gate_THv = F.silu(wide(z_T)).view_as(normed_THv)
        return (normed_THv * gate_THv).to(fused.dtype).flatten(1)

    def _heads(
        self, layer: LayerWeights, qkv: Tensor, cos_Th: Tensor, sin_Th: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, normed and rotated as the family does, and the heads' gate."""
        config = self.config
        num_q, num_kv, size = config.num_heads, config.num_kv_heads, config.head_size
        if not config.qk_norm and config.qkv_clip is None:
            qkv = rotate(qkv, num_q + num_kv, cos_Th, sin_Th)
            q_THd, k_TKd, v_TKd = qkv.unflatten(1, (-1, size)).split([num_q, num_kv, num_kv], 1)
            return q_THd, k_TKd, v_TKd, None
        gate_THd = None
        q_T, k_T, v_T = qkv.split(
            [num_q * size * (1 + config.attn_gate), num_kv * size, num_kv * size], dim=1
        )
        if config.attn_gate:
            # Head by head: its queries, then its gate (Qwen3-Next).
            q_T, gate_THd = q_T.unflatten(1, (num_q, 2 * size)).chunk(2, dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            if not config.wide_qk_norm:
                q_T, k_T = (t.unflatten(1, (-1, size)) if t.ndim == 2 else t for t in (q_T, k_T))
            q_T, k_T = self._norm_heads(layer, q_T, k_T)
        # Before the rotation, which keeps lengths but moves values past the limit (OLMo).
        if (clip := config.qkv_clip) is not None:
            q_T, k_T, v_T = (t.clamp(-clip, clip) for t in (q_T, k_T, v_T))
        q_T, k_T = rotate(q_T, num_q, cos_Th, sin_Th), rotate(k_T, num_kv, cos_Th, sin_Th)
        q_THd, k_TKd, v_TKd = (t.view(len(t), -1, size) for t in (q_T, k_T, v_T))
        return q_THd, k_TKd, v_TKd, gate_THd


def _terms(lora: LoraBatch | None, key: str) -> tuple[LoraTerm, ...]:
    return NO_TERMS if lora is None else lora.terms(key)


def rope_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians per token for each pair of a head, stretched as the model's config says."""
    inv_freq_h = 1.0 / rope.theta ** (torch.arange(0, head_size, 2).float() / head_size)
    if rope.kind == "linear":
        return inv_freq_h / rope.factor
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, inv_freq_h, head_size)
    if rope.kind != "llama3":
        return inv_freq_h
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between blended.
    wavelength_h = 2 * math.pi / inv_freq_h
    turns_h = rope.original_max_position / wavelength_h
    blend_h = (turns_h - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_h = blend_h.clamp(0, 1)
    return (1 - blend_h) * inv_freq_h / rope.factor + blend_h * inv_freq_h


def _yarn_frequencies(rope: RopeConfig, inv_freq_h: Tensor, size: int) -> Tensor:
    """YaRN: pairs that turn often are kept, those that turn seldom stretched, a ramp between."""

    def pair_that_turns(turns: float) -> float:
        length = rope.original_max_position / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(rope.theta))

    # Peng et al., YaRN (arXiv 2309.00071): by how often a pair turns in the context that the
    # model was trained with.
    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp_h = (torch.arange(size // 2).float() - low) / max(high - low, 0.001)
    stretched_h = ramp_h.clamp(0, 1)
    return inv_freq_h / rope.factor * stretched_h + inv_freq_h * (1 - stretched_h)


# --------------------------------------------------------------------------------------- loading


def native_targets(config: ModelConfig) -> dict[str, Target]:
    """Every linear of our decoder that can carry an adapter, fused the way it is computed."""
    hidden, delta = config.hidden_size, config.delta
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    sizes = {"q_proj": q * (1 + config.attn_gate), "k_proj": kv, "v_proj": kv}
    targets: dict[str, Target] = {}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        if config.has_delta(index) and delta is not None:
            mixer = f"{layer}.linear_attn"
            targets[f"{index}.qkv"] = Target.of(hidden, "attn", mixer, **delta.linears)
            targets[f"{index}.o"] = Target.of(delta.values, "attn", mixer, out_proj=hidden)
        else:
            mixer = f"{layer}.self_attn"
            targets[f"{index}.qkv"] = Target.of(hidden, "attn", mixer, **sizes)
            targets[f"{index}.o"] = Target.of(q, "attn", mixer, o_proj=hidden)
        if config.has_experts(index):
            targets |= mixture_targets(config, index)
        else:
            targets |= mlp_targets(f"{index}.", f"{layer}.mlp", hidden, config.mlp_size)
    head = TargetPart("lm_head", "unembed", 0, config.vocab_size)
    targets["head"] = Target(hidden, (head,))
    return targets


_QKV = tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v"))
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def _read_layer(read: Loader, index: int) -> LayerWeights:
    prefix, config = f"model.layers.{index}.", read.config
    delta = read.delta(prefix) if config.has_delta(index) else None
    block = read.mixture(prefix) if config.has_experts(index) else None
    qkv, out = _QKV, "self_attn.o_proj"
    if delta is not None:
        qkv = tuple(f"linear_attn.{name}" for name in delta.config.linears)
        out = "linear_attn.out_proj"
    dense = block is None
    return LayerWeights(
        attn_norm=read.norm(prefix + "input_layernorm.weight"),
        qkv=read.fused(prefix, qkv, "weight"),
        qkv_bias=read.maybe_fused(prefix, qkv, "bias"),
        out=read.one(f"{prefix}{out}.weight"),
        out_bias=read.maybe(f"{prefix}{out}.bias"),
        mlp_norm=read.norm(prefix + "post_attention_layernorm.weight"),
        gate_up=read.fused(prefix, _GATE_UP, "weight") if dense else torch.empty(0),
        gate_up_bias=read.maybe_fused(prefix, _GATE_UP, "bias") if dense else None,
        down=read.one(prefix + "mlp.down_proj.weight") if dense else torch.empty(0),
        down_bias=read.maybe(prefix + "mlp.down_proj.bias") if dense else None,
        q_norm=read.maybe_norm(prefix + "self_attn.q_norm.weight"),
        k_norm=read.maybe_norm(prefix + "self_attn.k_norm.weight"),
        sinks=read.maybe(prefix + "self_attn.sinks"),
        delta=delta,
        mixture=block,
    )
