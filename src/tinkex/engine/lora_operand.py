"""Adapters in the form tensor cores take: bf16 copies, alone or stacked over a packed batch.

Master weights are fp32. A pass on CUDA uses a bf16 copy of an adapter's whole buffer, made once per
optimizer step. Spans of a batch whose adapters have one layout are stacked, [G, parameters], and
each product serves all of them in one launch (`Grouped`); otherwise spans take turns (`Spans`).
Gradients go to the adapters' own gradient buffers.

Letters: T tokens, G adapters, R ranks of all modules of a linear, r of one, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tinkex.engine.lora import Adapter, LoraBatch, LoraPart, Span


class LoraAddend(Protocol):
    """All adapters of one fused linear in this batch, forward only."""

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> Any:
        """y += lora(x); returns the inner product, if a backward may need it."""


class LoraOperand(LoraAddend, Protocol):
    """All adapters of one fused linear in this batch."""

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> Any:
        """dx += the gradient through the adapters; returns that of the inner product."""

    def gather(
        self, x_TI: Tensor, inner: Any, dy_TO: Tensor, dinner: Any, grads: Sequence[Weights]
    ) -> None:
        """Add the gradients of A and B to `grads`, which are `BatchLora.grads` of the linear."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A and the Bs of one linear, of one adapter or (with a leading G) of several."""

    A: Tensor
    Bs: tuple[Tensor, ...]
    parts: tuple[LoraPart, ...]

    def each(self) -> Iterator[tuple[Tensor, slice, slice, float]]:
        """(B, its rows in the inner product, its columns of the output, its scale)."""
        for B, part in zip(self.Bs, self.parts, strict=True):
            rows = slice(part.row, part.row + part.rank)
            yield B, rows, slice(part.target.start, part.target.stop), part.scale


def weights_by_key(adapter: Adapter, flat: Tensor) -> dict[str, Weights]:
    """A buffer of the adapter's layout (or a stack of them, [G, ...]) as the linears take it."""
    out, views = {}, iter(adapter.views(flat))
    for key, group in adapter.groups.items():
        A = next(views)
        out[key] = Weights(A, tuple(next(views) for _ in group.parts), group.parts)
    return out


# ---------------------------------------------------------------------- spans, one by one


@dataclass(frozen=True, slots=True)
class SpanWeights:
    """One adapter on its rows."""

    rows: slice
    weights: Weights
    joined_OR: Tensor | None = None
    """All Bs in one block-diagonal matrix, scaled: one product instead of one per module."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Each span's own products, in turn."""

    spans: tuple[SpanWeights, ...]

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> list[Tensor]:
        inner = []
        for span in self.spans:
            h_tR = x_TI[span.rows] @ span.weights.A.t()
            inner.append(h_tR)
            if span.joined_OR is not None:
                y_TO[span.rows, : len(span.joined_OR)].addmm_(h_tR, span.joined_OR.t())
                continue
            for B, rows, columns, scale in span.weights.each():
                y_tO = y_TO[span.rows, columns]
                if y_TO.dtype == h_tR.dtype:
                    y_tO.addmm_(h_tR[:, rows], B.t(), alpha=scale)
                else:  # fp32 logits
                    added = torch.mm(h_tR[:, rows], B.t(), out_dtype=y_TO.dtype)
                    y_tO.add_(added, alpha=scale)
        return inner

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> list[Tensor]:
        dinner = []
        for span in self.spans:
            dh_tR = self._dinner(span, dy_TO[span.rows])
            dx_TI[span.rows].addmm_(dh_tR, span.weights.A)
            dinner.append(dh_tR)
        return dinner

    @staticmethod
    def _dinner(span: SpanWeights, dy_tO: Tensor) -> Tensor:
        if span.joined_OR is not None:
            return dy_tO[:, : len(span.joined_OR)] @ span.joined_OR
        dh_tR = dy_tO.new_empty(len(dy_tO), len(span.weights.A))
        for B, rows, columns, scale in span.weights.each():
            dh_tr = dy_tO[:, columns] @ B
            dh_tR[:, rows] = dh_tr if scale == 1 else dh_tr.mul_(scale)
        return dh_tR

    def gather(
        self,
        x_TI: Tensor,
        inner: list[Tensor],
        dy_TO: Tensor,
        dinner: list[Tensor],
        grads: Sequence[Weights],
    ) -> None:
        for span, h_tR, dh_tR, grad in zip(self.spans, inner, dinner, grads, strict=True):
            grad.A.add_(torch.mm(dh_tR.t(), x_TI[span.rows], out_dtype=torch.float32))
            for dB, rows, columns, scale in grad.each():
                dy_tO = dy_TO[span.rows, columns]
                dB.add_(torch.mm(dy_tO.t(), h_tR[:, rows], out_dtype=torch.float32), alpha=scale)


