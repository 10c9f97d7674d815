"""A mixture of experts on CUDA: grouped products over sorted rows, forward and backward by hand.

The same answers as `engine/model/mixture.py`, which is the oracle. Rows are sorted by expert once;
each linear of all experts is then one grouped product, whose bits are those of a product by itself,
so a row does not depend on the batch. An adapter's matrices of all experts lie at equal distances
in its buffer and are seen as one stack: adapters too are grouped products. A row is multiplied with
its weight before the second product, so that neither that product's output nor its sum is kept.

Letters: T tokens, N = T k sorted rows, D hidden size, E experts, M size of an expert, X = 2M, k
experts of a token, R ranks of all modules of a linear, r of one, O outputs, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tinkex.engine.cuda import mixture_kernels as kernels
from tinkex.engine.cuda.product import product
from tinkex.engine.lora.adapter import Adapter, LoraPart
from tinkex.engine.model.mixture import MixtureWeights, Routing, expert_key
from tinkex.engine.model.shape import ExpertsConfig
from tinkex.engine.mxfp4 import expanded

# ---------------------------------------------------------------------------- stacked adapters


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one linear's matrices of expert 0 start, and how far the next expert's are."""

    starts: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    parts: tuple[LoraPart, ...]
    step: int

    def views(self, flat_P: Tensor, count: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A [E, R, I] and the Bs [E, O, r] in a buffer of the adapter's layout."""
        offset = flat_P.storage_offset()
        A, *Bs = (
            flat_P.as_strided((count, *shape), (self.step, shape[1], 1), offset + start)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        )
        return A, tuple(Bs)


_PLACES: WeakKeyDictionary[Adapter, dict[str, _Place | None]] = WeakKeyDictionary()


_STACKS: WeakKeyDictionary[Adapter, bool] = WeakKeyDictionary()


def can_stack(adapter: Adapter, count: int) -> bool:
    """Whether the experts of every block carry the same ranks and scales, in multiples of 8."""
    found = _STACKS.get(adapter)
    if found is None:
        layers = {key.partition(".experts.")[0] for key in adapter.groups if ".experts." in key}
        found = _STACKS[adapter] = not any(
            _irregular(adapter, int(layer), name, count)
            for layer in layers
            for name in ("gate_up", "down")
        )
    return found


def _irregular(adapter: Adapter, layer: int, name: str, count: int) -> bool:
    there = [expert_key(layer, e, name) in adapter.groups for e in range(count)]
    return any(there) and place_of(adapter, layer, name, count) is None


def place_of(adapter: Adapter, layer_index: int, name: str, count: int) -> _Place | None:
    """None: the block carries no adapter there, or the experts' differ."""
    places = _PLACES.get(adapter)
    if places is None:
        places = _PLACES[adapter] = {}
    key = f"{layer_index}.{name}"
    if key not in places:
        places[key] = _find(adapter, layer_index, name, count)
    return places[key]


def _find(adapter: Adapter, layer_index: int, name: str, count: int) -> _Place | None:
    first = _index(adapter)
    keys = [expert_key(layer_index, expert, name) for expert in range(count)]
    if not all(key in adapter.groups for key in keys):
        return None
    kinds = {
        tuple((part.row, part.rank, part.scale) for part in adapter.groups[key].parts)
        for key in keys
    }
    group = adapter.groups[keys[0]]
    num = 1 + len(group.parts)
    starts = [[adapter.layout[first[key] + i][0] for i in range(num)] for key in keys]
    step = starts[1][0] - starts[0][0] if count > 1 else 0
    even = all(
        start == starts[0][i] + expert * step
        for expert, row in enumerate(starts)
        for i, start in enumerate(row)
    )
    if len(kinds) != 1 or not even or any(part.rank % 8 for part in group.parts):
        return None
    shapes = tuple(adapter.layout[first[keys[0]] + i][1] for i in range(num))
    return _Place(tuple(starts[0]), shapes, group.parts, step)


_INDEX: WeakKeyDictionary[Adapter, dict[str, int]] = WeakKeyDictionary()


def _index(adapter: Adapter) -> dict[str, int]:
    """By linear: which of the adapter's parameters its A is."""
    found = _INDEX.get(adapter)
    if found is None:
        found, at = {}, 0
        for key, group in adapter.groups.items():
            found[key] = at
            at += 1 + len(group.parts)
        _INDEX[adapter] = found
    return found


# ------------------------------------------------------------------------------- one batch

_FEW = 16384
"""Up to so many rows one kernel sorts; above, torch's sort is faster."""


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """One adapter's tokens in a batch: its buffer in low precision, and where gradients go."""

    start: int
    stop: int
    adapter: Adapter
    flat_P: Tensor
    grad_P: Tensor | None = None
    mask_T: Tensor | None = None
    """1 where a token is the adapter's, where that changes between replays of one graph."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The rows of one block in the order of their experts."""

    rows_N: Tensor
    """The token of each sorted row."""
    experts_N: Tensor
    stops_E: Tensor
    back_Tk: Tensor
    """Where each token's experts are among the sorted rows."""

    weight_N: Tensor

    @classmethod
    def of(cls, chosen_Tk: Tensor, weights_Tk: Tensor, count: int) -> Sorted:
        num, per_token = chosen_Tk.numel(), chosen_Tk.shape[1]
        if num <= _FEW:
            return cls(*kernels.sort(chosen_Tk, weights_Tk.contiguous(), count))
        experts_N, order_N = chosen_Tk.flatten().sort(stable=True)
        every = torch.arange(count, device=chosen_Tk.device)
        stops_E = torch.searchsorted(experts_N, every, right=True, out_int32=True)
        places = torch.arange(num, device=chosen_Tk.device)
        back_N = torch.empty_like(order_N).scatter_(0, order_N, places)
        weight_N = weights_Tk.flatten()[order_N]
        back_Tk = back_N.view_as(chosen_Tk)
        return cls(order_N // per_token, experts_N, stops_E, back_Tk, weight_N)


@dataclass(slots=True)
class KeptBlock:
    """What a block keeps for its backward pass."""

    sorted: Sorted
    chosen_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor
    log_total_T: Tensor
    gate_up_NX: Tensor | None
    inner: dict[str, list[Any]]
    shared: tuple[Tensor, Tensor, Tensor] | None = None


def grouped(a: Tensor, b_E: Tensor, stops_E: Tensor) -> Tensor:
    """Each expert's rows of `a` times its matrix [I, O]."""
    return torch._grouped_mm(a, b_E, offs=stops_E)


@dataclass(frozen=True, slots=True)
class Routed:
    """See `model.mixture.route`; the logits are fp32 sums in one order."""

    logits_TE: Tensor
    chosen_Tk: Tensor
    weights_Tk: Tensor
    entropy_T: Tensor
    log_total_T: Tensor
    own_Tk: Tensor
    """What the router chose, whatever it was given."""

    @classmethod
    def of(
        cls, config: ExpertsConfig, w: MixtureWeights, y_TD: Tensor, given_Tk: Tensor | None
    ) -> Routed:
        logits_TE = product(y_TD, w.router_ED, w.router_bias_E, torch.float32)
        chosen, weights, entropy, total = kernels.route(
            logits_TE, config.per_token, config.normalised, given_Tk
        )
        own = chosen if given_Tk is None else logits_TE.topk(config.per_token, dim=-1).indices
        return cls(logits_TE, chosen, weights, entropy, total, own)


def forward(
    config: ExpertsConfig,
    w: MixtureWeights,
    layer_index: int,
    y_TD: Tensor,
    members: Sequence[AdapterTokens],
    routing: Routing | None = None,
) -> tuple[Tensor, KeptBlock]:
    """What the experts add to the residual (without a shared one)."""
    given = None if routing is None else routing.given.get(layer_index)
    routed = Routed.of(config, w, y_TD, given)
    chosen_Tk, weights_Tk = routed.chosen_Tk, routed.weights_Tk
    if routing is not None:
        routing.chosen[layer_index] = chosen_Tk
        if given is not None:
            routing.own[layer_index] = routed.own_Tk
        routing.entropy[layer_index] = routed.entropy_T
    s = Sorted.of(chosen_Tk, weights_Tk, config.count)
    inner: dict[str, list[Any]] = {}
    gate_up_NX, inner["gate_up"] = gate_up(config, w, layer_index, y_TD, s, members)
    act_NM = kernels.activate(gate_up_NX, s.weight_N, config.clamp)
    out_ND = grouped(act_NM, expanded(w.down_EDM).transpose(1, 2), s.stops_E)
    inner["down"] = _add_adapters(out_ND, act_NM, s, members, config, layer_index, "down")
    bias = None if w.down_bias_ED is None else (w.down_bias_ED, chosen_Tk, weights_Tk)
    out_TD = kernels.gather_sum(out_ND, s.back_Tk, bias)
    logits_TE, total_T = routed.logits_TE, routed.log_total_T
    saved = KeptBlock(s, chosen_Tk, weights_Tk, logits_TE, total_T, gate_up_NX, inner)
    return out_TD, saved


def gate_up(
    config: ExpertsConfig,
    w: MixtureWeights,
    layer_index: int,
    y_TD: Tensor,
    s: Sorted,
    members: Sequence[AdapterTokens],
) -> tuple[Tensor, list[Tensor]]:
    """The first product of all experts, and the adapters' inner products."""
    x_ND = y_TD[s.rows_N]
    gate_up_NX = grouped(x_ND, expanded(w.gate_up_EXD).transpose(1, 2), s.stops_E)
    if w.gate_up_bias_EX is not None:
        gate_up_NX += w.gate_up_bias_EX[s.experts_N]
    inner = _add_adapters(gate_up_NX, x_ND, s, members, config, layer_index, "gate_up")
    return gate_up_NX, inner


def backward(
    config: ExpertsConfig,
    w: MixtureWeights,
    layer_index: int,
    s: KeptBlock,
    y_TD: Tensor,
    dout_TD: Tensor,
    members: Sequence[AdapterTokens],
) -> Tensor:
    """The gradient of `y_TD`; the adapters' are added to their buffers. Consumes what was saved."""
    rows, stops_E = s.sorted.rows_N, s.sorted.stops_E
    assert s.gate_up_NX is not None
    dout_ND = dout_TD[rows]
    dact_NM = grouped(dout_ND, expanded(w.down_EDM), stops_E)
    downs = list(_each(members, s.sorted, config, layer_index, "down"))
    dinner = [one.backward_input_(dact_NM, dout_ND) for one in downs]
    act_NM, dweight_N = kernels.activate_backward_(
        dact_NM, s.gate_up_NX, s.sorted.weight_N, config.clamp
    )
    for one, h, dh in zip(downs, s.inner["down"], dinner, strict=True):
        one.gather(act_NM, h, dout_ND, dh)
    del dact_NM, act_NM, dout_ND
    dgate_up_NX = s.gate_up_NX
    dx_ND = grouped(dgate_up_NX, expanded(w.gate_up_EXD), stops_E)
    ups = list(_each(members, s.sorted, config, layer_index, "gate_up"))
    if ups:
        x_ND = y_TD[rows]
        for one, h in zip(ups, s.inner["gate_up"], strict=True):
            dh = one.backward_input_(dx_ND, dgate_up_NX)
            one.gather(x_ND, h, dgate_up_NX, dh)
        del x_ND
    dy_TD = kernels.gather_sum(dx_ND, s.sorted.back_Tk)
    dweights_Tk = dweight_N[s.sorted.back_Tk]
    if w.down_bias_ED is not None:
        dweights_Tk = dweights_Tk + (dout_TD @ w.down_bias_ED.t()).float().gather(1, s.chosen_Tk)
    dlogits_TE = _router_backward(config, s, dweights_Tk)
    return dy_TD.add_(dlogits_TE.to(dy_TD.dtype) @ w.router_ED)


def _router_backward(config: ExpertsConfig, s: KeptBlock, dweights_Tk: Tensor) -> Tensor:
    share_Tk = s.weights_Tk * dweights_Tk
    inside_T1 = share_Tk.sum(-1, keepdim=True)
    if config.normalised:  # a softmax over the chosen
        return _spread(share_Tk - s.weights_Tk * inside_T1, s.chosen_Tk, config.count)
    every_TE = (s.logits_TE - s.log_total_T[:, None]).exp()
    return _spread(share_Tk, s.chosen_Tk, config.count) - every_TE * inside_T1


def _spread(values_Tk: Tensor, chosen_Tk: Tensor, count: int) -> Tensor:
    return values_Tk.new_zeros(len(values_Tk), count).scatter_(1, chosen_Tk, values_Tk)


# ------------------------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True)
class _Adapted:
    """One adapter on one linear of all experts, over its own sorted rows."""

    place: _Place
    member: AdapterTokens
    at_n: Tensor | None
    """Its rows among the sorted ones; None: all."""
    stops_E: Tensor
    mask_N: Tensor | None
    count: int

    def add_(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        A, Bs = self.place.views(self.member.flat_P, self.count)
        x = x_NI if self.at_n is None else x_NI[self.at_n]
        h_nR = grouped(x, A.transpose(1, 2), self.stops_E)
        if self.mask_N is not None:
            h_nR *= self.mask_N[:, None]
        for B, part in zip(Bs, self.place.parts, strict=True):
            y = self._outer(h_nR, B, part)
            columns = slice(part.target.start, part.target.stop)
            if self.at_n is None:
                y_NO[:, columns] += y
            else:
                y_NO[:, columns].index_add_(0, self.at_n, y)
        return h_nR

    def _outer(self, h_nR: Tensor, B: Tensor, part: LoraPart) -> Tensor:
        h_nr = h_nR[:, part.row : part.row + part.rank].contiguous()
        return grouped(h_nr * part.scale, B.transpose(1, 2), self.stops_E)

    def backward_input_(self, dx_NI: Tensor, dy_NO: Tensor) -> Tensor:
        """dx += the gradient through the adapter; returns that of the inner product."""
        A, Bs = self.place.views(self.member.flat_P, self.count)
        dy = dy_NO if self.at_n is None else dy_NO[self.at_n]
        dh_nR = dy.new_empty(len(dy), A.shape[1])
        for B, part in zip(Bs, self.place.parts, strict=True):
            columns = dy[:, part.target.start : part.target.stop].contiguous()
            dh_nr = grouped(columns, B, self.stops_E)
            dh_nR[:, part.row : part.row + part.rank] = dh_nr * part.scale
        dx = grouped(dh_nR, A, self.stops_E)
        if self.at_n is None:
            dx_NI += dx
        else:
            dx_NI.index_add_(0, self.at_n, dx)
        return dh_nR

    def gather(self, x_NI: Tensor, h_nR: Tensor, dy_NO: Tensor, dh_nR: Tensor) -> None:
        grad_P = self.member.grad_P
        assert grad_P is not None
        dA, dBs = self.place.views(grad_P, self.count)
        x = x_NI if self.at_n is None else x_NI[self.at_n]
        dy = dy_NO if self.at_n is None else dy_NO[self.at_n]
        dA.add_(torch._grouped_mm(dh_nR.t(), x, offs=self.stops_E))
        for dB, part in zip(dBs, self.place.parts, strict=True):
            h_nr = h_nR[:, part.row : part.row + part.rank].contiguous()
            columns = dy[:, part.target.start : part.target.stop].contiguous()
            dB.add_(torch._grouped_mm(columns.t(), h_nr, offs=self.stops_E), alpha=part.scale)


def _each(
    members: Sequence[AdapterTokens], s: Sorted, config: ExpertsConfig, layer_index: int, name: str
) -> Iterator[_Adapted]:
    num_tokens = len(s.back_Tk)
    for member in members:
        place = place_of(member.adapter, layer_index, name, config.count)
        if place is None:
            continue
        mask = None if member.mask_T is None else member.mask_T[s.rows_N].to(member.flat_P.dtype)
        if member.start == 0 and member.stop == num_tokens:
            yield _Adapted(place, member, None, s.stops_E, mask, config.count)
            continue
        at_n = s.back_Tk[member.start : member.stop].flatten().sort().values
        every = torch.arange(config.count, device=at_n.device)
        stops_E = torch.searchsorted(s.experts_N[at_n], every, right=True, out_int32=True)
        yield _Adapted(place, member, at_n, stops_E, mask, config.count)


def _add_adapters(
    y_NO: Tensor,
    x_NI: Tensor,
    s: Sorted,
    members: Sequence[AdapterTokens],
    config: ExpertsConfig,
    layer_index: int,
    name: str,
) -> list[Tensor]:
    return [one.add_(y_NO, x_NI) for one in _each(members, s, config, layer_index, name)]
