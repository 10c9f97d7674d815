"""Adapters sharded over a group: from the whole one of a file to each rank's shard, and back.

A rank's adapter has the layout of its linears. Every buffer of that layout (weights, moments,
gradients) can be joined into whole tensors, and whole ones sharded, so that files are those of a
single device. Parameters that every rank has whole (A where the outputs are sharded, B where the
inputs are) are kept equal by equal steps: of their gradients each rank computes a part, and `share`
adds the parts up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tinkex.engine.collectives.group import Group
from tinkex.engine.lora.adapter import (
    Adapter,
    Layout,
    LoraGroup,
    LoraPart,
    Target,
    lay_out,
    take_apart,
)
from tinkex.engine.model.sharding import ModelShards, Pieces, put, take
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.optim.shards import NUM_SHARDS


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A tensor of the whole adapter, and which rank has which pieces of it."""

    shape: tuple[int, int]
    dim: int = 0
    pieces: tuple[Pieces, ...] | None = None
    """By rank, along `dim`; None: it is not sharded."""
    owner: int | None = None
    """The only rank that has it; None: all have it, or a shard of it."""

    @property
    def is_shared(self) -> bool:
        return self.pieces is None and self.owner is None

    def is_at(self, rank: int) -> bool:
        return self.owner in (None, rank)

    def shape_at(self, rank: int) -> tuple[int, int]:
        if self.pieces is None:
            return self.shape
        width = sum(map(len, self.pieces[rank]))
        return (width, self.shape[1]) if self.dim == 0 else (self.shape[0], width)

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        return whole if self.pieces is None else take(whole, self.dim, self.pieces[rank])


