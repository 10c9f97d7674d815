"""Where the matrices of an adapter lie in its buffer, in the form the kernels read.

Letters: R ranks of all modules of a linear, I inputs, O outputs, r rank of one module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from tinkex.engine.cuda.lora_kernels import COLUMNS, SIDE, Factor, GradientTiles
from tinkex.engine.cuda.transfer import send
from tinkex.engine.lora.adapter import Adapter, Layout, LoraPart

EXPERTS = ".experts."
"""In the keys of an expert's linears."""
_Signature = tuple[tuple[str, tuple[LoraPart, ...]], ...]
_Place = tuple[int, tuple[int, int]]
"""Where a matrix starts in the buffer, and its shape."""
_Tile = tuple[int, ...]


def linears(
    signature: _Signature, layout: Layout
) -> Iterator[tuple[str, _Place, list[tuple[LoraPart, _Place]]]]:
    """Every linear of an adapter: its key, its A, and its modules with their Bs.

    Not those of experts: there are thousands, which `cuda.mixture` sees as stacks.
    """
    places = iter(layout)
    for key, parts in signature:
        inner, outer = next(places), [(part, next(places)) for part in parts]
        if EXPERTS not in key:
            yield key, inner, outer


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """The A and the Bs of one linear."""

    at: int
    """Where A, [R, I], starts."""
    ranks: int
    outer: tuple[Factor, ...]
    """The Bs, those of one rank and scale together: from the inner product to the outputs."""
    inner: Factor
    """A as [I, R]: from the inner product's gradient to that of the inputs."""


def layouts(adapter: Adapter) -> Mapping[str, LinearLayout]:
    """By linear. Adapters of one layout on one device share theirs."""
    return _layouts(adapter.signature, adapter.layout, adapter.flat.device)


@lru_cache(maxsize=64)
def _layouts(
    signature: _Signature, layout: Layout, device: torch.device
) -> dict[str, LinearLayout]:
    tiles: list[_Tile] = []
    """Of all linears, so that one copy sends them."""

    def stretch(new: list[_Tile]) -> slice:
        tiles.extend(new)
        return slice(len(tiles) - len(new), len(tiles))

    found = []
    for key, (at, (ranks, num_in)), modules in linears(signature, layout):
        # Modules of one rank and scale are one launch of `expand_`.
        modules.sort(key=lambda module: (module[0].rank, module[0].scale))
        outer = [
            (rank, scale, stretch([t for part, (b, _) in group for t in _outputs(part, b)]))
            for (rank, scale), group in groupby(modules, lambda m: (m[0].rank, m[0].scale))
        ]
        inputs = range(0, num_in, COLUMNS)
        inner = stretch([(at + i, i, min(COLUMNS, num_in - i), 0) for i in inputs])
        found.append((key, at, ranks, num_in, outer, inner))
    sent = send(tiles, device, torch.int64)

    def factor(rank: int, scale: float, steps: tuple[int, int], where: slice) -> Factor:
        aligned = all(number % 8 == 0 for tile in tiles[where] for number in tile)
        whole = all(tile[2] == COLUMNS for tile in tiles[where])
        return Factor(rank, scale, steps, sent[where], aligned, whole)

    return {
        key: LinearLayout(
            at,
            ranks,
            tuple(factor(rank, scale, (rank, 1), where) for rank, scale, where in outer),
            factor(ranks, 1.0, (1, num_in), inner),
        )
        for key, at, ranks, num_in, outer, inner in found
    }


def _outputs(part: LoraPart, at: int) -> list[_Tile]:
    """The tiles of one module's B, [O, r], that starts at `at`."""
    num_outputs = part.target.stop - part.target.start
    return [
        (at + o * part.rank, part.target.start + o, min(COLUMNS, num_outputs - o), part.row)
        for o in range(0, num_outputs, COLUMNS)
    ]


def gradient_tiles(adapter: Adapter) -> Mapping[str, GradientTiles]:
    """By linear: where gradients go that are gathered for several adapters of this layout."""
    return _gradient_tiles(adapter.signature, adapter.layout, adapter.flat.device)


@lru_cache(maxsize=64)
def _gradient_tiles(
    signature: _Signature, layout: Layout, device: torch.device
) -> dict[str, GradientTiles]:
    tiles: list[_Tile] = []
    scales: list[float] = []
    found = {}
    for key, (at, (ranks, num_in)), modules in linears(signature, layout):
        first = len(tiles)
        tiles += _squares((0, at, ranks, num_in), 0, 0)
        scales += [1.0] * (len(tiles) - len(scales))
        for part, (start, (num_out, rank)) in modules:
            tiles += _squares((1, start, num_out, rank), part.target.start, part.row)
            scales += [part.scale] * (len(tiles) - len(scales))
        found[key] = slice(first, len(tiles))
    tiles_N8, scales_N = send(tiles, device, torch.int64), send(scales, device, torch.float32)
    return {key: GradientTiles(tiles_N8[own], scales_N[own]) for key, own in found.items()}


def _squares(matrix: _Tile, column_a: int, column_b: int) -> list[_Tile]:
    """The tiles of one matrix's gradient: (which, place, rows, columns), cut into squares."""
    _, _, rows, columns = matrix
    return [
        (*matrix, i, j, column_a, column_b)
        for i in range(0, rows, SIDE)
        for j in range(0, columns, SIDE)
    ]
