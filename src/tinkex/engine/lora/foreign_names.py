"""Adapters under other people's names, brought to ours.

We name an expert's linears as they are named alone: `mlp.experts.3.gate_proj`. Others stack all
experts of a block in one 3-D tensor under `mlp.experts.w1` (gate), `w3` (up) and `w2` (down), where
a side of one entry is shared by all; or keep Mixtral's names. Text models inside larger ones carry
a prefix, and the head may be called `unembed_tokens`. Knows names and shapes, not files.

Shapes: E experts, r rank, I inputs, O outputs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from tinkex.errors import InvalidInputError

Pair = Mapping[str, Tensor]
"""The sides `A` and `B` of a module."""
_LEAVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_STACKED_LEAVES = {ours: theirs for theirs, ours in _LEAVES.items()}
_SINGLE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)")
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(w[123]|(?:gate|up|down)_proj)")
_MIXTRAL = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])")
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.unembed_tokens", "lm_head"),
)


def our_modules(pairs: Mapping[str, Pair], known: Container[str] | None = None) -> dict[str, Pair]:
    """The same adapter by the names of our decoder's modules, every matrix 2-D.

    Args:
        known: The modules of the base model, if any other is to be refused. The first expert
            beyond them ends the work: a tensor of a few bytes may say that it stacks millions.
    """
    found: dict[str, Pair] = {}
    for module, pair in pairs.items():
        for name, one in _taken_apart(our_name(module), pair):
            if known is not None and name not in known:
                raise InvalidInputError(f"the model has no adaptable module {name[:120]!r}")
            if name in found:
                raise InvalidInputError(f"the adapter holds {name[:120]!r} under two names")
            found[name] = one
    return found


def our_name(module: str) -> str:
    """The name of a module in our decoder; experts in one tensor keep their own name."""
    for theirs, ours in _RENAMED:
        if module.startswith(theirs):
            module = ours + module.removeprefix(theirs)
    if (match := _MIXTRAL.fullmatch(module)) is not None:
        return f"{match[1]}.mlp.experts.{match[2]}.{_LEAVES[match[3]]}"
    return module


def first_module(module: str) -> str:
    """The module in our decoder that a name stands for; of stacked experts the first."""
    name = our_name(module)
    if (match := _STACKED.fullmatch(name)) is None:
        return name
    return f"{match[1]}.0.{_LEAVES.get(match[2], match[2])}"


def _taken_apart(module: str, pair: Pair) -> Iterator[tuple[str, Pair]]:
    match = _STACKED.fullmatch(module)
    if match is None or set(pair) != {"A", "B"} or {pair["A"].ndim, pair["B"].ndim} != {3}:
        yield module, pair
        return
    a_ErI, b_EOr = pair["A"], pair["B"]
    count = max(len(a_ErI), len(b_EOr))
    if {len(a_ErI), len(b_EOr)} - {1, count}:
        raise InvalidInputError(
            f"LoRA A and B of {module[:120]!r} have {len(a_ErI)} and {len(b_EOr)} experts; they "
            "must have as many, or one that all share"
        )
    leaf = _LEAVES.get(match[2], match[2])
    for expert in range(count):
        a_rI, b_Or = (side[min(expert, len(side) - 1)] for side in (a_ErI, b_EOr))
        yield f"{match[1]}.{expert}.{leaf}", {"A": a_rI, "B": b_Or}


def stacked(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The inverse for mixtures: the experts of a block in 3-D tensors, no side shared.

    Raises:
        InvalidInputError: The experts of a block differ in rank, or some have no adapter.
    """
    found: dict[str, Pair] = {}
    blocks: dict[str, dict[int, Pair]] = {}
    for module, pair in pairs.items():
        if (match := _SINGLE.fullmatch(module)) is None:
            found[module] = pair
        else:
            name = f"{match[1]}.{_STACKED_LEAVES[match[3]]}"
            blocks.setdefault(name, {})[int(match[2])] = pair
    for name, experts in blocks.items():
        shapes = {(pair["A"].shape, pair["B"].shape) for pair in experts.values()}
        if sorted(experts) != list(range(len(experts))) or len(shapes) != 1:
            raise InvalidInputError(
                f"the experts of {name[:120]!r} cannot be stacked: their adapters differ in rank, "
                "or some have none. Export them one by one."
            )
        found[name] = {
            side: torch.stack([experts[e][side] for e in range(len(experts))]) for side in "AB"
        }
    return found