# ---------------------------------------------------------------------- all spans at once


@dataclass(frozen=True, slots=True)
class Grouped:
    """Equal layouts, stacked: one grouped product for all spans. `stops_G` ends each span."""

    weights: Weights
    stops_G: Tensor

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        h_TR = grouped_mm(x_TI, self.weights.A.transpose(1, 2), self.stops_G)
        for B, rows, columns, scale in self.weights.each():
            added = grouped_mm(h_TR[:, rows], B.transpose(1, 2), self.stops_G)
            y_TO[:, columns].add_(added, alpha=scale)
        return h_TR

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> Tensor:
        dh_TR = dy_TO.new_empty(len(dy_TO), self.weights.A.shape[1])
        for B, rows, columns, scale in self.weights.each():
            dh_Tr = grouped_mm(dy_TO[:, columns], B, self.stops_G)
            dh_TR[:, rows] = dh_Tr if scale == 1 else dh_Tr.mul_(scale)
        dx_TI += grouped_mm(dh_TR, self.weights.A, self.stops_G)
        return dh_TR

    def gather(
        self,
        x_TI: Tensor,
        inner: Tensor,
        dy_TO: Tensor,
        dinner: Tensor,
        grads: Sequence[Weights],
    ) -> None:
        (grad,) = grads
        grad.A.add_(grouped_mm(dinner.t(), x_TI, self.stops_G))
        for dB, rows, columns, scale in grad.each():
            dB_GOr = grouped_mm(dy_TO[:, columns].t(), inner[:, rows], self.stops_G)
            dB.add_(dB_GOr, alpha=scale)


def grouped_mm(a: Tensor, b: Tensor, stops_G: Tensor) -> Tensor:
    """One product per span of rows (or, for two matrices, per span of the summed dimension)."""
    return torch._grouped_mm(a, b, offs=stops_G)


def can_group(adapters: Sequence[Adapter]) -> bool:
    """Grouped products want one layout, and slices that start at 16 bytes."""
    parts = [part for _, parts in adapters[0].signature for part in parts]
    aligned = all(part.rank % 8 == 0 for part in parts)
    return aligned and all(a.signature == adapters[0].signature for a in adapters[1:])


# ---------------------------------------------------------------------- a batch


class BatchLora:
    """The operands of every linear for one packed batch, made when a linear asks for its own.

    `trained` batches gather gradients: `grads` says where a linear's go, `finish` hands them to
    the adapters. Views of gradients are made in the backward pass, when the device is busy.
    """

    def __init__(
        self, lora: LoraBatch | None, num_rows: int, dtype: torch.dtype, *, trained: bool = False
    ) -> None:
        self._spans = lora.spans if lora is not None else ()
        self._adapters = [span.adapter for span in self._spans]
        self._dtype, self._trained = dtype, trained
        self._operands: dict[str, LoraOperand | None] = {}
        self._stops_G: Tensor | None = None
        if len(self._spans) > 1 and _tiles(self._spans, num_rows) and can_group(self._adapters):
            stops = torch.tensor([span.stop for span in self._spans], dtype=torch.int32)
            self._stops_G = stops.to(self._adapters[0].flat.device, non_blocking=True)
        self._grads: list[Mapping[str, Weights]] = []
        self._stacked_grad: Tensor | None = None

    def get(self, key: str) -> LoraOperand | None:
        if key not in self._operands:
            self._operands[key] = self._make(key)
        return self._operands[key]

    def grads(self, key: str) -> list[Weights]:
        """Where the gradients of one linear's adapters are gathered."""
        if not self._grads:
            self._start()
        return [by_key[key] for by_key in self._grads if key in by_key]

    def finish(self) -> None:
        if self._stacked_grad is not None:
            for adapter, grad in zip(self._adapters, self._stacked_grad, strict=True):
                _grad_of(adapter).add_(grad)

    def _start(self) -> None:
        if self._stops_G is None:
            self._grads = [weights_by_key(a, _grad_of(a)) for a in self._adapters]
            return
        first = self._adapters[0]
        self._stacked_grad = first.flat.new_zeros((len(self._adapters), first.flat.numel()))
        self._grads = [stack_by_key(first, self._stacked_grad)]

    def _make(self, key: str) -> LoraOperand | None:
        known = [low_precision(adapter, self._dtype).get(key) for adapter in self._adapters]
        if not any(known):
            return None
        if self._stops_G is not None:
            return Grouped(_stack([w for w in known if w is not None]), self._stops_G)
        return Spans(
            tuple(
                SpanWeights(
                    slice(span.start, span.stop),
                    weights,
                    _joined(span.adapter, key, self._dtype) if self._trained else None,
                )
                for span, weights in zip(self._spans, known, strict=True)
                if weights is not None
            )
        )


