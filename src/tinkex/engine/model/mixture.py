"""A mixture of experts in place of the dense MLP: route, sort rows by expert, one product each.

The router gives every token a probability per expert; the best few compute it, and their outputs
are summed with those probabilities. No token is ever dropped. Every expert is a pair of linears of
its own and carries its own adapters; the router carries none. `Routing` watches which experts
were chosen, and can prescribe them: a token that a sampler routed is then trained on the same path.

Shapes: T rows, D hidden size, E experts, M size of an expert, k experts of a row, t rows of one
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.lora.adapter import NO_TERMS, LoraBatch, Target
from tinkex.engine.model.layers import linear, wide
from tinkex.engine.model.shape import ExpertsConfig, ModelConfig
from tinkex.engine.numerics.mxfp4 import Matrix, Stack

_ALPHA = 1.702
Biased = tuple[Matrix, Tensor | None]
"""The weight and the bias of a linear."""


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The weights of one block. Gate and up lie side by side in the rows of `gate_up_EXD`.

    The experts' matrices may be packed: whoever multiplies with one expands it first.
    """

    router_ED: Tensor
    router_bias_E: Tensor | None
    gate_up_EXD: Stack
    gate_up_bias_EX: Tensor | None
    down_EDM: Stack
    down_bias_ED: Tensor | None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate_1D: Tensor | None = None
    first: int = 0
    """The first expert whose weights are here; a rank of a group has some of them."""

    def expert(self, number: int) -> tuple[Biased, Biased]:
        """The two linears of an expert whose weights are here."""
        at = number - self.first
        bias_X = None if self.gate_up_bias_EX is None else self.gate_up_bias_EX[at]
        bias_D = None if self.down_bias_ED is None else self.down_bias_ED[at]
        return (self.gate_up_EXD[at], bias_X), (self.down_EDM[at], bias_D)


@dataclass(slots=True)
class Routing:
    """Which experts the rows of one pass went to, by layer; `given` says where they have to go."""

    given: Mapping[int, Tensor] = field(default_factory=dict)
    """[T, k] by layer; -1 in a row: the router chooses."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] by layer, where any are given: what the router would have chosen."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """[T, k] by layer."""
    entropy: dict[int, Tensor] = field(default_factory=dict)
    """[T] by layer, in nats: log E when the router is indifferent."""


def expert_key(layer_index: int, expert: int) -> str:
    """The beginning of the decoder's keys for the linears of an expert."""
    return f"{layer_index}.experts.{expert}."


def mlp_targets(key: str, module: str, hidden: int, size: int) -> dict[str, Target]:
    """The two fused linears of an MLP, dense or of one expert, by the decoder's keys for them."""
    return {
        f"{key}gate_up": Target.of(hidden, "mlp", module, gate_proj=size, up_proj=size),
        f"{key}down": Target.of(size, "mlp", module, down_proj=hidden),
    }


def mixture_targets(config: ModelConfig, layer_index: int) -> dict[str, Target]:
    """Every linear of one block that can carry an adapter."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    block, targets = f"model.layers.{layer_index}.mlp", dict[str, Target]()
    for expert in range(experts.count):
        key = expert_key(layer_index, expert)
        targets |= mlp_targets(key, f"{block}.experts.{expert}", hidden, experts.size)
    if size := experts.shared_size:
        targets |= mlp_targets(f"{layer_index}.shared.", f"{block}.shared_expert", hidden, size)
    return targets


def route(
    config: ExpertsConfig,
    weights: MixtureWeights,
    y_TD: Tensor,
    given_Tk: Tensor | None = None,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(experts of each row, best first; their weights; log-probabilities of all), in fp32.

    With `agree`, the choice is what that makes of it: all ranks of a group make the same.
    """
    logits_TE = wide(linear(y_TD, weights.router_ED, weights.router_bias_E, NO_TERMS))
    logp_TE = logits_TE.log_softmax(-1)
    chosen_Tk = logits_TE.topk(config.per_token, dim=-1).indices
    if given_Tk is not None:
        chosen_Tk = torch.where(given_Tk[:, :1] < 0, chosen_Tk, given_Tk.to(chosen_Tk))
    if agree is not None:
        chosen_Tk = agree(chosen_Tk)
    # Shares of all experts, or of the chosen ones only where the family normalises them.
    weights_Tk = logp_TE.gather(1, chosen_Tk).exp()
    if config.normalised:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return chosen_Tk, weights_Tk, logp_TE


