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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tinkex.engine.cuda import mixture_kernels as kernels
from tinkex.engine.cuda.adapter_layout import EXPERTS
from tinkex.engine.cuda.adapter_operand import AdapterTokens, Weights, grad_of
from tinkex.engine.cuda.product import product
from tinkex.engine.lora.adapter import Adapter, LoraPart
from tinkex.engine.model.mixture import MixtureWeights, Routing
from tinkex.engine.model.shape import ExpertsConfig
from tinkex.engine.numerics.mxfp4 import expanded

# ---------------------------------------------------------------------------- stacked adapters


_Linear = tuple[tuple[LoraPart, ...], list[tuple[int, tuple[int, int]]]]
"""The modules of one expert's linear; where A and each B lie in the buffer, and their shapes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A linear of all experts of a block: where expert 0's is, and the distance to the next."""

    first: _Linear
    step: int

    def views(self, flat_P: Tensor, count: int) -> Weights:
        """A [E, R, I] and the Bs [E, O, r] in a buffer of the adapter's layout."""
        (parts, spots), offset = self.first, flat_P.storage_offset()
        A, *Bs = (
            flat_P.as_strided((count, *shape), (self.step, shape[1], 1), offset + at)
            for at, shape in spots
        )
        return Weights(A, tuple(Bs), parts)


_PLACES: WeakKeyDictionary[Adapter, dict[str, _Place | None]] = WeakKeyDictionary()
"""By adapter: an adapter of experts has thousands of linears, too many to look at in each pass."""


def can_stack(adapter: Adapter, count: int) -> bool:
    """Whether the experts of every block carry the same ranks and scales, in multiples of 8."""
    return None not in _places(adapter, count).values()


def _places(adapter: Adapter, count: int) -> dict[str, _Place | None]:
    """By block and linear, such as `3.gate_up`; None: the experts' adapters cannot be stacked."""
    places = _PLACES.get(adapter)
    if places is None:
        linears: defaultdict[str, dict[int, _Linear]] = defaultdict(dict)
        spots = iter(adapter.layout)
        for key, group in adapter.groups.items():
            own = [next(spots) for _ in group.tensors()]
            if EXPERTS in key:  # the inverse of `expert_key`
                layer, expert, name = key.replace(EXPERTS, ".").split(".")
                linears[f"{layer}.{name}"][int(expert)] = group.parts, own
        places = {key: _place(experts, count) for key, experts in linears.items()}
        _PLACES[adapter] = places
    return places


def _place(experts: Mapping[int, _Linear], count: int) -> _Place | None:
    if sorted(experts) != list(range(count)):
        return None
    parts, spots = experts[0]
    step = experts[1][1][0][0] - spots[0][0] if count > 1 else 0
    kinds = [(part.row, part.rank, part.scale) for part in parts]
    for expert, (own_parts, own_spots) in experts.items():
        alike = [(part.row, part.rank, part.scale) for part in own_parts] == kinds
        if not alike or own_spots != [(at + expert * step, shape) for at, shape in spots]:
            return None
    # Grouped products read rows in pieces of 16 bytes.
    return None if any(part.rank % 8 for part in parts) else _Place((parts, spots), step)


# ------------------------------------------------------------------------------- one batch

