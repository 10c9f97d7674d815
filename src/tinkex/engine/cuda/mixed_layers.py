"""Mixtures, gated delta layers and attention sinks on CUDA: the fused decoder with other parts.

`MixedLayerDecoder` is a `CudaDecoder` whose layers may have another mixer or another MLP. Mixtures
run as grouped products (`mixture`), forward and backward by hand. Attention that the fused kernels
do not know (gated heads, heads rotated in part, norms over all heads) is prepared by the plain
decoder's own code, and a delta layer by `delta`; each is a small autograd graph that lives within
one layer's forward or backward, so a pass still keeps the layers' inputs and nothing of theirs.

The plain `Decoder` is the oracle. Letters: see `fused`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.cuda import kernels, mixture, mixture_kernels
from tinkex.engine.cuda.adapter_operand import BatchOperands
from tinkex.engine.cuda.delta import GatedNorm
from tinkex.engine.cuda.delta_rule import can_chunk, mix_packed, tensor_cores
from tinkex.engine.cuda.fused import CudaDecoder
from tinkex.engine.cuda.layer_parts import KeptLayer, Linears, Operands, Stream, attended, swiglu
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import LayerWeights
from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.mixture import mixture as plain_mixture
from tinkex.engine.model.shape import ModelConfig


def can_run(config: ModelConfig) -> bool:
    """Whether the kernels know this model's sizes; the plain decoder serves the others."""
    experts = config.experts
    sizes = [config.hidden_size, config.mlp_size]
    if experts is not None:
        sizes += [experts.size, experts.shared_size]
    # Grouped products read rows in pieces of 16 bytes.
    even = all(size % 8 == 0 for size in sizes)
    return config.native and not config.mlp_bias and config.head_size in (32, 64, 128, 256) and even


