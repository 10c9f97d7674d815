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
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import kernels
from tinkex.engine.cuda.flash import PackedFlash
from tinkex.engine.cuda.product import product
from tinkex.engine.cuda.small_passes import RecordedPass, SmallPasses
from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.lora.operand import BatchOperands, LoraAddend, LoraOperand
from tinkex.engine.model.attention import Attend, CachedAttend, PackedCausal
from tinkex.engine.model.base_model import ModelConfig
from tinkex.engine.model.decoder import Decoder, _Layer
from tinkex.engine.model.mixture import Routing

Operands = BatchOperands | Mapping[str, LoraAddend]
LINEARS = ("qkv", "o", "gate_up", "down")


def can_fuse(config: ModelConfig) -> bool:
    """Whether the kernels know this model's shape; the plain decoder serves the others."""
    head = config.head_size
    biased = config.out_bias or config.mlp_bias
    plain = config.experts is None and config.delta is None and not config.sinks
    odd = config.wide_qk_norm or config.attn_gate or config.qkv_clip is not None
    return config.native and plain and not (biased or odd) and head in (32, 64, 128, 256)


@dataclass(slots=True)
class _Saved:
    """What one layer keeps between forward and backward."""

    x_TD: Tensor
    rstd1_T: Tensor
    qkv_TX: Tensor | None
    attn_THd: Tensor
    lse_HT: Tensor
    x2_TD: Tensor
    rstd2_T: Tensor
    gate_up_TX: Tensor | None
    inner: dict[str, Any]

    def num_bytes(self) -> int:
        rest = _bytes(self.x_TD, self.attn_THd, self.lse_HT, self.x2_TD)
        return rest + self.wide_bytes()

    def wide_bytes(self) -> int:
        """What the two widest products take, which can be made from the rest."""
        return _bytes(self.qkv_TX, self.gate_up_TX)

    def slim(self) -> None:
        self.qkv_TX = self.gate_up_TX = None


@dataclass(frozen=True, slots=True)
class Stream:
    """One packed batch: where each token stands, and how it attends to those before it."""

    angles: tuple[Tensor, Tensor]
    """Cosines and sines, [T, h]."""
    rows_T: Tensor
    """0, 1, 2, ...: where each row's key and value go."""
    attention: PackedFlash


