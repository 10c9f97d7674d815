"""Adapters in the form tensor cores take: bf16 copies, alone or stacked over a packed batch.

Master weights are fp32. A pass on CUDA uses a bf16 copy of an adapter's whole buffer, made once per
optimizer step. Spans of a batch whose adapters have one layout are a stack: their copies lie one
behind the other, [G, P], and each product serves all of them in one launch. Otherwise each span is
a stack of its own and they take turns. Gradients go to the adapters' own gradient buffers. What an
adapter adds to a row does not depend on the stack: see `lora_kernels`. Where a span's gradients
must not depend on it either (`LoraBatch.apart`), spans of one adapter are a stack in the forward
pass, and each is multiplied for itself in the backward pass.

Letters: T tokens, t those of a stack, G adapters, P parameters, R ranks of all modules of a linear,
r of one, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tinkex.engine.cuda import lora_kernels
from tinkex.engine.cuda.adapter_layout import LinearLayout, gradient_tiles, layouts, linears
from tinkex.engine.cuda.transfer import send
from tinkex.engine.lora.adapter import Adapter, AdapterSpan, LoraBatch, LoraPart


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """The rows of one adapter in a batch, for `cuda.mixture`, which makes its own operands."""

    start: int
    stop: int
    adapter: Adapter
    flat_P: Tensor
    """Its weights in low precision."""
    mask_T: Tensor | None = None
    """1 where a row is the adapter's, where that changes between replays of one graph."""


class LoraAddend(Protocol):
    """All adapters of one fused linear in this batch, forward only."""

    def start(self, x_TI: Tensor) -> Any:
        """The inner product, which may run beside what the caller launches next."""

    def add_(self, y_TO: Tensor, inner: Any) -> None:
        """y += the outer product with what `start` gave."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A [G, R, I] and the Bs [G, O, r] of one linear, of a stack's adapters."""

    A: Tensor
    Bs: tuple[Tensor, ...]
    parts: tuple[LoraPart, ...]

    def each(self) -> Iterator[tuple[Tensor, slice, slice, float]]:
        """(B, its rows in the inner product, its columns of the output, its scale)."""
        for B, part in zip(self.Bs, self.parts, strict=True):
            rows = slice(part.row, part.row + part.rank)
            yield B, rows, slice(part.target.start, part.target.stop), part.scale


def weights_by_key(like: Adapter, stacked_GP: Tensor) -> dict[str, Weights]:
    """Buffers of one layout as the linears take them: views."""
    count, step, first = len(stacked_GP), stacked_GP.stride(0), stacked_GP.storage_offset()

    def view(at: int, shape: tuple[int, int]) -> Tensor:
        return stacked_GP.as_strided((count, *shape), (step, shape[1], 1), first + at)

    return {
        key: Weights(view(*a), tuple(view(*b) for _, b in bs), tuple(part for part, _ in bs))
        for key, a, bs in linears(like.signature, like.layout)
    }