def combine(config: ExpertsConfig, gate_up: Tensor) -> Tensor:
    """Gate and up of one linear, as the family combines them."""
    if config.clamp is not None:
        clamped: Tensor = _Clamped.apply(gate_up, config.clamp)  # type: ignore[no-untyped-call]
        return clamped
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Clamped(torch.autograd.Function):
    """gate * sigmoid(1.702 gate) * (up + 1), both cut; keeps nothing but its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * _ALPHA) * (up + 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up,), limit = ctx.saved_tensors, ctx.limit
        gate, up = gate_up.chunk(2, dim=-1)
        cut = gate.clamp(max=limit)
        open_ = torch.sigmoid(cut * _ALPHA)
        slope = open_ * (1 + _ALPHA * cut * (1 - open_)) * (up.clamp(-limit, limit) + 1)
        d_gate = dy * slope * (gate <= limit)
        d_up = dy * cut * open_ * (up.abs() <= limit)
        return torch.cat([d_gate, d_up], dim=-1), None


def mixture(
    config: ExpertsConfig,
    weights: MixtureWeights,
    layer_index: int,
    y_TD: Tensor,
    lora: LoraBatch | None,
    routing: Routing | None = None,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The block's output for the residual, as far as its experts are here; `y_TD` is normed."""
    lora = lora or LoraBatch(())
    given = None if routing is None else routing.given.get(layer_index)
    chosen_Tk, weights_Tk, logp_TE = route(config, weights, y_TD, given, agree)
    if routing is not None:
        routing.chosen[layer_index] = chosen_Tk
        if given is not None:
            routing.own[layer_index] = logp_TE.detach().topk(config.per_token, dim=-1).indices
        with torch.no_grad():
            routing.entropy[layer_index] = -(logp_TE.exp() * logp_TE).sum(-1)
    # Stable: rows of one expert keep their order, so that spans of adapters stay contiguous.
    order = chosen_Tk.flatten().argsort(stable=True)
    rows = order // config.per_token
    counts = torch.bincount(chosen_Tk.flatten(), minlength=config.count).tolist()
    row_numbers = rows.cpu().numpy()
    pieces, start = [], 0
    for expert, x_tD in enumerate(y_TD[rows].split(counts)):
        stop = start + counts[expert]
        if not 0 <= expert - weights.first < weights.down_EDM.shape[0]:
            # An expert of another rank, whose output the sum over all ranks brings.
            pieces.append(torch.zeros_like(x_tD))
        elif stop > start:
            own = lora.select(row_numbers[start:stop]) if lora.spans else lora
            key = expert_key(layer_index, expert)
            pieces.append(_mlp(config, x_tD, *weights.expert(expert), own, key))
        start = stop
    # Each row sums its experts in the order of their rank, whoever else is in the batch.
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    out_TkD = torch.cat(pieces)[back].unflatten(0, (-1, config.per_token))
    out_TD: Tensor = (out_TkD * weights_Tk.to(out_TkD.dtype).unsqueeze(-1)).sum(1)
    if weights.shared_gate_1D is None:
        return out_TD
    assert weights.shared_gate_up is not None
    assert weights.shared_down is not None
    gate_up, down = (weights.shared_gate_up, None), (weights.shared_down, None)
    shared_TD = _mlp(config, y_TD, gate_up, down, lora, f"{layer_index}.shared.")
    gate_T1 = torch.sigmoid(linear(y_TD, weights.shared_gate_1D, None, NO_TERMS))
    return out_TD + shared_TD * gate_T1


def _mlp(
    config: ExpertsConfig,
    x_tD: Tensor,
    gate_up: Biased,
    down: Biased,
    lora: LoraBatch,
    key: str,
) -> Tensor:
    """The output of one expert for its rows; `key` is that of `mlp_targets`."""
    act = combine(config, linear(x_tD, *gate_up, lora.terms(f"{key}gate_up")))
    return linear(act, *down, lora.terms(f"{key}down"))
