"""The decoder on CUDA: fused kernels, and a training pass whose backward is written by hand.

`CudaDecoder` is a `Decoder` with the same answers and another way to them. Autograd over the plain
layers would keep too much and launch too much; here one training pass is a single autograd node
that keeps five tensors a layer (two residuals, fused qkv, the attention's output, fused gate_up),
makes the norms, the rotation and the activation again on the way back, and never forms the gradient
of a frozen weight. Without autograd the same kernels serve the sampler with its own `Attend`, and
none of their bits depends on the batch: see `product` for how they are written.

The plain `Decoder` is the oracle. Losses, optimizers and caches are not known here.

Letters: T tokens, D hidden size, H query heads, K key heads, d head size, h half of it, X some
fused width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import kernels, mixture
from tinkex.engine.cuda.adapter_operand import BatchOperands, LoraAddend
from tinkex.engine.cuda.delta import WholeSequences
from tinkex.engine.cuda.flash import PackedFlash, Three
from tinkex.engine.cuda.layer_parts import (
    KeptLayer,
    Linears,
    Operands,
    Stream,
    attended,
    linear,
    members_of,
    norms_of,
    num_bytes_of,
    swiglu,
)
from tinkex.engine.cuda.small_passes import Recording, SmallPasses
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.attention import Attend, CachedAttend, PackedCausal
from tinkex.engine.model.decoder import Decoder, LayerWeights
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.sample.expert_pages import ExpertPages
from tinkex.engine.sample.paged import PagedCache
from tinkex.engine.sample.paged_decoder import PassAttend, RecordedSteps
from tinkex.engine.sample.states import StateCache


def can_fuse(config: ModelConfig) -> bool:
    """Whether the kernels know this model's shape; the plain decoder serves the others."""
    head = config.head_size
    biased = config.out_bias or config.mlp_bias
    plain = config.experts is None and config.delta is None and not config.sinks
    odd = config.wide_qk_norm or config.attn_gate or config.qkv_clip is not None
    return config.native and plain and not (biased or odd) and head in (32, 64, 128, 256)


