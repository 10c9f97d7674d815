"""How evenly the routers of a mixture spread a job's tokens over their experts.

Gathered pass by pass, told once a job: the names and meanings are those of the API's metrics. No
token is ever dropped here; `e_dropped:sum` says so.

Shapes: L layers with experts, E experts, T rows, k experts of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.metrics import RouterCounts
from tinkex.engine.model.mixture import Routing


class RouterLoad:
    """Tokens per expert and layer, of one job."""

    def __init__(self) -> None:
        self._counts_LE: Tensor | None = None
        self._entropies: list[Tensor] = []
        self._num_routed = 0
        self._replayed: list[Tensor] = []

    def add(self, routing: Routing, rows: slice, num_experts: int) -> None:
        """Count the rows of one pass that belong to the job."""
        layers = sorted(routing.chosen)
        chosen_LX = torch.stack([routing.chosen[layer][rows].flatten() for layer in layers])
        ones = torch.ones_like(chosen_LX, dtype=torch.float32)
        counts_LE = ones.new_zeros(len(layers), num_experts).scatter_add_(1, chosen_LX, ones)
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE
        entropy_LT = torch.stack([routing.entropy[layer][rows] for layer in layers])
        self._entropies.append(entropy_LT.double().sum())
        self._num_routed += entropy_LT.numel()
        if routing.own:
            given_LTk = torch.stack([routing.given[layer][rows] for layer in layers])
            own_LTk = torch.stack([routing.own[layer][rows] for layer in layers])
            is_given = given_LTk[..., 0] >= 0
            differs = (given_LTk.sort().values != own_LTk.sort().values).any(-1) & is_given
            self._replayed.append(torch.stack([is_given.sum(), differs.sum()]))

    def counts(self) -> RouterCounts | None:
        """The counts so far; None where there is no router."""
        if self._counts_LE is None:
            return None
        entropies = torch.stack(self._entropies).tolist()
        replayed = torch.stack(self._replayed).sum(0).tolist() if self._replayed else (0, 0)
        return RouterCounts(
            self._counts_LE.double().cpu().numpy(), tuple(entropies), self._num_routed, *replayed
        )