# ---------------------------------------------------------------------- stacks


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """Adapters of one layout on neighbouring rows."""

    adapters: tuple[Adapter, ...]
    rows: slice
    flat_GP: Tensor
    weights: Mapping[str, Weights]
    layouts: Mapping[str, LinearLayout]
    blocks_M3: Tensor
    """See `lora_kernels`; counted from the stack's first row."""
    stops_G: Tensor | None
    """Where each adapter's rows end; None for an adapter alone."""
    pieces: tuple[slice, ...] = (slice(None),)
    """Rows of the stack that are multiplied for themselves; the adapters are twins then."""

    @classmethod
    def of_pieces(cls, spans: Sequence[AdapterSpan], dtype: torch.dtype) -> AdapterStack:
        """Spans of one adapter, or of its twins."""
        first = spans[0].start
        whole = cls.of([AdapterSpan(first, spans[-1].stop, spans[0].adapter)], dtype)
        pieces = tuple(slice(span.start - first, span.stop - first) for span in spans)
        return replace(whole, adapters=tuple(span.adapter for span in spans), pieces=pieces)

    @classmethod
    def of(cls, spans: Sequence[AdapterSpan], dtype: torch.dtype) -> AdapterStack:
        adapters, first = tuple(span.adapter for span in spans), spans[0].start
        rows = slice(first, spans[-1].stop)
        ends = [(span.start - first, span.stop - first) for span in spans]
        blocks = [
            (number, at, stop)
            for number, (start, stop) in enumerate(ends)
            for at in range(start, stop, lora_kernels.MANY_ROWS)
        ]
        device, copy = adapters[0].flat.device, _copy_of(adapters[0], dtype)
        flat_GP, weights, stops_G = copy.flat[None], copy.weights, None
        if len(spans) > 1:
            flat_GP = torch.stack([low_precision_flat(adapter, dtype) for adapter in adapters])
            weights = weights_by_key(adapters[0], flat_GP)
            stops_G = send([stop for _, stop in ends], device, torch.int32)
        blocks_M3 = send(blocks, device, torch.int32)
        return cls(adapters, rows, flat_GP, weights, copy.layouts, blocks_M3, stops_G)

    def product(self, a: Tensor, b_G: Tensor) -> Tensor:
        """Each adapter's rows of `a` times its matrix."""
        if self.stops_G is not None:
            return _grouped(a, b_G, self.stops_G)
        if len(self.pieces) == 1:
            return a @ b_G[0]
        return torch.cat([a[rows] @ b_G[0] for rows in self.pieces])

    def expand_(self, y_tO: Tensor, h_tR: Tensor, factor: lora_kernels.Factor) -> None:
        lora_kernels.expand_(
            y_tO, h_tR, self.flat_GP, factor, self.blocks_M3, rows=lora_kernels.MANY_ROWS
        )


def _grouped(a: Tensor, b: Tensor, stops_G: Tensor) -> Tensor:
    """A product for each span of rows."""
    return torch._grouped_mm(a, b, offs=stops_G)


def can_group(adapters: Sequence[Adapter]) -> bool:
    """Grouped products want one layout, slices that start at 16 bytes, and each adapter once:
    the gradients of all are written at the same time."""
    parts = [part for _, parts in adapters[0].signature for part in parts]
    aligned = all(part.rank % 8 == 0 for part in parts)
    alike = all(a.signature == adapters[0].signature for a in adapters[1:])
    return aligned and alike and len(set(adapters)) == len(adapters)


@dataclass(frozen=True, slots=True)
class StackLinear:
    """The part of one linear that one stack of adapters has."""

    stack: AdapterStack
    weights: Weights
    layout: LinearLayout

    def start(self, x_TI: Tensor) -> Tensor:
        stack, layout = self.stack, self.layout
        return lora_kernels.shrink_many(
            x_TI[stack.rows], stack.flat_GP, stack.blocks_M3, layout.at, layout.ranks
        )

    def add_(self, y_TO: Tensor, h_tR: Tensor) -> None:
        for factor in self.layout.outer:
            self.stack.expand_(y_TO[self.stack.rows], h_tR, factor)

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> Tensor:
        stack, dy_tO = self.stack, dy_TO[self.stack.rows]
        dh_tR = dy_TO.new_empty(len(dy_tO), self.layout.ranks)
        for B, rows, columns, scale in self.weights.each():
            dh_tr = stack.product(dy_tO[:, columns], B)
            dh_tR[:, rows] = dh_tr if scale == 1 else dh_tr.mul_(scale)
        stack.expand_(dx_TI[stack.rows], dh_tR, self.layout.inner)
        return dh_tR


