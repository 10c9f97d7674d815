"""Optimizers over an adapter's tensors: AdamW as AdamParams says, and Muon.

State is fp32 and lives beside the weights. A step takes the gathered gradients, measures their
global norm, clips, and updates in place; parameters are checked before anything changes. Which
adapter is stepped, and when, is the trainer's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tinkex.engine.jobs import AdamParams, MuonParams
from tinkex.engine.lora.adapter import Adapter
from tinkex.errors import InvalidInputError

OptimizerKind = Literal["adamw", "muon"]
MOMENTS: dict[OptimizerKind, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum",),
}
"""The state that each optimizer keeps per parameter."""


@dataclass(slots=True)
class OptimizerState:
    """Moments by name, each a buffer of the adapter's layout."""

    kind: OptimizerKind
    step: int = 0
    moments: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def fresh(kind: OptimizerKind, adapter: Adapter) -> OptimizerState:
        return OptimizerState(
            kind, 0, {name: torch.zeros_like(adapter.flat) for name in MOMENTS[kind]}
        )


def check_params(kind: OptimizerKind, params: AdamParams | MuonParams) -> None:
    """Refuse settings that no step may be taken with."""
    given = "muon" if isinstance(params, MuonParams) else "adamw"
    if given != kind:
        raise InvalidInputError(
            f"this adapter was created with optimizer {kind!r}; got parameters of {given!r}",
            path="optim_params",
        )
    ranges = {"learning_rate": math.inf, "weight_decay": math.inf, "grad_clip_norm": math.inf}
    ranges |= {"momentum": 1.0} if isinstance(params, MuonParams) else {"beta1": 1.0, "beta2": 1.0}
    for name, stop in ranges.items():
        value = float(getattr(params, name))
        if not (math.isfinite(value) and 0 <= value < stop):
            below = f" and below {stop:g}" if stop != math.inf else ""
            raise InvalidInputError(
                f"must be a finite number, at least 0{below}; got {value}",
                path=f"optim_params.{name}",
            )
    if isinstance(params, AdamParams) and not (math.isfinite(params.eps) and params.eps > 0):
        raise InvalidInputError(
            f"must be positive, got {params.eps}: untouched weights would become 0/0",
            path="optim_params.eps",
        )


def apply_step(
    adapter: Adapter, state: OptimizerState, grad: Tensor, params: AdamParams | MuonParams
) -> float:
    """Update the adapter in place; returns the gradient norm before clipping. Consumes `grad`."""
    check_params(state.kind, params)
    norm = global_norm(grad)
    if 0 < params.grad_clip_norm < norm:
        grad *= params.grad_clip_norm / norm
    state.step += 1
    if params.weight_decay:
        adapter.flat *= 1 - params.learning_rate * params.weight_decay
    if isinstance(params, MuonParams):
        _muon(adapter, state, grad, params)
    else:
        _adamw(adapter.flat, state, grad, params)
    return norm


def global_norm(grad: Tensor) -> float:
    """The 2-norm of all values together, as one number on the host."""
    return float(torch.linalg.vector_norm(grad, dtype=torch.float64))


def _adamw(weights: Tensor, state: OptimizerState, grad: Tensor, params: AdamParams) -> None:
    first, second = state.moments["exp_avg"], state.moments["exp_avg_sq"]
    first.lerp_(grad, 1 - params.beta1)
    second.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1 = 1 - params.beta1**state.step
    correction2 = 1 - params.beta2**state.step
    denominator = second.sqrt().div_(math.sqrt(correction2)).add_(params.eps)
    weights.addcdiv_(first, denominator, value=-params.learning_rate / correction1)


def _muon(adapter: Adapter, state: OptimizerState, grad: Tensor, params: MuonParams) -> None:
    """Momentum, then every module's matrix is replaced by its nearest orthogonal one.

    The stacked A of a fused linear is taken apart: each module is a matrix of its own.
    """
    momentum = state.moments["momentum"].mul_(params.momentum).add_(grad)
    looked_ahead = adapter.views(grad + params.momentum * momentum)
    weights, at = adapter.views(adapter.flat), 0
    for group in adapter.groups.values():
        rows = [(part.row, part.row + part.rank) for part in group.parts]
        for pieces in [rows, *([(0, len(b_Or))] for b_Or in group.b_Or)]:
            for start, stop in pieces:
                update = orthogonalize(looked_ahead[at][start:stop])
                scale = math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
                weights[at][start:stop].add_(update, alpha=-params.learning_rate * scale)
            at += 1


def orthogonalize(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Push all singular values of a matrix towards one (quintic Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.t() if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if tall else x
