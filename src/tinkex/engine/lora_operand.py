"""Adapters in the form tensor cores take: bf16, stacked over the tenants of a packed batch.

An adapter's master weights are fp32 leaves of autograd. For a pass on CUDA each fused linear wants
one A of [G, R, in] and one B of [G, out, R] for all G spans of the batch, so that a pass costs a
fixed number of launches however many tenants share it. B is block-diagonal over the modules that
share the linear (q, k and v) and carries the adapter's scale. The bf16 copies are made once per
optimizer step and cached on the adapter.

Letters: T tokens, G spans, R ranks of all modules of a linear padded to 8, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tinkex.engine.lora import Adapter, LoraBatch

if TYPE_CHECKING:
    from tinkex.engine.decoder import Decoder

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LoraOperand:
    """All adapters of one fused linear in this batch. `segments` maps span number to G."""

    A_GRI: Tensor
    B_GOR: Tensor
    stops_G: Tensor
    segments: tuple[int, ...]

    def segment(self, span: int) -> int:
        return self.segments[span]

    def add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y += lora(x); returns the inner product h_TR, which the backward needs."""
        if len(self.A_GRI) == 1:
            h_TR = x_TI @ self.A_GRI[0].t()
            if y_TO.dtype == x_TI.dtype:
                y_TO.addmm_(h_TR, self.B_GOR[0].t())
            else:  # fp32 logits
                y_TO += torch.mm(h_TR, self.B_GOR[0].t(), out_dtype=y_TO.dtype)
            return h_TR
        h_TR = grouped_mm(x_TI, self.A_GRI.transpose(1, 2), self.stops_G)
        y_TO += grouped_mm(h_TR, self.B_GOR.transpose(1, 2), self.stops_G)
        return h_TR

    def backward_input_(self, dx_TI: Tensor, dy_TO: Tensor) -> Tensor:
        """dx += the gradient through the adapters; returns dh_TR."""
        if len(self.A_GRI) == 1:
            dh_TR = dy_TO @ self.B_GOR[0]
            dx_TI.addmm_(dh_TR, self.A_GRI[0])
            return dh_TR
        dh_TR = grouped_mm(dy_TO, self.B_GOR, self.stops_G)
        dx_TI += grouped_mm(dh_TR, self.A_GRI, self.stops_G)
        return dh_TR

    def gradients(self, x_TI: Tensor, h_TR: Tensor, dy_TO: Tensor, dh_TR: Tensor) -> Pair:
        """(dA, dB), shaped like A and B, in fp32."""
        if len(self.A_GRI) == 1:
            dA_RI = torch.mm(dh_TR.t(), x_TI, out_dtype=torch.float32)
            dB_OR = torch.mm(dy_TO.t(), h_TR, out_dtype=torch.float32)
            return dA_RI[None], dB_OR[None]
        dA_GRI = grouped_mm(dh_TR.t(), x_TI, self.stops_G)
        dB_GOR = grouped_mm(dy_TO.t(), h_TR, self.stops_G)
        return dA_GRI.float(), dB_GOR.float()


def grouped_mm(a: Tensor, b: Tensor, stops_G: Tensor) -> Tensor:
    """One product per span of rows (or, for two matrices, per span of the summed dimension)."""
    return torch._grouped_mm(a, b, offs=stops_G)