@dataclass(frozen=True, slots=True)
class LoraOperand:
    """All adapters of one fused linear in this batch. Inner products: one per stack."""

    linears: tuple[StackLinear, ...]

    def start(self, x_TI: Tensor) -> list[Tensor]:
        return [linear.start(x_TI) for linear in self.linears]

    def add_(self, y_TO: Tensor, inner: Sequence[Tensor]) -> None:
        """y += lora(x)."""
        for linear, h_tR in zip(self.linears, inner, strict=True):
            linear.add_(y_TO, h_tR)

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> list[Tensor]:
        """dx += the gradient through the adapters; returns those of the inner products."""
        return [linear.backward_input_(dx_TI, dy_TO) for linear in self.linears]

    def gather(
        self,
        x_TI: Tensor,
        inner: Sequence[Tensor],
        dy_TO: Tensor,
        dinner: Sequence[Tensor],
        grads: Sequence[Gradients],
    ) -> None:
        """Add the gradients of A and B to `grads`, those that `BatchOperands` has for it."""
        for linear, h_tR, dh_tR, grad in zip(self.linears, inner, dinner, grads, strict=True):
            rows = linear.stack.rows
            grad.add(linear, x_TI[rows], h_tR, dy_TO[rows], dh_tR)


# ---------------------------------------------------------------------- gradients


@dataclass(frozen=True, slots=True)
class OwnGradients:
    """Of an adapter alone, or piece by piece of its twins: views of their buffers."""

    by_piece: tuple[Weights, ...]

    def add(
        self, linear: StackLinear, x_tI: Tensor, h_tR: Tensor, dy_tO: Tensor, dh_tR: Tensor
    ) -> None:
        for own, grad in zip(linear.stack.pieces, self.by_piece, strict=True):
            grad.A.add_(over_rows(dh_tR[own], x_tI[own]))
            for dB, ranks, columns, scale in grad.each():
                dB.add_(over_rows(dy_tO[own, columns], h_tR[own, ranks]), alpha=scale)


@dataclass(frozen=True, slots=True)
class StackGradients:
    """Of several adapters at once: the addresses of their buffers, and where in them."""

    addresses_G: Tensor
    tiles: lora_kernels.GradientTiles

    def add(
        self, linear: StackLinear, x_tI: Tensor, h_tR: Tensor, dy_tO: Tensor, dh_tR: Tensor
    ) -> None:
        stops_G = linear.stack.stops_G
        assert stops_G is not None
        lora_kernels.gather_(dh_tR, x_tI, dy_tO, h_tR, self.tiles, self.addresses_G, stops_G)


Gradients = OwnGradients | StackGradients
"""Where the gradients of one stack's part of one linear are gathered."""