_FEW = 16384
"""Up to so many rows one kernel sorts; above, torch's sort is faster."""


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
        # Stable, as the kernel's: the order of an expert's rows is that of their tokens.
        experts_N, order_N = chosen_Tk.flatten().sort(stable=True)
        places = torch.arange(num, device=chosen_Tk.device)
        back_N = torch.empty_like(order_N).scatter_(0, order_N, places)
        weight_N = weights_Tk.flatten()[order_N]
        stops_E, back_Tk = _stops(experts_N, count), back_N.view_as(chosen_Tk)
        return cls(order_N // per_token, experts_N, stops_E, back_Tk, weight_N)


def _stops(experts_N: Tensor, count: int) -> Tensor:
    """Where each expert's rows end, found on the device: the host must not wait for a count."""
    every_E = torch.arange(count, device=experts_N.device)
    return torch.searchsorted(experts_N, every_E, right=True, out_int32=True)


@dataclass(frozen=True, slots=True)
class Routed:
    """See `model.mixture.route`; the logits are fp32 sums in one order."""

    logits_TE: Tensor
    chosen_Tk: Tensor
    weights_Tk: Tensor
    log_total_T: Tensor


@dataclass(slots=True)
class KeptBlock:
    """The tensors that a block keeps for its backward pass."""

    sorted: Sorted
    routed: Routed
    gate_up_NX: Tensor | None
    inner: dict[str, list[Tensor]]


def grouped(a: Tensor, b_E: Tensor, stops_E: Tensor) -> Tensor:
    """Each expert's rows of `a` times its matrix [I, O]; or, of two matrices that lie row by row,
    the product over each expert's rows."""
    return torch._grouped_mm(a, b_E, offs=stops_E)


@dataclass(frozen=True, slots=True)
class Block:
    """The experts of one layer, without a shared one, and the batch's adapters on them."""

    config: ExpertsConfig
    weights: MixtureWeights
    layer_index: int
    members: Sequence[AdapterTokens]

    def forward(self, y_TD: Tensor, routing: Routing | None) -> tuple[Tensor, KeptBlock]:
        """The experts' sum, which is added to the residual."""
        w, config = self.weights, self.config
        routed = self._route(y_TD, routing)
        s = Sorted.of(routed.chosen_Tk, routed.weights_Tk, config.count)
        inner: dict[str, list[Tensor]] = {}
        gate_up_NX, inner["gate_up"] = self.gate_up(y_TD, s)
        act_NM = kernels.activate(gate_up_NX, s.weight_N, config.clamp)
        out_ND = grouped(act_NM, expanded(w.down_EDM).transpose(1, 2), s.stops_E)
        inner["down"] = [one.add_(out_ND, act_NM) for one in self._adapters("down", s)]
        bias = None
        if w.down_bias_ED is not None:
            bias = (w.down_bias_ED, routed.chosen_Tk, routed.weights_Tk)
        out_TD = kernels.gather_sum(out_ND, s.back_Tk, bias)
        return out_TD, KeptBlock(s, routed, gate_up_NX, inner)

    def _route(self, y_TD: Tensor, routing: Routing | None) -> Routed:
        w, k = self.weights, self.config.per_token
        given_Tk = None if routing is None else routing.given.get(self.layer_index)
        logits_TE = product(y_TD, w.router_ED, w.router_bias_E, torch.float32)
        chosen_Tk, weights_Tk, entropy_T, total_T = kernels.route(
            logits_TE, k, self.config.normalised, given_Tk
        )
        if routing is not None:
            routing.chosen[self.layer_index] = chosen_Tk
            if given_Tk is not None:
                routing.own[self.layer_index] = logits_TE.topk(k, dim=-1).indices
            routing.entropy[self.layer_index] = entropy_T
        return Routed(logits_TE, chosen_Tk, weights_Tk, total_T)

    def gate_up(self, y_TD: Tensor, s: Sorted) -> tuple[Tensor, list[Tensor]]:
        """The first product of all experts, and the adapters' inner products."""
        w, x_ND = self.weights, y_TD[s.rows_N]
        gate_up_NX = grouped(x_ND, expanded(w.gate_up_EXD).transpose(1, 2), s.stops_E)
        if w.gate_up_bias_EX is not None:
            gate_up_NX += w.gate_up_bias_EX[s.experts_N]
        return gate_up_NX, [one.add_(gate_up_NX, x_ND) for one in self._adapters("gate_up", s)]

    def backward(self, saved: KeptBlock, y_TD: Tensor, dout_TD: Tensor) -> Tensor:
        """The gradient of `y_TD`; the adapters' are added to their buffers.

        Consumes what was saved.
        """
        w, s, routed, dgate_up_NX = self.weights, saved.sorted, saved.routed, saved.gate_up_NX
        assert dgate_up_NX is not None
        dout_ND = dout_TD[s.rows_N]
        dact_NM = grouped(dout_ND, expanded(w.down_EDM), s.stops_E)
        downs = list(self._adapters("down", s))
        dinner = [one.backward_input_(dact_NM, dout_ND) for one in downs]
        act_NM, dweight_N = kernels.activate_backward_(
            dact_NM, dgate_up_NX, s.weight_N, self.config.clamp
        )
        for one, h, dh in zip(downs, saved.inner["down"], dinner, strict=True):
            one.gather(act_NM, h, dout_ND, dh)
        del dact_NM, act_NM, dout_ND
        dx_ND = grouped(dgate_up_NX, expanded(w.gate_up_EXD), s.stops_E)
        ups = list(self._adapters("gate_up", s))
        if ups:
            x_ND = y_TD[s.rows_N]
            for one, h in zip(ups, saved.inner["gate_up"], strict=True):
                dh = one.backward_input_(dx_ND, dgate_up_NX)
                one.gather(x_ND, h, dgate_up_NX, dh)
            del x_ND
        dy_TD = kernels.gather_sum(dx_ND, s.back_Tk)
        dweights_Tk = dweight_N[s.back_Tk]
        if w.down_bias_ED is not None:
            by_bias_TE = (dout_TD @ w.down_bias_ED.t()).float()
            dweights_Tk = dweights_Tk + by_bias_TE.gather(1, routed.chosen_Tk)
        dlogits_TE = _router_backward(self.config, routed, dweights_Tk)
        return dy_TD.add_(dlogits_TE.to(dy_TD.dtype) @ w.router_ED)

    def _adapters(self, name: str, s: Sorted) -> Iterator[_Adapted]:
        """The adapters on one linear, each over its own rows."""
        num_tokens, count = len(s.back_Tk), self.config.count
        for member in self.members:
            place = _places(member.adapter, count).get(f"{self.layer_index}.{name}")
            if place is None:
                continue
            mask = None
            if member.mask_T is not None:
                mask = member.mask_T[s.rows_N].to(member.flat_P.dtype)
            if member.start == 0 and member.stop == num_tokens:
                yield _Adapted(place, member, None, s.stops_E, mask, count)
                continue
            # Sorted places are in the order of experts, as grouped products want their rows.
            at_n = s.back_Tk[member.start : member.stop].flatten().sort().values
            stops_E = _stops(s.experts_N[at_n], count)
            yield _Adapted(place, member, at_n, stops_E, mask, count)


def _router_backward(config: ExpertsConfig, r: Routed, dweights_Tk: Tensor) -> Tensor:
    """The gradient of the router's logits, [T, E]."""
    share_Tk = r.weights_Tk * dweights_Tk
    inside_T1 = share_Tk.sum(-1, keepdim=True)
    if config.normalised:  # a softmax over the chosen
        return _spread(share_Tk - r.weights_Tk * inside_T1, r.chosen_Tk, config.count)
    every_TE = (r.logits_TE - r.log_total_T[:, None]).exp()
    return _spread(share_Tk, r.chosen_Tk, config.count) - every_TE * inside_T1


def _spread(values_Tk: Tensor, chosen_Tk: Tensor, count: int) -> Tensor:
    return values_Tk.new_zeros(len(values_Tk), count).scatter_(1, chosen_Tk, values_Tk)


# ------------------------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True)
class _Adapted:
    """An adapter on one linear of all experts, over its own sorted rows."""

    place: _Place
    member: AdapterTokens
    at_n: Tensor | None
    """Its rows among the sorted ones; None: all."""
    stops_E: Tensor
    mask_N: Tensor | None
    count: int

    def _weights(self) -> Weights:
        return self.place.views(self.member.flat_P, self.count)

    def _own(self, values_NX: Tensor) -> Tensor:
        return values_NX if self.at_n is None else values_NX[self.at_n]

    def _add_own_(self, values_NX: Tensor, more_nX: Tensor) -> None:
        if self.at_n is None:
            values_NX += more_nX
        else:
            values_NX.index_add_(0, self.at_n, more_nX)

    def add_(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """y += the adapter's product; returns the inner one."""
        weights = self._weights()
        h_nR = grouped(self._own(x_NI), weights.A.transpose(1, 2), self.stops_E)
        if self.mask_N is not None:
            h_nR *= self.mask_N[:, None]
        for B, ranks, columns, scale in weights.each():
            h_nr = h_nR[:, ranks].contiguous()
            y_no = grouped(h_nr * scale, B.transpose(1, 2), self.stops_E)
            self._add_own_(y_NO[:, columns], y_no)
        return h_nR

    def backward_input_(self, dx_NI: Tensor, dy_NO: Tensor) -> Tensor:
        """dx += the gradient through the adapter; returns that of the inner product."""
        weights, dy = self._weights(), self._own(dy_NO)
        dh_nR = dy.new_empty(len(dy), weights.A.shape[1])
        for B, ranks, columns, scale in weights.each():
            dh_nR[:, ranks] = grouped(dy[:, columns].contiguous(), B, self.stops_E) * scale
        self._add_own_(dx_NI, grouped(dh_nR, weights.A, self.stops_E))
        return dh_nR

    def gather(self, x_NI: Tensor, h_nR: Tensor, dy_NO: Tensor, dh_nR: Tensor) -> None:
        """Add the gradients of A (dh^T x) and of the Bs (dy^T h) to the adapter's buffer."""
        grads = self.place.views(grad_of(self.member.adapter), self.count)
        x, dy = self._own(x_NI), self._own(dy_NO)
        grads.A.add_(grouped(dh_nR.t(), x, self.stops_E))
        for dB, ranks, columns, scale in grads.each():
            h_nr, dy_no = h_nR[:, ranks].contiguous(), dy[:, columns].contiguous()
            dB.add_(grouped(dy_no.t(), h_nr, self.stops_E), alpha=scale)