def operands(
    lora: LoraBatch | None, decoder: Decoder, num_rows: int, keys: Sequence[str] | None = None
) -> Mapping[str, LoraOperand]:
    """What each fused linear needs for this batch; linears that no adapter touches are left out.

    Rows outside all spans get a segment of zeros, so segments tile the whole batch.
    """
    if lora is None or not lora.spans:
        return {}
    adapters: list[Adapter | None] = []
    stops: list[int] = []
    segments: list[int] = []
    for span in lora.spans:
        if span.start > (stops[-1] if stops else 0):
            adapters.append(None)
            stops.append(span.start)
        segments.append(len(stops))
        adapters.append(span.adapter)
        stops.append(span.stop)
    if stops[-1] < num_rows:
        adapters.append(None)
        stops.append(num_rows)
    stops_G = torch.tensor(stops, dtype=torch.int32).to(decoder.device, non_blocking=True)
    cached = [_CACHE.of(adapter, decoder) if adapter is not None else {} for adapter in adapters]
    out: dict[str, LoraOperand] = {}
    for key in keys if keys is not None else decoder.targets:
        pairs = [pairs.get(key) for pairs in cached]
        if any(pair is not None for pair in pairs):
            A, B = _stack(pairs)
            out[key] = LoraOperand(A, B, stops_G, tuple(segments))
    return out


def _stack(pairs: Sequence[Pair | None]) -> Pair:
    if len(pairs) == 1 and pairs[0] is not None:
        return pairs[0][0][None], pairs[0][1][None]
    known = [pair for pair in pairs if pair is not None]
    rank = max(len(A) for A, _ in known)
    like_A, like_B = known[0]
    if all(pair is not None and len(pair[0]) == rank for pair in pairs):
        return torch.stack([A for A, _ in known]), torch.stack([B for _, B in known])
    A_GRI = like_A.new_zeros(len(pairs), rank, like_A.shape[1])
    B_GOR = like_B.new_zeros(len(pairs), like_B.shape[0], rank)
    for number, pair in enumerate(pairs):
        if pair is not None:
            A_GRI[number, : len(pair[0])] = pair[0]
            B_GOR[number, :, : len(pair[0])] = pair[1]
    return A_GRI, B_GOR


class _Cache:
    """Pairs per adapter, refreshed when an optimizer step or a load has changed its weights."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Adapter, tuple[int, dict[str, Pair]]] = WeakKeyDictionary()

    def of(self, adapter: Adapter, decoder: Decoder) -> dict[str, Pair]:
        version = sum(tensor._version for tensor in adapter.parameters())
        entry = self._entries.get(adapter)
        if entry is None or entry[0] != version:
            pairs = entry[1] if entry is not None else _allocate(adapter, decoder)
            _refresh(adapter, pairs)
            self._entries[adapter] = entry = (version, pairs)
        return entry[1]


_CACHE = _Cache()


def pairs_of(adapter: Adapter, decoder: Decoder) -> Mapping[str, Pair]:
    """One adapter's (A, B) per fused linear, up to date with its master weights."""
    return _CACHE.of(adapter, decoder)


def _allocate(adapter: Adapter, decoder: Decoder) -> dict[str, Pair]:
    """Zeros as wide as the whole fused linear: an adapter on q alone still adds to all of qkv."""
    pairs = {}
    for key, group in adapter.groups.items():
        rank = -(-len(group.a_RI) // 8) * 8
        width = decoder.targets[key].parts[-1].stop
        A_RI = group.a_RI.new_zeros(rank, group.a_RI.shape[1], dtype=decoder.dtype)
        pairs[key] = (A_RI, A_RI.new_zeros(width, rank))
    return pairs


def _refresh(adapter: Adapter, pairs: Mapping[str, Pair]) -> None:
    """Copy the master weights in, in a handful of launches for all modules together."""
    sources: list[Tensor] = []
    views: list[Tensor] = []
    scales: list[float] = []
    for key, group in adapter.groups.items():
        A_RI, B_OR = pairs[key]
        sources.append(group.a_RI.detach())
        views.append(A_RI[: len(group.a_RI)])
        scales.append(1.0)
        for part, b_Or in zip(group.parts, group.b_Or, strict=True):
            sources.append(b_Or.detach())
            columns = B_OR[:, part.row : part.row + part.rank]
            views.append(columns[part.target.start : part.target.stop])
            scales.append(part.scale)
    torch._foreach_copy_(views, torch._foreach_mul(sources, scales))