class AdapterShards:
    """How one adapter is sharded; the same for all ranks."""

    def __init__(self, whole: Adapter, targets: Mapping[str, Target], model: ModelShards) -> None:
        self.model, self.targets = model, targets
        self.signature = whole.signature
        self._parameters: list[_Parameter] = []
        for key, group in whole.groups.items():
            owner = model.expert_owner(group.parts[0].target.module)
            linears = [
                model.module(p.target.module) if owner is None else None for p in group.parts
            ]
            assert linears[0] is not None or owner is not None, f"{key} is not sharded"
            # A goes with the inputs, which all parts share; each B with the outputs of its part.
            sides = [("in", 1, linears[0]), *(("out", 0, linear) for linear in linears)]
            for tensor, (side, dim, linear) in zip(group.tensors(), sides, strict=True):
                pieces = linear.pieces if linear is not None and linear.side == side else None
                shape = (tensor.shape[0], tensor.shape[1])
                self._parameters.append(_Parameter(shape, dim, pieces, owner))

    @property
    def whole_size(self) -> int:
        """Numbers of a buffer of the whole adapter's layout."""
        return self._whole_layout[1]

    @cached_property
    def _whole_layout(self) -> tuple[Layout, int]:
        return lay_out([parameter.shape for parameter in self._parameters])

    def take_whole_apart(self, flat: Tensor) -> list[Tensor]:
        """A buffer of the whole adapter's layout, parameter by parameter."""
        return take_apart(flat, self._whole_layout[0])

    def layout(self, rank: int) -> tuple[Layout, int]:
        return lay_out([p.shape_at(rank) for p in self._at(rank)])

    def _at(self, rank: int) -> list[_Parameter]:
        return [parameter for parameter in self._parameters if parameter.is_at(rank)]

    def tensors_at(self, rank: int, whole: Sequence[Tensor]) -> list[Tensor]:
        """The shards that one rank has of tensors parallel to the whole adapter's."""
        pairs = zip(self._parameters, whole, strict=True)
        return [
            parameter.shard(tensor, rank) for parameter, tensor in pairs if parameter.is_at(rank)
        ]

    def shard(self, whole: Adapter, group: Group) -> ShardedAdapter:
        """This rank's shard of the adapter."""
        targets = self.model.targets(self.targets, group.rank)
        local = iter(self.tensors_at(group.rank, list(whole.parameters())))
        groups: dict[str, LoraGroup] = {}
        for key, lora in whole.groups.items():
            if key not in targets:
                continue  # another rank's expert
            here = {part.module: part for part in targets[key].parts}
            parts = [LoraPart(here[p.target.module], p.row, p.rank, p.scale) for p in lora.parts]
            tensors = [next(local).detach().to(group.device) for _ in lora.tensors()]
            groups[key] = LoraGroup(tensors[0], tuple(tensors[1:]), tuple(parts))
        return ShardedAdapter(groups, self, group)

    def joined(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Whole tensors of the ranks' buffers, which are in order."""
        views = [iter(take_apart(flat, self.layout(rank)[0])) for rank, flat in enumerate(flats)]
        whole: list[Tensor] = []
        for parameter in self._parameters:
            parts = {r: next(views[r]) for r in range(len(flats)) if parameter.is_at(r)}
            if parameter.pieces is None:
                whole.append(parts[parameter.owner or 0])
                continue
            tensor = parts[0].new_empty(parameter.shape)
            for rank, part in parts.items():
                put(tensor, parameter.dim, parameter.pieces[rank], part)
            whole.append(tensor)
        return whole

    def rebuilt(self, tensors: Sequence[Tensor]) -> Adapter:
        """A whole adapter of whole tensors."""
        left = iter(tensors)
        groups: dict[str, LoraGroup] = {}
        for key, parts in self.signature:
            a_RI, *b_Or = (next(left) for _ in range(1 + len(parts)))
            groups[key] = LoraGroup(a_RI, tuple(b_Or), parts)
        return Adapter(groups, trainable=False)


class ShardedAdapter(Adapter):
    """The shard of an adapter that one rank trains."""

    def __init__(
        self, groups: Mapping[str, LoraGroup], shards: AdapterShards, group: Group
    ) -> None:
        super().__init__(groups)
        self.shards, self._group = shards, group
        self.flat = self.flat.to(group.device)  # one without any parameter has no device
        self._is_shared = [parameter.is_shared for parameter in shards._at(group.rank)]

    def fold_whole(self, whole: Sequence[Tensor]) -> Tensor:
        """This rank's buffer of whole tensors."""
        return self.fold(self.shards.tensors_at(self._group.rank, whole))

    def join(self, flat: Tensor) -> list[Tensor]:
        """Whole tensors on the host, for the leader; nothing for the others."""
        flats = self._group.gather(self._padded(flat))
        return self.shards.joined([flat.cpu() for flat in flats]) if flats else []

    def join_flat(self, flat: Tensor) -> Tensor:
        """A buffer of the whole adapter's layout on the leader's host; empty for the others."""
        tensors = self.join(flat)
        whole = torch.zeros(self.shards.whole_size if self._group.leads else 0)
        if not self._group.leads:
            return whole
        for view, tensor in zip(self.shards.take_whole_apart(whole), tensors, strict=True):
            view.copy_(tensor)
        return whole

    def shard_flat(self, whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The inverse, for all ranks: each one's shards of buffers that the leader has."""
        device = self._group.device
        has = torch.tensor([int(s in whole) for s in range(NUM_SHARDS)], device=device)
        grads: dict[int, Tensor] = {}
        for shard in self._group.broadcast(has).nonzero().flatten().tolist():
            flat = torch.empty(self.shards.whole_size, device=device)
            if self._group.leads:
                flat.copy_(whole[shard])
            flat = self._group.broadcast(flat)
            grads[shard] = self.fold_whole(self.shards.take_whole_apart(flat))
        return grads

    def join_for_all(self, flat: Tensor) -> list[Tensor]:
        return self.shards.joined(self._group.all_gather(self._padded(flat)))

    def _padded(self, flat: Tensor) -> Tensor:
        """A buffer as long as the longest rank's: collectives take equal shapes."""
        sizes = [self.shards.layout(rank)[1] for rank in range(self._group.size)]
        return torch.nn.functional.pad(flat.detach(), (0, max(sizes) - len(flat)))

    def share(self, grad: Tensor) -> Tensor:
        """Add up, in place, the gradients of parameters that all ranks have."""
        views = self.views(grad)
        mine = [view for view, shared in zip(views, self._is_shared, strict=True) if shared]
        if mine:
            summed = self._group.all_reduce(torch.cat([view.flatten() for view in mine]))
            for view, part in zip(mine, summed.split([v.numel() for v in mine]), strict=True):
                view.copy_(part.view_as(view))
        return grad

    @property
    def num_whole(self) -> int:
        return self.flat.numel() * self._group.size

    def norm(self, grad: Tensor, ops: Ops) -> float:
        """The 2-norm of the whole gradient, the same number for all ranks."""
        views = zip(self.views(grad), self._is_shared, strict=True)
        # Parameters that all ranks have are counted once.
        counted = [view for view, shared in views if self._group.leads or not shared]
        norms = [torch.linalg.vector_norm(view, dtype=torch.float64) for view in counted]
        square = torch.zeros((), dtype=torch.float64, device=self._group.device)
        for norm in norms:
            square += norm.square()
        return float(self._group.all_reduce(square.reshape(1)).sqrt())

    def change_matrices(self, flat: Tensor, change: Callable[[Tensor, Tensor], None]) -> None:
        """Every rank changes the whole matrices, and keeps its shard."""
        whole = self.shards.rebuilt(self.join_for_all(self.flat))
        whole.change_matrices(whole.fold(self.join_for_all(flat)), change)
        self.flat.copy_(self.fold_whole(whole.views(whole.flat)))