def _stack(many: Sequence[Weights]) -> Weights:
    Bs = zip(*(weights.Bs for weights in many), strict=True)
    A = torch.stack([weights.A for weights in many])
    return Weights(A, tuple(torch.stack(B) for B in Bs), many[0].parts)


def stack_by_key(like: Adapter, stacked: Tensor) -> dict[str, Weights]:
    """A stack of buffers, [G, parameters], as the linears take it: views with a leading G."""
    out, views = {}, iter(like.views(stacked[0]))
    step = stacked.stride(0)
    for key, group in like.groups.items():
        A, *Bs = (
            stacked.as_strided((len(stacked), *v.shape), (step, *v.stride()), v.storage_offset())
            for v in (next(views) for _ in group.tensors())
        )
        out[key] = Weights(A, tuple(Bs), group.parts)
    return out


def _tiles(spans: Sequence[Span], num_rows: int) -> bool:
    edges = [0, *(span.stop for span in spans)]
    starts = [span.start for span in spans]
    return starts == edges[:-1] and edges[-1] == num_rows


def _grad_of(adapter: Adapter) -> Tensor:
    adapter.start_grad()
    assert adapter.grad is not None
    return adapter.grad


# ---------------------------------------------------------------------- low-precision copies


@dataclass(slots=True)
class _Copy:
    version: int
    flat: Tensor
    weights: Mapping[str, Weights]
    joined: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """Block-diagonal Bs with the version they were made of, for linears that have asked."""


_COPIES: WeakKeyDictionary[Adapter, _Copy] = WeakKeyDictionary()


def low_precision(adapter: Adapter, dtype: torch.dtype) -> Mapping[str, Weights]:
    """The adapter in `dtype`, copied anew, in place, only when its weights have changed."""
    return _copy_of(adapter, dtype).weights


def low_precision_flat(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    return _copy_of(adapter, dtype).flat


def _copy_of(adapter: Adapter, dtype: torch.dtype) -> _Copy:
    version, copy = adapter.flat._version, _COPIES.get(adapter)
    if copy is None or copy.flat.dtype != dtype:
        flat = adapter.flat.to(dtype)
        _COPIES[adapter] = copy = _Copy(version, flat, weights_by_key(adapter, flat))
    elif copy.version != version:
        copy.flat.copy_(adapter.flat)
        copy.version = version
    return copy


def _joined(adapter: Adapter, key: str, dtype: torch.dtype) -> Tensor | None:
    """A linear's Bs as one matrix. None for a single module: nothing to join, no copy to keep."""
    copy = _copy_of(adapter, dtype)
    weights = copy.weights[key]
    if len(weights.Bs) == 1:
        return None
    version, joined_OR = copy.joined.get(key, (-1, None))
    if joined_OR is None:
        width = weights.parts[-1].target.stop
        joined_OR = weights.A.new_zeros(width, len(weights.A))
    if version != copy.version:
        for B, rows, columns, scale in weights.each():
            torch.mul(B, scale, out=joined_OR[columns, rows])
        copy.joined[key] = (copy.version, joined_OR)
    return joined_OR
