"""Rows of a run: which are trained on, which are held out, and which a step takes.

Order depends on the seed and the step alone, so that a resumed run sees what the undisturbed one
would have seen. Knows rows of any kind; how they are read and rendered is the business of others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinkex.errors import InvalidInputError
from tinkex.recipes.data import BadRow, Loaded
from tinkex.recipes.options import RunOptions

__all__ = ["Rows", "batch_at", "parts_of", "usable"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """The rows of a run as they were read: those to train on, and a file to evaluate on."""

    train: Loaded[T]
    held_out: Loaded[T] | None = None
    """None: a share of the others is held out."""

    @classmethod
    def of(cls, config: RunOptions, load: Callable[[Any], Loaded[T]], source: Any) -> Rows[T]:
        return cls(load(source), load(config.eval_data) if config.eval_data else None)

    @property
    def all(self) -> list[T]:
        return [*self.train.rows, *(self.held_out.rows if self.held_out else ())]


def parts_of(rows: Sequence[T], count: int) -> list[Sequence[T]]:
    """Rows in `count` parts of nearly the same size, in their order; fewer where rows are few."""
    ends = [len(rows) * number // count for number in range(count + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends) if start < end]


def usable(loaded: Loaded[T], convert: Callable[[T], R]) -> list[R]:
    """Convert every row; a row that does not convert joins the bad ones."""
    converted, kept = [], []
    for row in loaded.rows:
        try:
            converted.append(convert(row))
            kept.append(row)
        except InvalidInputError as exc:
            loaded.bad.append(BadRow(line=row.line, reason=str(exc)))  # type: ignore[attr-defined]
    loaded.rows = kept
    loaded.bad.sort(key=lambda bad: bad.line)
    if not converted:
        raise InvalidInputError(f"No usable row.\n{loaded.report()}")
    return converted


def batch_at(rows: Sequence[T], size: int, step: int, seed: int) -> list[T]:
    """The rows of one step: the data shuffled anew each epoch, read end to end."""
    return [
        rows[_shuffled(len(rows), seed, position // len(rows))[position % len(rows)]]
        for position in range(step * size, (step + 1) * size)
    ]


# A step asks for as many positions as it has rows: the order of an epoch is made once for them.
_order: dict[tuple[int, int, int], list[int]] = {}


def _shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    key = (num_rows, seed, epoch)
    if key not in _order:
        if len(_order) > 8:
            _order.clear()
        order = list(range(num_rows))
        # Text is hashed alike in every process, and seed 0 epoch 1 is not seed 1 epoch 0.
        random.Random(f"{seed}/{epoch}").shuffle(order)
        _order[key] = order
    return _order[key]
