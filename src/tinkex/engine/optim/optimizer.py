"""The optimizer of an adapter: its state, and one step.

State is fp32 and lives beside the weights. A step takes the gathered gradients, measures their
global norm, clips, and updates in place; parameters are checked before anything changes. What each
optimizer does is `updates`; which adapter is stepped, and when, is the trainer's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.contract.optimizers import OptimizerParams, check_params
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.optim.updates import UPDATES


@dataclass(slots=True)
class OptimizerState:
    """Moments by name, each a buffer of the adapter's layout."""

    kind: str
    step: int = 0
    moments: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def fresh(kind: str, adapter: Adapter) -> OptimizerState:
        moments = {name: torch.zeros_like(adapter.flat) for name in UPDATES[kind].moments}
        return OptimizerState(kind, 0, moments)


def scratch_bytes(adapter: Adapter, state: OptimizerState) -> int:
    """Bytes that a step needs beside weights, gradients and moments."""
    own, whole = UPDATES[state.kind].scratch
    num_numbers = own * adapter.flat.numel() + whole * adapter.num_whole
    return num_numbers * adapter.flat.element_size()


def make_room(adapter: Adapter, state: OptimizerState) -> None:
    """Take the memory of a step and give it back, so that a step that begins also ends.

    Raises:
        RuntimeError, MemoryError: There is none; nothing has changed.
    """
    torch.empty(scratch_bytes(adapter, state), dtype=torch.uint8, device=adapter.flat.device)


def apply_step(
    adapter: Adapter, state: OptimizerState, grad: Tensor, params: OptimizerParams, ops: Ops
) -> float:
    """Update the adapter in place; returns the gradient norm before clipping. Consumes `grad`."""
    check_params(state.kind, params)
    norm = adapter.norm(grad, ops)
    if 0 < params.grad_clip_norm < norm:
        grad *= params.grad_clip_norm / norm
    state.step += 1
    # Decoupled from the gradient (Loshchilov and Hutter, arXiv 1711.05101), for all optimizers.
    if params.weight_decay:
        adapter.flat *= 1 - params.learning_rate * params.weight_decay
    UPDATES[state.kind].step(ops, adapter, state.moments, grad, state.step, params)
    return norm