def over_rows(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices over their rows in fp32, [1, ...] as views of a stack are."""
    return torch.mm(a.t(), b, out_dtype=torch.float32)[None]


# ---------------------------------------------------------------------- a batch


class BatchOperands:
    """The operands of every linear for one packed batch.

    Gradients: `grads` says where a linear's go. Their views are made in the backward pass, when the
    device is busy.
    """

    def __init__(self, lora: LoraBatch | None, num_rows: int, dtype: torch.dtype) -> None:
        spans = lora.spans if lora is not None else ()
        apart = lora is not None and lora.apart
        # Rows of no adapter between the spans would belong to a neighbour's in grouped products.
        together = len(spans) > 1 and not apart and _tile(spans, num_rows)
        if together and can_group([span.adapter for span in spans]):
            self._stacks = [AdapterStack.of(spans, dtype)]
        elif apart:
            # Twins share their weights' buffer, and so are one adapter in the forward pass.
            by_owner = groupby(spans, lambda span: id(span.adapter.flat))
            self._stacks = [AdapterStack.of_pieces(list(own), dtype) for _, own in by_owner]
        else:
            self._stacks = [AdapterStack.of([span], dtype) for span in spans]
        self.batch, self._dtype = LoraBatch(spans, apart=apart), dtype
        self._operands: dict[str, LoraOperand | None] = {}
        self._grads: list[Mapping[str, Gradients]] = []

    @classmethod
    def fixed(cls, like: Adapter, flat_1P: Tensor, grad_1P: Tensor, num_rows: int) -> BatchOperands:
        """An adapter on all rows, with its weights and gradients where these tensors are."""
        batch = cls(None, num_rows, flat_1P.dtype)
        blocks = [(0, at, num_rows) for at in range(0, num_rows, lora_kernels.MANY_ROWS)]
        weights = weights_by_key(like, flat_1P)
        batch._stacks = [
            AdapterStack(
                (like,), slice(0, num_rows), flat_1P, weights, layouts(like),
                send(blocks, flat_1P.device, torch.int32), None,
            )
        ]  # fmt: skip
        batch._grads = [_own([weights_by_key(like, grad_1P)])]
        return batch

    def get(self, key: str) -> LoraOperand | None:
        if key not in self._operands:
            linears = [
                StackLinear(stack, stack.weights[key], stack.layouts[key])
                for stack in self._stacks
                if key in stack.weights
            ]
            self._operands[key] = LoraOperand(tuple(linears)) if linears else None
        return self._operands[key]

    def grads(self, key: str) -> list[Gradients]:
        """Where the gradients of one linear's adapters are gathered, by stack."""
        if not self._grads:
            self._grads = [_gradients_of(stack) for stack in self._stacks]
        return [stack[key] for stack in self._grads if key in stack]

    def members(self) -> list[AdapterTokens]:
        """Every adapter by itself."""
        return [
            AdapterTokens(s.start, s.stop, s.adapter, low_precision_flat(s.adapter, self._dtype))
            for s in self.batch.spans
        ]


def _gradients_of(stack: AdapterStack) -> Mapping[str, Gradients]:
    first = stack.adapters[0]
    if stack.stops_G is not None:
        addresses = [grad_of(adapter).data_ptr() for adapter in stack.adapters]
        addresses_G = send(addresses, first.flat.device, torch.int64)
        by_key = gradient_tiles(first)
        return {key: StackGradients(addresses_G, by_key[key]) for key in stack.weights}
    own = {
        adapter: weights_by_key(first, grad_of(adapter)[None])
        for adapter in dict.fromkeys(stack.adapters)
    }
    return _own([own[adapter] for adapter in stack.adapters])


def _own(by_piece: Sequence[Mapping[str, Weights]]) -> Mapping[str, Gradients]:
    return {key: OwnGradients(tuple(one[key] for one in by_piece)) for key in by_piece[0]}


def _tile(spans: Sequence[AdapterSpan], num_rows: int) -> bool:
    edges = [0, *(span.stop for span in spans)]
    starts = [span.start for span in spans]
    return starts == edges[:-1] and edges[-1] == num_rows


def grad_of(adapter: Adapter) -> Tensor:
    """Where an adapter's gradients go."""
    adapter.start_grad()
    assert adapter.grad is not None
    return adapter.grad


# ---------------------------------------------------------------------- low-precision copies


@dataclass(slots=True)
class _Copy:
    version: int
    flat: Tensor
    weights: Mapping[str, Weights]
    layouts: Mapping[str, LinearLayout]


_COPIES = WeakTensorKeyDictionary()
"""By the adapter's buffer, which twins share."""


def low_precision_flat(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """The adapter's buffer in `dtype`, copied anew, in place, only when its weights changed."""
    return _copy_of(adapter, dtype).flat


def _copy_of(adapter: Adapter, dtype: torch.dtype) -> _Copy:
    copy: _Copy | None = _COPIES.get(adapter.flat)
    version = adapter.flat._version
    if copy is None or copy.flat.dtype != dtype:
        flat = adapter.flat.to(dtype)
        weights = weights_by_key(adapter, flat[None])
        _COPIES[adapter.flat] = copy = _Copy(version, flat, weights, layouts(adapter))
    elif copy.version != version:
        # In place: the views of `weights` stay, and what was launched before has read it by then.
        copy.flat.copy_(adapter.flat)
        copy.version = version
    return copy
