"""Mixtures, gated delta layers and attention sinks on CUDA: the fused decoder with other parts.

`FamilyDecoder` is a `CudaDecoder` whose layers may have another mixer or another MLP. Mixtures run
as grouped products (`mixture`), forward and backward by hand. Attention that the fused kernels do
not know (gated heads, heads rotated in part, norms over all heads) is prepared by the plain
decoder's own code, and a delta layer by `delta`; each is a small autograd graph that lives within
one layer's forward or backward, so a pass still keeps the layers' inputs and nothing of theirs.

The plain `Decoder` is the oracle. Letters: see `fused`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import kernels, mixture, mixture_kernels
from tinkex.engine.cuda.delta import GatedNorm, WholeSequences
from tinkex.engine.cuda.delta_rule import can_chunk, mix_packed, tensor_cores
from tinkex.engine.cuda.flash import PackedFlash
from tinkex.engine.cuda.fused import (
    CudaDecoder,
    FusedPass,
    Operands,
    Stream,
    _bytes,
    _linear,
    _linear_backward,
    _TrainingPass,
)
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.lora.operand import EXPERTS, BatchOperands
from tinkex.engine.model.attention import Attend, CachedAttend, PackedCausal
from tinkex.engine.model.decoder import _Layer
from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.mixture import mixture as plain_mixture
from tinkex.engine.model.shape import ModelConfig

_PARTS = ("qkv", "o", "gate_up", "down", "shared.gate_up", "shared.down")


def can_run(config: ModelConfig) -> bool:
    """Whether the kernels know this model's sizes; the plain decoder serves the others."""
    experts = config.experts
    sizes = [config.hidden_size, config.mlp_size]
    if experts is not None:
        sizes += [experts.size, experts.shared_size]
    # Grouped products read rows in pieces of 16 bytes.
    even = all(size % 8 == 0 for size in sizes)
    return config.native and not config.mlp_bias and config.head_size in (32, 64, 128, 256) and even


@dataclass(slots=True)
class _Saved:
    """What one layer keeps between forward and backward."""

    x_TD: Tensor
    rstd1_T: Tensor
    fused_TX: Tensor | None
    mixed_TX: Tensor
    lse_HT: Tensor | None
    x2_TD: Tensor
    rstd2_T: Tensor
    gate_up_TX: Tensor | None
    experts: mixture.KeptBlock | None
    inner: dict[str, Any]

    def num_bytes(self) -> int:
        return _bytes(self.x_TD, self.mixed_TX, self.lse_HT, self.x2_TD) + self.wide_bytes()

    def wide_bytes(self) -> int:
        """See `fused`; the experts' product too."""
        experts = None if self.experts is None else self.experts.gate_up_NX
        return _bytes(self.fused_TX, self.gate_up_TX, experts)

    def slim(self) -> None:
        self.fused_TX = self.gate_up_TX = None
        if self.experts is not None:
            self.experts.gate_up_NX = None