class CudaDecoder(Decoder):
    """A frozen base model on a GPU, in bf16, with fp32 adapters and reductions.

    The layers here are dense, with plain attention; `families` has other mixers and MLPs.
    """

    batch_invariant = True
    keeps_pieces_apart = True
    leaf_keys: Container[str] | None = ("head",)
    records_steps = True
    """Whether a decode step can be recorded: none of its products waits for the host."""

    @cached_property
    def _small(self) -> SmallPasses:
        return SmallPasses(self)

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
        packed = attend if isinstance(attend, PackedCausal) else None
        if packed is None or lora is None or not lora.spans or not torch.is_grad_enabled():
            with torch.no_grad():
                batch = BatchOperands(lora, len(tokens_T), self.dtype)
                return self.infer(tokens_T, positions_T, attend, batch, routing)
        leaf = next(lora.spans[0].adapter.parameters())
        if (small := self._recorded(packed.lengths, lora, room)) is not None:
            small.fill(tokens_T, positions_T, packed.lengths)
            return _by_hand(small.forward, small.backward, leaf)
        batch = BatchOperands(lora, len(tokens_T), self.dtype)
        one = FusedPass(
            self, self.stream(positions_T, packed, batch, routing, trains=True), batch, room
        )
        return _by_hand(lambda: one.forward(tokens_T), one.backward, leaf)

    def _recorded(self, lengths: Sequence[int], lora: LoraBatch, room: float) -> Recording | None:
        """A recording that this training pass fits; None: run it plainly."""
        # A recording keeps all, and fills its rows up, so that sums over them are in another order.
        if lora.apart or self.config.kept_bytes(lengths, self.dtype.itemsize) > room:
            return None
        return self._small.find(sum(lengths), lengths, lora)

    def paged(
        self, cache: PagedCache, states: StateCache | None, experts: ExpertPages | None
    ) -> tuple[PassAttend, RecordedSteps | None]:
        """See `PagedDecoder`."""
        from tinkex.engine.cuda.paged import CudaPagedAttend, DecodeGraphs

        context = self.config.max_context_length
        graphs = DecodeGraphs(self, cache, states, experts, max_context=context)
        return CudaPagedAttend(cache, states), graphs if self.records_steps else None

    def groups_experts(self, lora: LoraBatch) -> bool:
        """Whether recorded steps may hold the adapters of experts: there are none here."""
        return False

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        # Not for autograd: who wants gradients calls `head_backward`, as the scorer does.
        return self.logits(hidden_ND, BatchOperands(lora, len(hidden_ND), self.dtype).get("head"))

    def logits(self, hidden_ND: Tensor, lora: LoraAddend | None) -> Tensor:
        """Logits in fp32 from bf16 operands: a bf16 logit would be off by up to 0.06."""
        return linear(hidden_ND, self.head_VD, None, lora, torch.float32)[0]

    def infer(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: Operands,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states without autograd, for adapters that are already in place."""
        stream = self.stream(positions_T, attend, lora, routing)
        x: Tensor = F.embedding(tokens_T, self.embed_VD)
        delta: Tensor | None = None
        for index in range(self.config.num_layers):
            x, delta = self.layer(index, x, delta, stream, lora)[:2]
        return kernels.add_rms_norm(x, delta, self.final_norm_D, self.config.norm_eps)[1]

    def stream(
        self,
        positions_T: Tensor,
        attend: Attend,
        lora: Operands,
        routing: Routing | None = None,
        *,
        trains: bool = False,
    ) -> Stream:
        """The inputs that all layers of a pass have in common."""
        packed = attend if isinstance(attend, PackedCausal) else None
        if packed is not None:
            stops: list[int] = []
            if isinstance(lora, BatchOperands) and lora.batch.apart:
                stops = [span.stop for span in lora.batch.spans]
            attend = PackedFlash(packed.lengths, self.config, self.device, stops)
        cached = isinstance(attend, CachedAttend)
        angles_Th = positions_T.to(torch.float32)[:, None] * self._inv_freq_h
        factor = self.config.rope.attention_factor
        return Stream(
            angles=(angles_Th.cos() * factor, angles_Th.sin() * factor),
            attention=attend,
            rows_T=None if cached else torch.arange(len(positions_T), device=self.device),
            trains=trains,
            packed=packed,
            routing=routing,
            whole=WholeSequences(packed.lengths, self.device)
            if packed is not None and self.config.delta is not None
            else None,
            members=members_of(lora, len(positions_T)) if self.config.experts is not None else (),
        )

    # ------------------------------------------------------------------------------ one layer

    def layer(
        self, index: int, x: Tensor, delta: Tensor | None, stream: Stream, lora: Operands
    ) -> tuple[Tensor, Tensor, KeptLayer]:
        """Run a layer on (residual, output of the layer below); keeps what its backward needs."""
        # A block's output is added to the residual by the norm behind it: one kernel for both, and
        # one pass over the rows less. So the last output is handed on, not added.
        w, eps, linears = self.layers[index], self.config.norm_eps, Linears(index, lora, {})
        x, y, rstd1 = kernels.add_rms_norm(x, delta, w.attn_norm, eps)
        fused = linears.forward("qkv", y, w.qkv, w.qkv_bias)
        mixed, attn, lse = self._mix(index, w, fused, stream)
        out = linears.forward("o", mixed, w.out, w.out_bias)
        x2, y, rstd2 = kernels.add_rms_norm(x, out, w.mlp_norm, eps)
        added, gate_up, experts = self._mlp(w, y, stream, linears)
        saved = KeptLayer(
            x, rstd1, fused, mixed, attn, lse, x2, rstd2, gate_up, experts, linears.inner
        )
        return x2, added, saved

    def _mix(
        self, index: int, w: LayerWeights, fused: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The input of the output linear; the rest as `KeptLayer` has it."""
        q, k, v = self._split(fused, norms_of(w), stream.angles, stream.target(index))
        attn, lse = attended(index, w, q, k, v, stream)
        return attn.flatten(1), None, lse

    def _split(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        target: tuple[Any, Any, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return kernels.rope(
            qkv, *angles, norms, config.norm_eps, heads=heads, kv_heads=kv_heads, cache=target
        )

    def _mlp(
        self, w: LayerWeights, y: Tensor, stream: Stream, linears: Linears
    ) -> tuple[Tensor, Tensor | None, mixture.KeptBlock | None]:
        """(what the MLP adds, fused gate_up of its dense part, what its experts keep)."""
        return *swiglu(y, w.gate_up, w.down, linears), None

    # ---------------------------------------------------------------------------- its backward

    def layer_again(self, index: int, s: KeptLayer, stream: Stream, lora: Operands) -> None:
        """Make what `slim` dropped, bit for bit."""
        w, linears = self.layers[index], Linears(index, lora, {})
        y = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
        s.fused_TX = linears.forward("qkv", y, w.qkv, w.qkv_bias)
        y = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
        self._mlp_again(w, y, s, stream, linears)

    def _mlp_again(
        self, w: LayerWeights, y: Tensor, s: KeptLayer, stream: Stream, linears: Linears
    ) -> None:
        s.gate_up_TX = linears.forward("gate_up", y, w.gate_up)

    def layer_backward(
        self, index: int, s: KeptLayer, dx: Tensor, stream: Stream, lora: BatchOperands
    ) -> None:
        """Turn dx, the gradient of the layer's output, into that of its input, in place.

        The adapters' gradients are gathered on the way. Consumes what the layer saved.
        """
        w, linears = self.layers[index], Linears(index, lora, s.inner)
        # dx is the gradient of a block's output and of the residual beside it: the norm's backward
        # adds what went through the block, and dx is that of the residual in front of it.
        dy = self._mlp_backward(w, s, dx, stream, linears)
        kernels.rms_norm_backward_(dx, dy, s.x2_TD, w.mlp_norm, s.rstd2_T)
        dmixed, dh = linears.backward("o", dx, w.out)
        linears.gather("o", s.mixed_TX, dx, dh)
        dfused = self._mix_backward(index, w, s, dmixed, stream)
        dy, dh = linears.backward("qkv", dfused, w.qkv)
        if dh is not None:  # only an adapter's gradient needs the normed input again
            y1 = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
            linears.gather("qkv", y1, dfused, dh)
        kernels.rms_norm_backward_(dx, dy, s.x_TD, w.attn_norm, s.rstd1_T)

    def _mlp_backward(
        self, w: LayerWeights, s: KeptLayer, dx: Tensor, stream: Stream, linears: Linears
    ) -> Tensor:
        """The gradient of the MLP's normed input."""
        assert s.gate_up_TX is not None
        dact, dh = linears.backward("down", dx, w.down)
        act = kernels.swiglu_backward_(dact, s.gate_up_TX)  # gate_up is its own gradient from here
        linears.gather("down", act, dx, dh)
        del act, dact  # each is as wide as half of gate_up, whose product comes next
        dy, dh = linears.backward("gate_up", s.gate_up_TX, w.gate_up)
        if dh is not None:
            y2 = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
            linears.gather("gate_up", y2, s.gate_up_TX, dh)
        return dy

    def _mix_backward(
        self, index: int, w: LayerWeights, s: KeptLayer, dmixed: Tensor, stream: Stream
    ) -> Tensor:
        """The gradient of the fused linear in front of the mixer."""
        assert s.fused_TX is not None
        assert s.lse_HT is not None
        # Made again and not kept: the fused product is kept for the norms' gradients anyway.
        q, k, v = self._split(s.fused_TX, norms_of(w), stream.angles, stream.target(index))
        attn, dattn = s.mixed_TX.view_as(q), dmixed.view_as(q)
        grads: Three = stream.attention.backward(index, dattn, q, k, v, attn, s.lse_HT)
        eps = self.config.norm_eps
        return kernels.rope_backward(*grads, s.fused_TX, *stream.angles, norms_of(w), eps)


@dataclass(slots=True)
class FusedPass:
    """All layers of a training pass: tokens in, hidden states out, and back again."""

    decoder: CudaDecoder
    stream: Stream
    lora: BatchOperands
    room: float = math.inf
    """Bytes that may be kept for the backward."""
    saved: list[Any] = field(default_factory=list)
    """By layer: all it keeps; that without its widest products; or (tuple) its two inputs."""
    final: tuple[Tensor, Tensor] | None = None
    used_bytes: int = 0

    def forward(self, tokens_T: Tensor) -> Tensor:
        decoder = self.decoder
        x: Tensor = F.embedding(tokens_T, decoder.embed_VD)
        delta: Tensor | None = None
        for index in range(decoder.config.num_layers):
            below = (x, delta)
            x, delta, layer = decoder.layer(index, x, delta, self.stream, self.lora)
            self.saved.append(self._kept(index, below, layer))
            del below, layer  # what is not kept is free before the next layer asks for memory
        x, hidden_TD, rstd_T = kernels.add_rms_norm(
            x, delta, decoder.final_norm_D, decoder.config.norm_eps
        )
        self.final = x, rstd_T
        return hidden_TD

    def backward(self, dhidden_TD: Tensor) -> None:
        """Add the adapters' gradients to where `lora` gathers them. Consumes what was saved."""
        decoder = self.decoder
        assert self.final is not None
        x_TD, rstd_T = self.final
        dx_TD = kernels.rms_norm_backward_(
            torch.zeros_like(x_TD), dhidden_TD, x_TD, decoder.final_norm_D, rstd_T
        )
        while self.saved:  # popped, so that a layer's memory is free as soon as it is done
            layer, index = self.saved.pop(), len(self.saved)
            if isinstance(layer, tuple):
                x, delta = layer
                layer = decoder.layer(index, x, delta, self.stream, self.lora)[2]
            elif not layer.wide_bytes():
                decoder.layer_again(index, layer, self.stream, self.lora)
            decoder.layer_backward(index, layer, dx_TD, self.stream, self.lora)
            del layer
        self.final = None

    def _kept(self, index: int, below: tuple[Tensor, Tensor | None], layer: Any) -> Any:
        """The part of a layer that there is room for, if the layers above keep as little as can be.

        Without its widest products a layer keeps a third and repeats a half of its work; with its
        inputs alone it repeats all of it, attention too, which in long sequences is most.
        """
        above = self.decoder.config.num_layers - index - 1
        whole, wide, bare = layer.num_bytes(), layer.wide_bytes(), num_bytes_of(*below)
        if self.used_bytes + whole + above * (whole - wide) <= self.room:
            self.used_bytes += whole
            return layer
        if self.used_bytes + whole - wide + above * bare <= self.room:
            # The widest products are made again from the normed inputs, bit for bit.
            self.used_bytes += whole - wide
            layer.slim()
            return layer
        self.used_bytes += bare
        return below


def _by_hand(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], leaf: Tensor
) -> Tensor:
    """A pass as one autograd node.

    The leaf is an argument only so that autograd calls the backward, which adds all gradients to
    the adapters' buffers itself.
    """
    out: Tensor = _ByHand.apply(forward, backward, leaf)  # type: ignore[no-untyped-call]
    return out


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, leaf: Tensor) -> Any:
        ctx.back = backward
        return forward()

    @staticmethod
    def backward(ctx: Any, dhidden_TD: Tensor) -> Any:
        ctx.back(dhidden_TD.contiguous())
        return None, None, None