class MixedLayerDecoder(CudaDecoder):
    """A frozen base model of any native family on a GPU."""

    keeps_pieces_apart = False  # the backward of routers and delta layers is torch's
    leaf_keys = None  # plain mixtures go through autograd

    @property
    def records_steps(self) -> bool:  # type: ignore[override]
        """Grouped products read their rows' bounds on the card from Hopper on; before, on the
        host."""
        capability = torch.cuda.get_device_capability(self.device)
        return self.config.experts is None or capability[0] >= 9

    @property
    def _is_fast(self) -> bool:
        """Whether the fused kernel prepares queries and keys."""
        config = self.config
        odd = config.attn_gate or config.wide_qk_norm or config.qkv_clip is not None
        return not odd and config.rotary_size in (None, config.head_size)

    def _recorded(self, lengths: Sequence[int], lora: LoraBatch, room: float) -> None:
        """None of these passes are: small_passes knows no routers and no states."""

    def groups_experts(self, lora: LoraBatch) -> bool:
        """Whether the experts' adapters can be grouped; others take the plain way."""
        experts = self.config.experts
        return experts is None or all(
            mixture.can_stack(span.adapter, experts.count) for span in lora.spans
        )

    # ------------------------------------------------------------------------------ mixers

    def _mix(
        self, index: int, w: LayerWeights, fused: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if w.delta is not None:
            mixer, eps = stream.whole or stream.attention, self.config.norm_eps
            return mixer.delta(index, w.delta, w.delta.in_order(fused), eps), None, None
        if self._is_fast:
            return super()._mix(index, w, fused, stream)
        q, k, v, gate = self._heads(w, fused, *stream.angles)
        attn, lse = attended(index, w, *self._placed(index, q, k, v, stream), stream)
        if gate is None:
            return attn.flatten(1), None, lse
        return (attn * gate.sigmoid()).flatten(1), attn, lse

    def _norm_heads(self, layer: LayerWeights, q_T: Tensor, k_T: Tensor) -> tuple[Tensor, Tensor]:
        """By the kernel that takes a row at a time: torch's order of sums follows their number."""
        if torch.is_grad_enabled():
            return super()._norm_heads(layer, q_T, k_T)
        assert layer.q_norm is not None
        assert layer.k_norm is not None

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return kernels.add_rms_norm(rows, None, weight, self.config.norm_eps)[1].view(x.shape)

        return norm(q_T, layer.q_norm), norm(k_T, layer.k_norm)

    def _placed(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads that are ready, with keys and values where a cache wants them."""
        if stream.rows_T is not None:
            return q.contiguous(), k.contiguous(), v.contiguous()
        # The kernel that writes to caches also rotates: here by nothing.
        ready = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
        still = torch.ones(len(q), self.config.head_size // 2, device=q.device)
        return self._split(ready, None, (still, torch.zeros_like(still)), stream.target(index))

    def _delta_mixed(
        self, index: int, w: DeltaWeights, fused: Tensor, attend: PackedCausal
    ) -> Tensor:
        """The input of a delta layer's output linear, differentiable: by the rule in chunks."""
        eps, delta, fused = self.config.norm_eps, w.config, w.in_order(fused)
        sizes = (delta.channels, delta.values, delta.value_heads, delta.value_heads)
        x_TC, z_T, b_TH, a_TH = fused.split(sizes, dim=1)
        gates = w.gates(b_TH, a_TH)
        if can_chunk(delta):
            out_THv = mix_packed(w, x_TC, *gates, attend.lengths)
        else:
            out_THv = attend.recur(index, w, x_TC, *gates)
        mixed: Tensor = GatedNorm.apply(out_THv, z_T, w.norm_v, eps)  # type: ignore[no-untyped-call]
        return mixed

    def _mix_backward(
        self, index: int, w: LayerWeights, s: KeptLayer, dmixed: Tensor, stream: Stream
    ) -> Tensor:
        assert s.fused_TX is not None
        if w.delta is not None:
            assert stream.packed is not None
            with torch.enable_grad(), tensor_cores():
                leaf = s.fused_TX.detach().requires_grad_()
                mixed = self._delta_mixed(index, w.delta, leaf, stream.packed)
                return torch.autograd.grad(mixed, leaf, dmixed)[0].contiguous()
        if self._is_fast:
            return super()._mix_backward(index, w, s, dmixed, stream)
        # The way from the fused product to the heads is torch's; only attention itself is not.
        with torch.enable_grad():
            leaf = s.fused_TX.detach().requires_grad_()
            *made, gate = self._heads(w, leaf, *stream.angles)
        q, k, v = (t.detach().contiguous() for t in made)
        assert s.lse_HT is not None
        attn = s.mixed_TX.view_as(q) if s.attn_THd is None else s.attn_THd
        dattn, dgates = dmixed.view_as(q), list[Tensor]()
        if gate is not None:
            # mixed = attn * sigmoid(gate): the gate's slope here, attention's goes on below.
            open_THd = gate.detach().float().sigmoid()
            slope_THd = dattn.float() * attn.float() * open_THd * (1 - open_THd)
            made, dgates = [*made, gate], [slope_THd.to(gate.dtype)]
            dattn = (dattn * open_THd).to(dattn.dtype)
        three = stream.attention.backward(index, dattn.contiguous(), q, k, v, attn, s.lse_HT)
        return torch.autograd.grad(made, leaf, [*three, *dgates])[0].contiguous()

    # ------------------------------------------------------------------------------ MLPs

    def _mlp(
        self, w: LayerWeights, y: Tensor, stream: Stream, linears: Linears
    ) -> tuple[Tensor, Tensor | None, mixture.KeptBlock | None]:
        experts, block, routing = self.config.experts, w.mixture, stream.routing
        if block is None or experts is None:
            return super()._mlp(w, y, stream, linears)
        if (plain := self._plain_batch(linears.lora)) is not None:
            return plain_mixture(experts, block, linears.index, y, plain, routing), None, None
        routed = mixture.Block(experts, block, linears.index, stream.members)
        delta, saved = routed.forward(y, routing)
        if block.shared_gate_1D is None:
            return delta, None, saved
        assert block.shared_gate_up is not None
        assert block.shared_down is not None
        out, gate_up = swiglu(y, block.shared_gate_up, block.shared_down, linears, "shared.")
        # cuBLAS may sum a product with one column in an order that follows the number of rows.
        gate_T1 = torch.sigmoid(mixture_kernels.row_dot(y, block.shared_gate_1D))
        return delta + (out * gate_T1).to(delta.dtype), gate_up, saved

    def _plain_batch(self, lora: Operands) -> LoraBatch | None:
        """The batch itself where its experts' adapters cannot be grouped."""
        if not isinstance(lora, BatchOperands) or self.groups_experts(lora.batch):
            return None
        return lora.batch

    def _mlp_again(
        self, w: LayerWeights, y: Tensor, s: KeptLayer, stream: Stream, linears: Linears
    ) -> None:
        experts, block = self.config.experts, w.mixture
        if block is None:
            super()._mlp_again(w, y, s, stream, linears)
            return
        if block.shared_gate_up is not None:
            s.gate_up_TX = linears.forward("shared.gate_up", y, block.shared_gate_up)
        if s.experts is not None:
            assert experts is not None
            again = mixture.Block(experts, block, linears.index, stream.members)
            s.experts.gate_up_NX = again.gate_up(y, s.experts.sorted)[0]

    def _mlp_backward(
        self, w: LayerWeights, s: KeptLayer, dx: Tensor, stream: Stream, linears: Linears
    ) -> Tensor:
        if w.mixture is None:
            return super()._mlp_backward(w, s, dx, stream, linears)
        experts, block = self.config.experts, w.mixture
        assert experts is not None
        y2 = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
        if (plain := self._plain_batch(linears.lora)) is not None:
            # Not the pass's own record: this is the forward again, and would be counted twice.
            routing = None if stream.routing is None else Routing(stream.routing.given)
            for span in plain.spans:
                span.adapter.start_grad()
            with torch.enable_grad():
                leaf = y2.detach().requires_grad_()
                out = plain_mixture(experts, block, linears.index, leaf, plain, routing)
            out.backward(dx)
            assert leaf.grad is not None
            return leaf.grad
        assert s.experts is not None
        routed = mixture.Block(experts, block, linears.index, stream.members)
        dy = routed.backward(s.experts, y2, dx)
        if block.shared_gate_1D is None:
            return dy
        assert s.gate_up_TX is not None
        assert block.shared_gate_up is not None
        assert block.shared_down is not None
        gate_T1 = torch.sigmoid(mixture_kernels.row_dot(y2, block.shared_gate_1D))
        dout = (dx * gate_T1).to(dx.dtype)
        dact, dh = linears.backward("shared.down", dout, block.shared_down)
        # The shared output again: its product with dx is the gate's slope.
        act = kernels.swiglu(s.gate_up_TX)
        out = linears.forward("shared.down", act, block.shared_down)
        dgate_T1 = (dx.float() * out.float()).sum(-1, keepdim=True) * gate_T1 * (1 - gate_T1)
        kernels.swiglu_backward_(dact, s.gate_up_TX)
        linears.gather("shared.down", act, dout, dh)
        more, dh = linears.backward("shared.gate_up", s.gate_up_TX, block.shared_gate_up)
        linears.gather("shared.gate_up", y2, s.gate_up_TX, dh)
        return dy.add_(more).add_((dgate_T1 * block.shared_gate_1D.float()).to(dy.dtype))
