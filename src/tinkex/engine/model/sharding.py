"""The shard of every weight that each rank of a group has.

A linear is sharded on one side. Sharded by its outputs (queries, keys and values by heads, gate and
up by columns, the head by tokens) every rank reads all inputs and has some outputs; sharded by its
inputs (the linears behind those) it has a part of every output, and the parts are summed. Each
expert of a mixture belongs to one rank. Norms, routers and biases behind a sum are whole
everywhere. In a group of one, everything is.

An adapter is sharded with its linear: B by outputs or A by inputs, and the other one is whole
everywhere. Nothing here touches a device; the pieces are ranges of rows or columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tinkex.engine.collectives.group import MAX_MEMBERS
from tinkex.engine.lora.adapter import Target, TargetPart
from tinkex.engine.model.shape import ModelConfig
from tinkex.errors import NotSupportedError

Pieces = tuple[range, ...]
"""The ranges of a dimension that one rank has, in order."""


@dataclass(frozen=True, slots=True)
class LinearShards:
    """The side on which one linear is sharded, and the pieces of each rank."""

    side: Literal["out", "in"]
    pieces: tuple[Pieces, ...]

    def width(self, rank: int) -> int:
        return sum(map(len, self.pieces[rank]))


def take(whole: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """The pieces of one dimension, side by side; a copy."""
    parts = [whole.narrow(dim, piece.start, len(piece)) for piece in pieces]
    return torch.cat(parts, dim)


def put(whole: Tensor, dim: int, pieces: Pieces, part: Tensor) -> None:
    """The inverse: write a rank's part to where it belongs."""
    start = 0
    for piece in pieces:
        whole.narrow(dim, piece.start, len(piece)).copy_(part.narrow(dim, start, len(piece)))
        start += len(piece)


