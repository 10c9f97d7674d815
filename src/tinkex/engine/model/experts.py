"""Mixture-of-experts blocks of transformers models, with an adapter on every expert.

transformers keeps the experts of a block in two fused tensors, where an adapter has nothing to hold
on to. Here they run one by one as the linears they are, under the names they have as such
(`experts.3.gate_proj`), each on the rows that were routed to it. Routing itself is not adapted.

Letters: T rows, D hidden size, E experts, M size of an expert, k experts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.lora.adapter import LoraBatch, Target
from tinkex.engine.model.layers import linear
from tinkex.engine.model.mixture import mlp_targets


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is such a block and computes as `Experts` does."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        all(isinstance(w, Tensor) and w.ndim == 3 for w in (gate_up, down))
        and hasattr(module, "act_fn")
        and not any(getattr(module, flag, False) for flag in ("has_bias", "is_transposed"))
        and getattr(module, "is_concatenated", True)
        and getattr(type(module), "_apply_gate", _plain).__name__
        in ("_default_apply_gate", "_plain")
    )


def _plain() -> None:
    """Stands for the gate of a block that has none of its own."""


class Experts:
    """The forward pass of one block. `lora_now` says whose rows are in the batch that runs."""

    def __init__(self, name: str, module: Any, lora_now: Callable[[], LoraBatch | None]) -> None:
        self._name, self._lora_now, self._act = name, lora_now, module.act_fn
        self._gate_up_EXD: Tensor = module.gate_up_proj.detach()
        self._down_EDM: Tensor = module.down_proj.detach()

    def targets(self) -> dict[str, Target]:
        num_experts, hidden, size = self._down_EDM.shape
        names = [f"{self._name}.{expert}" for expert in range(num_experts)]
        by_expert = [mlp_targets(f"{name}.", name, hidden, size) for name in names]
        return {key: target for targets in by_expert for key, target in targets.items()}

    def __call__(self, x_TD: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        lora = self._lora_now()
        for expert in chosen_Tk.unique().tolist():
            if expert >= len(self._down_EDM):
                continue  # rows sent nowhere
            rows_t, places_t = (chosen_Tk == expert).nonzero(as_tuple=True)
            own = LoraBatch(()) if lora is None else lora.select(rows_t.cpu().numpy())
            name = f"{self._name}.{expert}"
            gate_up = linear(
                x_TD[rows_t], self._gate_up_EXD[expert], None, own.terms(f"{name}.gate_up")
            )
            gate, up = gate_up.chunk(2, dim=-1)
            y_tD = linear(
                self._act(gate) * up, self._down_EDM[expert], None, own.terms(f"{name}.down")
            )
            out_TD = out_TD.index_add(0, rows_t, y_tD * weights_Tk[rows_t, places_t, None])
        return out_TD
