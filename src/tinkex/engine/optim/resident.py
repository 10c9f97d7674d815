"""An adapter in memory with everything that training it further needs, and the memory for that.

Knows tensors and their sizes; which jobs change them is the trainer's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.engine.jobs import LoraSpec
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.numerics.memory_in_use import free_bytes, is_out_of_memory
from tinkex.engine.optim.optimizer import OptimizerState, make_room
from tinkex.engine.optim.shards import tree_sum


@dataclass(slots=True)
class SharedGradients:
    """Gradients that were put aside for all who share an adapter, until they are added up.

    All are whole, also where a group of devices holds the adapter: its leader has them then.
    """

    shards: dict[int, Tensor] = field(default_factory=dict)
    """Those gathered here, by virtual shard."""
    num_numbers: int = 0
    """Of the whole adapter."""
    brought: dict[int, Tensor] = field(default_factory=dict)
    """By virtual shard, what the process group gave this engine to gather instead."""


@dataclass(slots=True)
class ResidentAdapter:
    adapter: Adapter
    spec: LoraSpec
    base_model: str
    optimizer: OptimizerState
    grads: dict[int, Tensor] = field(default_factory=dict)
    """Gathered since the last step, in the adapter's layout, by virtual shard; all in shard 0 where
    the order of sums may vary."""
    version: int = 0
    """Counts changes of the weights."""
    shared: SharedGradients = field(default_factory=SharedGradients)
    """Between `share_gradient` and `add_gradient` a process group's thread may use it as well."""
    twins: dict[int, Adapter] = field(default_factory=dict)
    """Where the gradients of shards go while they are computed side by side."""

    @property
    def grad(self) -> Tensor | None:
        """The sum of what was gathered; a copy when there are several shards."""
        return tree_sum(self.grads, torch.add)

    def twin(self, shard: int) -> Adapter:
        """The adapter, gathering gradients of one shard."""
        if shard == 0:
            return self.adapter
        if shard not in self.twins:
            self.twins[shard] = self.adapter.twin()
        return self.twins[shard]

    def gather(self, shard: int, grad: Tensor) -> None:
        """Add a gradient, which is the resident's from now on."""
        self.grads[shard] = self.grads[shard].add_(grad) if shard in self.grads else grad

    def take_grad(self) -> Tensor | None:
        """The sum of what was gathered, which is gone then."""
        grads, self.grads = self.grads, {}
        return tree_sum(grads, lambda one, other: one.add_(other))

    def shortage_for_a_step(self) -> str:
        """Why there is no memory for a step; empty when there is."""
        try:
            make_room(self.adapter, self.optimizer)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            return str(exc)
        return ""


def shortage_for(new: ResidentAdapter, others: Iterable[ResidentAdapter]) -> str:
    """Why an adapter cannot be trained beside others; empty when it can.

    A CPU's memory is given out when it is touched, and whoever touches too much is killed with
    everybody's work: so what adapters will need at their first step is counted now. A GPU says
    no by itself.
    """
    if new.adapter.flat.device.type != "cpu":
        return ""
    # From its first step on an adapter has touched all of its memory, which counts as used.
    untouched = [new, *(one for one in others if one.optimizer.step == 0)]
    # Gradients and moments, which nobody has written to yet.
    needed = sum((1 + len(one.optimizer.moments)) * one.adapter.flat.nbytes for one in untouched)
    free = free_bytes()
    if needed <= free:
        return ""
    return f"{needed / 1e6:.0f} MB are needed to train, {free / 1e6:.0f} MB are free"