class ModelShards:
    """How a native model is sharded over the `size` ranks of a group.

    Raises:
        NotSupportedError: It cannot be divided evenly; the message says what and names the way out.
    """

    def __init__(self, config: ModelConfig, size: int) -> None:
        check_divides(config, size, "the model")
        self.whole, self.size = config, size
        self.local = _local(config, size)
        """The same model with one rank's heads and widths; vocabulary and experts count all."""

    # ----------------------------------------------------------------------------- dimensions

    def _even(self, count: int, each: int = 1, start: int = 0) -> tuple[Pieces, ...]:
        """`count` things of `each` rows, dealt in order."""
        step = count // self.size * each
        return tuple(
            (range(start + rank * step, start + (rank + 1) * step),) for rank in range(self.size)
        )

    def vocabulary(self) -> tuple[Pieces, ...]:
        """Tokens in order; the last rank may have fewer."""
        total, step = self.whole.vocab_size, self.vocabulary_step
        edges = [min(rank * step, total) for rank in range(self.size + 1)]
        return tuple((range(edges[rank], edges[rank + 1]),) for rank in range(self.size))

    @property
    def vocabulary_step(self) -> int:
        return -(-self.whole.vocab_size // self.size)

    def _delta_channels(self) -> tuple[Pieces, ...]:
        """Queries, keys and values side by side, each by heads."""
        delta = self.whole.delta
        assert delta is not None
        sides = (
            self._even(delta.key_heads, delta.key_size),
            self._even(delta.key_heads, delta.key_size, delta.keys),
            self._even(delta.value_heads, delta.value_size, 2 * delta.keys),
        )
        return tuple(q + k + v for q, k, v in zip(*sides, strict=True))

    # -------------------------------------------------------------------------------- modules

    def expert_owner(self, module: str) -> int | None:
        """The rank that has an expert's linears; None for every other module."""
        _, found, rest = module.partition(".experts.")
        experts = self.whole.experts
        if not found or experts is None or not rest[:1].isdigit():
            return None
        return int(rest.partition(".")[0]) // (experts.count // self.size)

    def module(self, module: str) -> LinearShards | None:
        """How a linear is sharded; None: every rank has all of it."""
        config, delta, leaf = self.whole, self.whole.delta, module.rpartition(".")[2]
        size = config.head_size
        if leaf in ("lm_head", "embed_tokens"):
            return LinearShards("out", self.vocabulary())
        if leaf == "q_proj":
            return LinearShards("out", self._even(config.num_heads, size * (1 + config.attn_gate)))
        if leaf in ("k_proj", "v_proj"):
            return LinearShards("out", self._even(config.num_kv_heads, size))
        if leaf == "o_proj":
            return LinearShards("in", self._even(config.num_heads, size))
        if leaf in ("gate_proj", "up_proj", "down_proj"):
            assert self.expert_owner(module) is None
            shared = config.experts is not None and ".shared_expert." in module
            width = config.experts.shared_size if shared and config.experts else config.mlp_size
            return LinearShards("in" if leaf == "down_proj" else "out", self._even(width))
        if delta is None:
            return None
        if leaf in ("in_proj_qkvz", "in_proj_ba"):  # rows go key head by key head
            return LinearShards(
                "out", self._even(delta.key_heads, delta.linears[leaf] // delta.key_heads)
            )
        if leaf == "in_proj_qkv":
            return LinearShards("out", self._delta_channels())
        if leaf in ("in_proj_z", "out_proj"):
            side: Literal["out", "in"] = "out" if leaf == "in_proj_z" else "in"
            return LinearShards(side, self._even(delta.value_heads, delta.value_size))
        if leaf in ("in_proj_b", "in_proj_a"):
            return LinearShards("out", self._even(delta.value_heads))
        return None

    def targets(self, targets: Mapping[str, Target], rank: int) -> dict[str, Target]:
        """The targets of one rank's linears, without those of others' experts."""
        if self.size == 1:
            return dict(targets)
        local: dict[str, Target] = {}
        for key, target in targets.items():
            owner = self.expert_owner(target.parts[0].module)
            if owner is not None:
                if owner == rank:
                    local[key] = target
                continue
            in_size, parts, start = target.in_size, [], 0
            for part in target.parts:
                shards = self.module(part.module)
                assert shards is not None, f"{key} is not sharded"
                if shards.side == "in":
                    width, in_size = part.stop - part.start, shards.width(rank)
                else:
                    width = shards.width(rank)
                parts.append(TargetPart(part.module, part.kind, start, start + width))
                start += width
            local[key] = Target(in_size, tuple(parts))
        return local

    # -------------------------------------------------------------------------------- weights

    def weight(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """The shard of a base tensor that one rank has."""
        if self.size == 1 or (sharded := self._dimension(name)) is None:
            return tensor
        dim, pieces = sharded
        return take(tensor, dim, pieces[rank])

    def _dimension(self, name: str) -> tuple[int, tuple[Pieces, ...]] | None:
        """The dimension along which a tensor is sharded, and the pieces of each rank."""
        config, delta, experts = self.whole, self.whole.delta, self.whole.experts
        if ".mlp.experts." in name and experts is not None:
            return 0, self._even(experts.count)
        if name.endswith(".sinks"):
            return 0, self._even(config.num_heads)
        if name.endswith((".q_norm.weight", ".k_norm.weight")):
            heads = config.num_heads if ".q_norm." in name else config.num_kv_heads
            return (0, self._even(heads, config.head_size)) if config.wide_qk_norm else None
        if delta is not None and name.endswith(("linear_attn.A_log", "linear_attn.dt_bias")):
            return 0, self._even(delta.value_heads)
        if delta is not None and name.endswith("linear_attn.conv1d.weight"):
            return 0, self._delta_channels()
        module, _, kind = name.rpartition(".")
        shards = self.module(module)
        # A bias behind a sum is added once, after it.
        if shards is None or (shards.side == "in" and kind == "bias"):
            return None
        return (0 if shards.side == "out" else 1), shards.pieces


def _local(config: ModelConfig, size: int) -> ModelConfig:
    if size == 1:
        return config
    delta, experts = config.delta, config.experts
    if delta is not None:
        delta = replace(
            delta, key_heads=delta.key_heads // size, value_heads=delta.value_heads // size
        )
    if experts is not None:
        experts = replace(experts, shared_size=experts.shared_size // size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        mlp_size=config.mlp_size // size,
        delta=delta,
        experts=experts,
    )


def check_divides(config: ModelConfig, size: int, name: str) -> None:
    """Refuse a model that a group of this size cannot hold in equal shards."""
    if size == 1:
        return
    if not config.native:
        raise NotSupportedError(
            f"{name} runs through transformers ({config.arch}), whose layers cannot be divided "
            "over a group. Serve it without --group."
        )
    counts = {"attention heads": config.num_heads, "key and value heads": config.num_kv_heads}
    if any(not config.has_experts(index) for index in range(config.num_layers)):
        counts["columns of the MLP"] = config.mlp_size
    if config.experts is not None:
        counts["experts"] = config.experts.count
        if config.experts.shared_size:
            counts["columns of the shared expert"] = config.experts.shared_size
    if config.delta is not None:
        counts["key heads of the delta layers"] = config.delta.key_heads
        counts["value heads of the delta layers"] = config.delta.value_heads
    for what, count in counts.items():
        if count % size:
            fits = [k for k in range(2, MAX_MEMBERS + 1) if not any(n % k for n in counts.values())]
            nearest = min(fits, key=lambda k: (abs(k - size), -k), default=None)
            way = "no --group" if nearest is None else f"--group {nearest}"
            raise NotSupportedError(
                f"{name} has {count} {what}, which {size} devices cannot share evenly. "
                f"Serve it with {way}."
            )