class CudaDecoder(Decoder):
    """A frozen base model on a GPU, in bf16, with fp32 adapters and reductions."""

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
        trains = torch.is_grad_enabled() and lora is not None and bool(lora.spans)
        if trains and isinstance(attend, PackedCausal):
            assert lora is not None
            return self._train(tokens_T, positions_T, attend, lora, room)
        with torch.no_grad():
            if isinstance(attend, PackedCausal):
                attend = PackedFlash(attend.lengths, self.config, self.device)
            batch = BatchOperands(lora, len(tokens_T), self.dtype)
            return self.infer(tokens_T, positions_T, attend, batch)

    def _train(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: PackedCausal,
        lora: LoraBatch,
        room: float,
    ) -> Tensor:
        leaf = next(lora.spans[0].adapter.parameters())
        lengths = attend.lengths
        fits = self.config.kept_bytes(lengths, self.dtype.itemsize) <= room
        # A recording fills its rows up, so the sums over them are in another order.
        fits &= not lora.apart
        if fits and (small := self._small.find(len(tokens_T), lengths, lora)) is not None:
            small.fill(tokens_T, positions_T, lengths)
            out: Tensor = RecordedPass.apply(small, leaf)  # type: ignore[no-untyped-call]
            return out
        flash = PackedFlash(lengths, self.config, self.device, attend.pieces)
        stream = self.stream(positions_T, flash)
        one = FusedPass(self, stream, BatchOperands(lora, len(tokens_T), self.dtype), room)
        out = _TrainingPass.apply(one, tokens_T, leaf)  # type: ignore[no-untyped-call]
        return out

    def groups_experts(self, lora: LoraBatch) -> bool:
        """Whether recorded steps may hold the adapters of experts: there are none here."""
        return False

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        if torch.is_grad_enabled() and hidden_ND.requires_grad:
            return super().head(hidden_ND, lora)
        return self.logits(hidden_ND, BatchOperands(lora, len(hidden_ND), self.dtype).get("head"))

    def logits(self, hidden_ND: Tensor, lora: LoraAddend | None) -> Tensor:
        """Logits in fp32 from bf16 operands: a bf16 logit would be off by up to 0.06."""
        return _linear(hidden_ND, self.head_VD, None, lora, torch.float32)[0]

    # ------------------------------------------------------------------------------ inference

    def infer(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: Operands,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states without autograd, for adapters that are already in place."""
        eps = self.config.norm_eps
        angles = self._angles(positions_T)
        cache = attend if isinstance(attend, CachedAttend) else None
        rows_T = None if cache is not None else torch.arange(len(tokens_T), device=self.device)

        def linear(x_TX: Tensor, weight: Tensor, bias: Tensor | None, key: str) -> Tensor:
            return _linear(x_TX, weight, bias, lora.get(key))[0]

        x, delta = F.embedding(tokens_T, self.embed_VD), None
        for index, w in enumerate(self.layers):
            x, y, _ = kernels.add_rms_norm(x, delta, w.attn_norm, eps)
            qkv = linear(y, w.qkv, w.qkv_bias, f"{index}.qkv")
            target = cache.target(index) if cache is not None else (None, None, rows_T)
            q, k, v = self._split(qkv, w, angles, target)
            mixed = attend(index, q, k, v).flatten(1)
            out = linear(mixed, w.out, None, f"{index}.o")
            x, y, _ = kernels.add_rms_norm(x, out, w.mlp_norm, eps)
            act = kernels.swiglu(linear(y, w.gate_up, None, f"{index}.gate_up"))
            delta = linear(act, w.down, None, f"{index}.down")
        return kernels.add_rms_norm(x, delta, self.final_norm_D, eps)[1]

    def _angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_Th = positions_T.to(torch.float32)[:, None] * self._inv_freq_h
        factor = self.config.rope.attention_factor
        return angles_Th.cos() * factor, angles_Th.sin() * factor

    def _split(
        self,
        qkv: Tensor,
        w: _Layer,
        angles: tuple[Tensor, Tensor],
        target: tuple[Any, Any, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return kernels.rope(
            qkv,
            *angles,
            _norms(w),
            config.norm_eps,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            cache=target,
        )

    # ------------------------------------------------------------------------------- training

    def stream(self, positions_T: Tensor, attention: PackedFlash) -> Stream:
        rows_T = torch.arange(len(positions_T), device=self.device)
        return Stream(self._angles(positions_T), rows_T, attention)

    def train_layer(
        self, index: int, x: Tensor, delta: Tensor | None, stream: Stream, lora: Operands
    ) -> tuple[Tensor, Tensor, _Saved]:
        """One layer on (residual, what the layer below adds to it), and what its backward needs."""
        w, eps, inner = self.layers[index], self.config.norm_eps, {}
        x, y, rstd1 = kernels.add_rms_norm(x, delta, w.attn_norm, eps)
        qkv, inner["qkv"] = _linear(y, w.qkv, w.qkv_bias, lora.get(f"{index}.qkv"))
        q, k, v = self._split(qkv, w, stream.angles, (None, None, stream.rows_T))
        attn, lse = stream.attention.forward(index, q, k, v)
        out, inner["o"] = _linear(attn.flatten(1), w.out, None, lora.get(f"{index}.o"))
        x2, y2, rstd2 = kernels.add_rms_norm(x, out, w.mlp_norm, eps)
        gate_up, inner["gate_up"] = _linear(y2, w.gate_up, None, lora.get(f"{index}.gate_up"))
        act = kernels.swiglu(gate_up)
        delta, inner["down"] = _linear(act, w.down, None, lora.get(f"{index}.down"))
        return x2, delta, _Saved(x, rstd1, qkv, attn, lse, x2, rstd2, gate_up, inner)

    def train_layer_again(self, index: int, s: _Saved, lora: Operands) -> None:
        """Make what `slim` dropped, bit for bit."""
        w = self.layers[index]
        y = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
        s.qkv_TX = _linear(y, w.qkv, w.qkv_bias, lora.get(f"{index}.qkv"))[0]
        y = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
        s.gate_up_TX = _linear(y, w.gate_up, None, lora.get(f"{index}.gate_up"))[0]

    def train_layer_backward(
        self, index: int, s: _Saved, dx: Tensor, stream: Stream, lora: BatchOperands
    ) -> None:
        """Turn dx, the gradient of the layer's output, into that of its input, in place.

        The adapters' gradients are gathered on the way. Consumes what the layer saved.
        """
        w, eps = self.layers[index], self.config.norm_eps
        assert s.qkv_TX is not None
        assert s.gate_up_TX is not None
        ops = {name: lora.get(f"{index}.{name}") for name in LINEARS}
        apart = lora.batch.apart

        def gather(name: str, x: Tensor, dy: Tensor, dh: Any) -> None:
            if (op := ops[name]) is not None:
                op.gather(x, s.inner[name], dy, dh, lora.grads(f"{index}.{name}"))

        dact, dh = _linear_backward(dx, w.down, ops["down"], apart=apart)
        act = kernels.swiglu_backward_(dact, s.gate_up_TX)  # gate_up is its own gradient from here
        gather("down", act, dx, dh)
        del act, dact
        dy, dh = _linear_backward(s.gate_up_TX, w.gate_up, ops["gate_up"], apart=apart)
        if dh is not None:
            y2 = kernels.rms_norm_again(s.x2_TD, w.mlp_norm, s.rstd2_T)
            gather("gate_up", y2, s.gate_up_TX, dh)
        kernels.rms_norm_backward_(dx, dy, s.x2_TD, w.mlp_norm, s.rstd2_T)
        dattn, dh = _linear_backward(dx, w.out, ops["o"], apart=apart)
        gather("o", s.attn_THd.flatten(1), dx, dh)
        q, k, v = self._split(s.qkv_TX, w, stream.angles, (None, None, stream.rows_T))
        grads_qkv = stream.attention.backward(
            index, dattn.view_as(s.attn_THd), q, k, v, s.attn_THd, s.lse_HT
        )
        dqkv = kernels.rope_backward(*grads_qkv, s.qkv_TX, *stream.angles, _norms(w), eps)
        dy, dh = _linear_backward(dqkv, w.qkv, ops["qkv"], apart=apart)
        if dh is not None:
            y1 = kernels.rms_norm_again(s.x_TD, w.attn_norm, s.rstd1_T)
            gather("qkv", y1, dqkv, dh)
        kernels.rms_norm_backward_(dx, dy, s.x_TD, w.attn_norm, s.rstd1_T)


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
            x, delta, layer = decoder.train_layer(index, x, delta, self.stream, self.lora)
            self.saved.append(self._kept(index, below, layer))
            del below, layer
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
        while self.saved:
            layer, index = self.saved.pop(), len(self.saved)
            if isinstance(layer, tuple):
                x, delta = layer
                layer = decoder.train_layer(index, x, delta, self.stream, self.lora)[2]
            elif not layer.wide_bytes():
                decoder.train_layer_again(index, layer, self.lora)
            decoder.train_layer_backward(index, layer, dx_TD, self.stream, self.lora)
            del layer
        self.final = None

    def _kept(self, index: int, below: tuple[Tensor, Tensor | None], layer: Any) -> Any:
        """What of a layer there is room for, if the layers above keep as little as they can.

        Without its widest products a layer keeps a third and repeats a half of its work; with its
        inputs alone it repeats all of it, attention too, which in long sequences is most.
        """
        above = self.decoder.config.num_layers - index - 1
        whole, wide, bare = layer.num_bytes(), layer.wide_bytes(), _bytes(*below)
        if self.used_bytes + whole + above * (whole - wide) <= self.room:
            self.used_bytes += whole
            return layer
        if self.used_bytes + whole - wide + above * bare <= self.room:
            self.used_bytes += whole - wide
            layer.slim()
            return layer
        self.used_bytes += bare
        return below


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


class _TrainingPass(torch.autograd.Function):
    """A pass as one autograd node.

    One leaf is an argument only so that autograd calls the backward, which adds all gradients to
    the adapters' buffers itself.
    """

    @staticmethod
    def forward(ctx: Any, one: FusedPass, tokens_T: Tensor, leaf: Tensor) -> Tensor:
        ctx.one = one
        return one.forward(tokens_T)

    @staticmethod
    def backward(ctx: Any, dhidden_TD: Tensor) -> Any:
        ctx.one.backward(dhidden_TD.contiguous())
        return None, None, None


def _norms(w: _Layer) -> tuple[Tensor, Tensor] | None:
    return None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)


def _linear(
    x_TX: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: LoraAddend | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Any]:
    """(x W^T + adapters, the adapters' inner product)."""
    inner = None if lora is None else lora.start(x_TX)
    y_TX = product(x_TX, weight, bias, dtype)
    if lora is not None:
        lora.add_(y_TX, inner)
    return y_TX, inner


def _linear_backward(
    dy_TX: Tensor, weight: Tensor, lora: LoraOperand | None, *, apart: bool = False
) -> tuple[Tensor, Any]:
    """The gradient of a linear's input, in an order of sums that no other row changes (`apart`)."""
    dx_TX = product(dy_TX, weight.t()) if apart else dy_TX @ weight
    return dx_TX, None if lora is None else lora.backward_input_(dx_TX, dy_TX)