class FamilyDecoder(CudaDecoder):
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
        batch = BatchOperands(lora, len(tokens_T), self.dtype)
        trains = torch.is_grad_enabled() and lora is not None and bool(lora.spans)
        if isinstance(attend, PackedCausal):
            flash = PackedFlash(attend.lengths, self.config, self.device)
            if trains and lora is not None:
                leaf = next(lora.spans[0].adapter.parameters())
                rows_T = torch.arange(len(positions_T), device=self.device)
                angles = self._angles(positions_T)
                whole = self._whole(attend)
                stream = FamilyStream(angles, rows_T, flash, attend, whole, routing)
                one = FusedPass(self, stream, batch, room)
                out: Tensor = _TrainingPass.apply(one, tokens_T, leaf)  # type: ignore[no-untyped-call]
                return out
            with torch.no_grad():
                whole = self._whole(attend)
                return self._infer(tokens_T, positions_T, flash, batch, routing, whole)
        with torch.no_grad():
            return self._infer(tokens_T, positions_T, attend, batch, routing)

    def _whole(self, attend: PackedCausal) -> WholeSequences | None:
        """What delta layers want to know of a packed batch; None: there are none."""
        if self.config.delta is None:
            return None
        return WholeSequences(attend.lengths, self.device)

    def groups_experts(self, lora: LoraBatch) -> bool:
        """Whether the experts' adapters can be grouped; others take the plain way."""
        experts = self.config.experts
        return experts is None or all(
            mixture.can_stack(span.adapter, experts.count) for span in lora.spans
        )

    # ------------------------------------------------------------------------------ inference

    def infer(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: Operands,
        routing: Routing | None = None,
    ) -> Tensor:
        return self._infer(tokens_T, positions_T, attend, lora, routing)

    def _infer(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: Operands,
        routing: Routing | None,
        whole: WholeSequences | None = None,
    ) -> Tensor:
        eps = self.config.norm_eps
        angles = self._angles(positions_T)
        cache = attend if isinstance(attend, CachedAttend) else None
        rows_T = None if cache is not None else torch.arange(len(tokens_T), device=self.device)
        members = members_of(lora)
        x, delta = F.embedding(tokens_T, self.embed_VD), None
        for index, w in enumerate(self.layers):
            x, y, _ = kernels.add_rms_norm(x, delta, w.attn_norm, eps)
            fused = _linear(y, w.qkv, w.qkv_bias, lora.get(f"{index}.qkv"))[0]
            if w.delta is not None:
                mixer: Any = whole or attend
                mixed = mixer.delta(index, w.delta, w.delta.in_order(fused), eps)
            else:
                target = cache.target(index) if cache is not None else (None, None, rows_T)
                mixed = self._attended(index, w, fused, angles, target, attend)
            out = _linear(mixed, w.out, w.out_bias, lora.get(f"{index}.o"))[0]
            x, y, _ = kernels.add_rms_norm(x, out, w.mlp_norm, eps)
            delta = self._mlp(index, w, y, lora, members, routing)[0]
        return kernels.add_rms_norm(x, delta, self.final_norm_D, eps)[1]

    def _attended(
        self,
        index: int,
        w: _Layer,
        fused: Tensor,
        angles: tuple[Tensor, Tensor],
        target: tuple[Any, Any, Any],
        attend: Any,
    ) -> Tensor:
        """What an attention layer hands to its output linear."""
        gate = None
        if self._is_fast:
            q, k, v = self._split(fused, w, angles, target)
        else:
            q, k, v, gate = self._heads(w, fused, *angles)
            q, k, v = self._placed(q, k, v, target)
        mixed: Tensor = (
            attend(index, q, k, v) if w.sinks is None else attend(index, q, k, v, w.sinks)
        )
        return (mixed if gate is None else mixed * gate.sigmoid()).flatten(1)

    def _norm_heads(self, layer: _Layer, q_T: Tensor, k_T: Tensor) -> tuple[Tensor, Tensor]:
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
        self, q: Tensor, k: Tensor, v: Tensor, target: tuple[Any, Any, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads that are ready, with keys and values where the cache wants them."""
        config = self.config
        ready = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
        still = torch.ones(len(q), config.head_size // 2, device=q.device)
        return kernels.rope(
            ready,
            still,
            torch.zeros_like(still),
            None,
            config.norm_eps,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            cache=target,
        )

    def _delta_mixed(
        self, index: int, w: DeltaWeights, fused: Tensor, attend: PackedCausal
    ) -> Tensor:
        """What a delta layer hands to its output linear, differentiable: by the rule in chunks."""
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

    def _mlp(
        self,
        index: int,
        w: _Layer,
        y: Tensor,
        lora: Operands,
        members: Sequence[mixture.AdapterTokens],
        routing: Routing | None,
    ) -> tuple[Tensor, Tensor | None, mixture.KeptBlock | None, dict[str, Any]]:
        """(what the MLP adds, fused gate_up of its dense part, of its experts, inner products)."""
        inner: dict[str, Any] = {}
        if w.mixture is None:
            gate_up, inner["gate_up"] = _linear(y, w.gate_up, None, lora.get(f"{index}.gate_up"))
            act = kernels.swiglu(gate_up)
            delta, inner["down"] = _linear(act, w.down, None, lora.get(f"{index}.down"))
            return delta, gate_up, None, inner
        experts, block = self.config.experts, w.mixture
        assert experts is not None
        if (plain := self._plain_batch(lora)) is not None:
            return plain_mixture(experts, block, index, y, plain, routing), None, None, inner
        delta, saved = mixture.forward(experts, block, index, y, members, routing)
        if block.shared_gate_1D is None:
            return delta, None, saved, inner
        assert block.shared_gate_up is not None
        assert block.shared_down is not None
        up, down = f"{index}.shared.gate_up", f"{index}.shared.down"
        gate_up, inner["shared.gate_up"] = _linear(y, block.shared_gate_up, None, lora.get(up))
        act = kernels.swiglu(gate_up)
        out, inner["shared.down"] = _linear(act, block.shared_down, None, lora.get(down))
        gate_T1 = torch.sigmoid(mixture_kernels.row_dot(y, block.shared_gate_1D))
        return delta + (out * gate_T1).to(delta.dtype), gate_up, saved, inner

    def _plain_batch(self, lora: Operands) -> LoraBatch | None:
        """The batch itself where its experts' adapters cannot be grouped."""
        if not isinstance(lora, BatchOperands) or self.groups_experts(lora.batch):
            return None
        return lora.batch

    # ------------------------------------------------------------------------------- training

    def train_layer(  # type: ignore[override]
        self, index: int, x: Tensor, delta: Tensor | None, stream: FamilyStream, lora: Operands
    ) -> tuple[Tensor, Tensor, _Saved]:
        w, eps = self.layers[index], self.config.norm_eps
        x, y, rstd1 = kernels.add_rms_norm(x, delta, w.attn_norm, eps)
        fused, inner_qkv = _linear(y, w.qkv, w.qkv_bias, lora.get(f"{index}.qkv"))
        lse = None
        if w.delta is not None:
            assert stream.whole is not None
            mixed = stream.whole.delta(index, w.delta, w.delta.in_order(fused), eps)
        else:
            q, k, v, gate = self._qkv(w, fused, stream)
            attn, lse = stream.attention.forward(index, q, k, v, w.sinks)
            mixed = (attn if gate is None else attn * gate.sigmoid()).flatten(1)
            mixed = attn.flatten(1) if gate is None else torch.cat([mixed, attn.flatten(1)], 1)
        width = w.out.shape[1]
        out, inner_o = _linear(
            mixed[:, :width].contiguous(), w.out, w.out_bias, lora.get(f"{index}.o")
        )
        x2, y2, rstd2 = kernels.add_rms_norm(x, out, w.mlp_norm, eps)
        added, gate_up, saved, inner = self._mlp(
            index, w, y2, lora, members_of(lora), stream.routing
        )
        inner |= {"qkv": inner_qkv, "o": inner_o}
        kept = _Saved(x, rstd1, fused, mixed, lse, x2, rstd2, gate_up, saved, inner)
        return x2, added, kept

    def _qkv(
        self, w: _Layer, fused: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if self._is_fast:
            return *self._split(fused, w, stream.angles, (None, None, stream.rows_T)), None
        q, k, v, gate = self._heads(w, fused, *stream.angles)
        return q.contiguous(), k.contiguous(), v.contiguous(), gate

    def train_layer_again(  # type: ignore[override]
        self, index: int, s: _Saved, lora: Operands
    ) -> None:
        w = self.layers[index]
        y = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
        s.fused_TX = _linear(y, w.qkv, w.qkv_bias, lora.get(f"{index}.qkv"))[0]
        y = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
        if w.mixture is None:
            s.gate_up_TX = _linear(y, w.gate_up, None, lora.get(f"{index}.gate_up"))[0]
        elif w.mixture.shared_gate_up is not None:
            shared = lora.get(f"{index}.shared.gate_up")
            s.gate_up_TX = _linear(y, w.mixture.shared_gate_up, None, shared)[0]
        if s.experts is not None:
            assert self.config.experts is not None
            assert w.mixture is not None
            s.experts.gate_up_NX = mixture.gate_up(
                self.config.experts, w.mixture, index, y, s.experts.sorted, members_of(lora)
            )[0]

    def train_layer_backward(  # type: ignore[override]
        self, index: int, s: _Saved, dx: Tensor, stream: FamilyStream, lora: BatchOperands
    ) -> None:
        w = self.layers[index]
        assert s.fused_TX is not None
        ops = {name: lora.get(f"{index}.{name}") for name in _PARTS}

        def gather(name: str, x: Tensor, dy: Tensor, dh: Any) -> None:
            if (op := ops[name]) is not None:
                op.gather(x, s.inner[name], dy, dh, lora.grads(f"{index}.{name}"))

        given = Routing() if stream.routing is None else Routing(stream.routing.given)
        dy = self._mlp_backward(index, w, s, dx, ops, gather, lora, given)
        kernels.rms_norm_backward_(dx, dy, s.x2_TD, w.mlp_norm, s.rstd2_T)
        width = w.out.shape[1]
        dmixed, dh = _linear_backward(dx, w.out, ops["o"])
        gather("o", s.mixed_TX[:, :width].contiguous(), dx, dh)
        dfused = self._mixer_backward(index, w, s, dmixed, stream)
        dy, dh = _linear_backward(dfused, w.qkv, ops["qkv"])
        if dh is not None:
            y1 = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
            gather("qkv", y1, dfused, dh)
        kernels.rms_norm_backward_(dx, dy, s.x_TD, w.attn_norm, s.rstd1_T)

    def _mlp_backward(
        self,
        index: int,
        w: _Layer,
        s: _Saved,
        dx: Tensor,
        ops: dict[str, Any],
        gather: Any,
        lora: BatchOperands,
        routing: Routing,
    ) -> Tensor:
        """The gradient of the MLP's normed input."""
        if w.mixture is None:
            assert s.gate_up_TX is not None
            dact, dh = _linear_backward(dx, w.down, ops["down"])
            act = kernels.swiglu_backward_(dact, s.gate_up_TX)
            gather("down", act, dx, dh)
            dy, dh = _linear_backward(s.gate_up_TX, w.gate_up, ops["gate_up"])
            if dh is not None:
                y2 = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
                gather("gate_up", y2, s.gate_up_TX, dh)
            return dy
        experts, block = self.config.experts, w.mixture
        assert experts is not None
        y2 = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
        if (plain := self._plain_batch(lora)) is not None:
            for span in plain.spans:
                span.adapter.start_grad()
            with torch.enable_grad():
                leaf = y2.detach().requires_grad_()
                out = plain_mixture(experts, block, index, leaf, plain, routing)
            out.backward(dx)
            assert leaf.grad is not None
            return leaf.grad
        assert s.experts is not None
        members = members_of(lora, with_grads=True)
        dy = mixture.backward(experts, block, index, s.experts, y2, dx, members)
        if block.shared_gate_1D is None:
            return dy
        assert s.gate_up_TX is not None
        assert block.shared_gate_up is not None
        assert block.shared_down is not None
        gate_T1 = torch.sigmoid(mixture_kernels.row_dot(y2, block.shared_gate_1D))
        dout = (dx * gate_T1).to(dx.dtype)
        dact, dh = _linear_backward(dout, block.shared_down, ops["shared.down"])
        # The shared output again: its product with dx is the gate's slope.
        act = kernels.swiglu(s.gate_up_TX)
        out = _linear(act, block.shared_down, None, ops["shared.down"])[0]
        dgate_T1 = (dx.float() * out.float()).sum(-1, keepdim=True) * gate_T1 * (1 - gate_T1)
        kernels.swiglu_backward_(dact, s.gate_up_TX)
        gather("shared.down", act, dout, dh)
        more, dh = _linear_backward(s.gate_up_TX, block.shared_gate_up, ops["shared.gate_up"])
        gather("shared.gate_up", y2, s.gate_up_TX, dh)
        return dy.add_(more).add_((dgate_T1 * block.shared_gate_1D.float()).to(dy.dtype))

    def _mixer_backward(
        self, index: int, w: _Layer, s: _Saved, dmixed: Tensor, stream: FamilyStream
    ) -> Tensor:
        """The gradient of the fused linear in front of the mixer."""
        assert s.fused_TX is not None
        if w.delta is not None:
            with torch.enable_grad(), tensor_cores():
                leaf = s.fused_TX.detach().requires_grad_()
                mixed = self._delta_mixed(index, w.delta, leaf, stream.packed)
                return torch.autograd.grad(mixed, leaf, dmixed)[0].contiguous()
        if self._is_fast:
            q, k, v, _ = self._qkv(w, s.fused_TX, stream)
            attn = s.mixed_TX.view(len(q), *q.shape[1:])
            assert s.lse_HT is not None
            grads = stream.attention.backward(index, dmixed.view_as(attn), q, k, v, attn, s.lse_HT)
            return kernels.rope_backward(
                *grads, s.fused_TX, *stream.angles, _norms(w), self.config.norm_eps
            )
        with torch.enable_grad():
            leaf = s.fused_TX.detach().requires_grad_()
            *made, gate = self._heads(w, leaf, *stream.angles)
        q, k, v = (t.detach().contiguous() for t in made)
        assert s.lse_HT is not None
        attn = s.mixed_TX[:, -q[0].numel() :].reshape(q.shape).contiguous()
        dattn = dmixed.view_as(attn)
        dgates = []
        if gate is not None:
            open_THd = gate.detach().float().sigmoid()
            slope_THd = dattn.float() * attn.float() * open_THd * (1 - open_THd)
            made, dgates = [*made, gate], [slope_THd.to(gate.dtype)]
            dattn = (dattn * open_THd).to(dattn.dtype)
        three = stream.attention.backward(index, dattn.contiguous(), q, k, v, attn, s.lse_HT)
        return torch.autograd.grad(made, leaf, [*three, *dgates])[0].contiguous()


@dataclass(frozen=True, slots=True)
class FamilyStream(Stream):
    """One packed batch, with what delta layers and routers want to know of it."""

    packed: PackedCausal
    whole: WholeSequences | None
    routing: Routing | None


def members_of(lora: Operands, *, with_grads: bool = False) -> list[mixture.AdapterTokens]:
    """Whose tokens are where, for the experts' adapters."""
    if isinstance(lora, BatchOperands):
        return [
            mixture.AdapterTokens(a, b, adapter, flat, grad)
            for a, b, adapter, flat, grad in lora.members(with_grads=with_grads)
        ]
    found: Any = lora.get(EXPERTS)
    if found is None:
        return []
    adapter, flat_P, mask_T = found.of_row()
    return [mixture.AdapterTokens(0, len(mask_T), adapter, flat_P, None, mask_T)]


def _norms(w: _Layer) -> tuple[Tensor, Tensor] | None:
    return None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
