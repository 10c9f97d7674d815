"""The parts that fused layers of all kinds are made of: their linears, and what they keep.

Letters: T tokens, D hidden size, H query heads, d head size, h half of it, N rows sorted by expert,
X some fused width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.cuda import kernels, mixture
from tinkex.engine.cuda.adapter_layout import EXPERTS
from tinkex.engine.cuda.adapter_operand import AdapterTokens, BatchOperands, LoraAddend
from tinkex.engine.cuda.delta import WholeSequences
from tinkex.engine.cuda.product import product
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import LayerWeights
from tinkex.engine.model.mixture import Routing

Operands = BatchOperands | Mapping[str, LoraAddend]
"""The adapters of a pass: made for its batch, or in the slots of a recorded step."""


@dataclass(slots=True)
class KeptLayer:
    """The tensors that one layer keeps between forward and backward."""

    x_TD: Tensor
    rstd1_T: Tensor
    fused_TX: Tensor | None
    mixed_TX: Tensor
    """What the output linear reads."""
    attn_THd: Tensor | None
    """The attention's output, where `mixed_TX` is something else than its rows."""
    lse_HT: Tensor | None
    """Of attention layers."""
    x2_TD: Tensor
    rstd2_T: Tensor
    gate_up_TX: Tensor | None
    experts: mixture.KeptBlock | None
    inner: dict[str, Any]
    """The adapters' inner products, by linear."""

    def num_bytes(self) -> int:
        rest = (self.x_TD, self.mixed_TX, self.attn_THd, self.lse_HT, self.x2_TD)
        return num_bytes_of(*rest) + self.wide_bytes()

    def wide_bytes(self) -> int:
        """Bytes of the widest products, which can be made again from the rest."""
        experts = None if self.experts is None else self.experts.gate_up_NX
        return num_bytes_of(self.fused_TX, self.gate_up_TX, experts)

    def slim(self) -> None:
        self.fused_TX = self.gate_up_TX = None
        if self.experts is not None:
            self.experts.gate_up_NX = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The tokens of one batch: where each stands, and what it may see of those before it."""

    angles: tuple[Tensor, Tensor]
    """Cosines and sines, [T, h]."""
    attention: Any
    """A `PackedFlash`, or, without gradients, the sampler's `CachedAttend`."""
    rows_T: Tensor | None
    """0, 1, 2, ...: where each row's key and value go; None: where the cache says."""
    trains: bool
    packed: PackedCausal | None
    routing: Routing | None
    whole: WholeSequences | None
    """Of a packed batch of a model with delta layers."""
    members: Sequence[AdapterTokens]
    """Whose tokens are where, for the adapters of experts."""

    def target(self, index: int) -> tuple[Any, Any, Any]:
        """Where a layer's keys and values go; see `kernels.rope`."""
        if self.rows_T is None:
            target: tuple[Any, Any, Any] = self.attention.target(index)
            return target
        return None, None, self.rows_T


@dataclass(frozen=True, slots=True)
class Linears:
    """The linears of one layer by name, there and back, with their adapters."""

    index: int
    lora: Any
    """`Operands`; on the way back `BatchOperands`."""
    inner: dict[str, Any]
    """The adapters' inner products: the way back needs them."""

    def forward(
        self, name: str, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        lora = self.lora.get(f"{self.index}.{name}")
        y_TX, self.inner[name] = linear(x_TX, weight, bias, lora)
        return y_TX

    def backward(self, name: str, dy_TX: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        """(the gradient of the input, that of the adapters' inner product; None: it has none)."""
        # cuBLAS may add in another order for another number of rows; `product` never does.
        dx_TX = product(dy_TX, weight.t()) if self.lora.batch.apart else dy_TX @ weight
        lora = self.lora.get(f"{self.index}.{name}")
        return dx_TX, None if lora is None else lora.backward_input_(dx_TX, dy_TX)

    def gather(self, name: str, x_TX: Tensor, dy_TX: Tensor, dh: Any) -> None:
        """Add the gradients of the adapters to their buffers."""
        key = f"{self.index}.{name}"
        if (lora := self.lora.get(key)) is not None:
            lora.gather(x_TX, self.inner[name], dy_TX, dh, self.lora.grads(key))


def linear(
    x_TX: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: LoraAddend | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Any]:
    """(x W^T + adapters, the adapters' inner product)."""
    # Started first: in a recorded step it runs on a stream of its own, beside the large product.
    inner = None if lora is None else lora.start(x_TX)
    y_TX = product(x_TX, weight, bias, dtype)
    if lora is not None:
        lora.add_(y_TX, inner)
    return y_TX, inner


def swiglu(
    y: Tensor, up: Tensor, down: Tensor, linears: Linears, prefix: str = ""
) -> tuple[Tensor, Tensor]:
    """(what a dense MLP adds, its fused gate_up); `prefix` starts the names of its linears."""
    gate_up = linears.forward(f"{prefix}gate_up", y, up)
    return linears.forward(f"{prefix}down", kernels.swiglu(gate_up), down), gate_up


def attended(
    index: int, w: LayerWeights, q: Tensor, k: Tensor, v: Tensor, stream: Stream
) -> tuple[Tensor, Tensor | None]:
    """Attention's output [T, H, d], and in training the log-sums that its backward needs."""
    # Only a backward needs the log-sums of the scores.
    if stream.trains:
        made: tuple[Tensor, Tensor] = stream.attention.forward(index, q, k, v, w.sinks)
        return made
    return stream.attention(index, q, k, v, w.sinks), None


def members_of(lora: Operands, num_rows: int) -> list[AdapterTokens]:
    """Whose tokens are where, for the experts' adapters."""
    if isinstance(lora, BatchOperands):
        return lora.members()
    slots: Any = lora.get(EXPERTS)
    return [] if slots is None else [slots.expert_member(num_rows)]


def norms_of(w: LayerWeights) -> tuple[Tensor, Tensor] | None:
    return None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)


def num_bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)
