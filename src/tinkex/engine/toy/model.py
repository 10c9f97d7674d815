"""A bigram language model with a trainable sparse table: the brain of the toy engine.

The logit of token v after token c is `base(c, v) + GAIN * table[c, v]`. The base favours a few
successors of every token and gives all others logit 0; the table holds only cells that training has
touched. Softmax, gradients and AdamW are exact over those cells, so loss falls, optimizer state
matters, and a resumed adapter continues to the bit. Knows numpy; no jobs, no files, no threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.optimizers import OptimizerParams, check_params
from tinkex.engine.jobs import LoraSpec
from tinkex.engine.optim.shards import tree_sum
from tinkex.engine.optim.updates import UPDATES
from tinkex.errors import InvalidInputError

GAIN = 100.0
"""Logits per unit of parameter, so that the learning rates users try (1e-4 to 1e-2) move it."""
_NUM_FAVOURED = 6
_EOS = 2


Cell = tuple[int, int]
Gradients = dict[int, dict[Cell, float]]
"""By virtual shard and cell."""


def _add(one: dict[Cell, float], other: dict[Cell, float]) -> dict[Cell, float]:
    return {cell: one.get(cell, 0.0) + other.get(cell, 0.0) for cell in {**one, **other}}


def pack_gradients(grads: Gradients) -> dict[str, NDArray[Any]]:
    """Gradients as arrays."""
    rows = [(shard, *cell, value) for shard, grad in grads.items() for cell, value in grad.items()]
    return {
        "grad_cells": np.array([row[:3] for row in rows], np.int64).reshape(-1, 3),
        "grad_values": np.array([row[3] for row in rows]),
    }


def unpack_gradients(arrays: Mapping[str, NDArray[Any]]) -> Gradients:
    grads: Gradients = {}
    for row, value in zip(arrays["grad_cells"].tolist(), arrays["grad_values"], strict=True):
        grads.setdefault(row[0], {})[row[1], row[2]] = float(value)
    return grads


@lru_cache(4096)
def _favoured(token: int, vocab_size: int) -> dict[int, float]:
    """The logits of the base model that are not 0: some successors of `token`, and the end."""
    step = token * 2654435761 + 12345
    ids = [(step + i * 7919) % vocab_size for i in range(_NUM_FAVOURED)]
    logits = {v: 13.0 - i for i, v in reversed(list(enumerate(ids)))}
    logits.setdefault(_EOS, 10.0)
    return logits


@dataclass(slots=True)
class Row:
    """The next-token distribution after one context token: some logits, and 0 for all others."""

    vocab_size: int
    logits: dict[int, float]
    log_z: float = field(init=False)

    def __post_init__(self) -> None:
        # Less the largest logit, so that a run that diverges gives numbers and no overflow.
        values = self.logits.values()
        top = max(0.0, *values)
        rest = (self.vocab_size - len(values)) * math.exp(-top)
        self.log_z = top + math.log(math.fsum([math.exp(x - top) for x in values]) + rest)

    def logprob(self, token: int) -> float:
        return self.logits.get(token, 0.0) - self.log_z

    def dense(self) -> NDArray[np.float64]:
        out_V = np.zeros(self.vocab_size)
        out_V[list(self.logits)] = list(self.logits.values())
        return out_V


class ToyAdapter:
    """The trainable table of one adapter, with its gathered gradients and optimizer state."""

    def __init__(self, base_model: str, vocab_size: int, lora: LoraSpec, optimizer: str) -> None:
        self.base_model, self.vocab_size = base_model, vocab_size
        self.lora, self.optimizer = lora, optimizer
        self.step = 0
        self._cells: dict[tuple[int, int], int] = {}
        self._tokens_of: dict[int, list[int]] = {}
        # Columns: parameter, gradient of the step under way, first moment, second moment.
        self._state = np.zeros((64, 4))
        self._rows: dict[int, Row] = {}
        self.grads: Gradients = {}
        """Gathered since the last step."""
        self.shared: Gradients = {}
        """Put aside for all who share the adapter."""
        self.brought: list[Gradients] = []
        """Put aside by each of those who share it, when they came together."""

    # -------------------------------------------------------------------------------- reading

    def row(self, context: int) -> Row:
        if (row := self._rows.get(context)) is None:
            logits = _favoured(context, self.vocab_size).copy()
            for token in self._tokens_of.get(context, ()):
                cell = self._cells[context, token]
                logits[token] = logits.get(token, 0.0) + GAIN * self._state.item(cell, 0)
            row = self._rows[context] = Row(self.vocab_size, logits)
        return row

    def logprobs(self, tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[Any]:
        """log P(target | token), for targets of shape [T] or [T, K]."""
        if len(tokens) == 0:  # a prompt of one token has nothing to score
            return np.empty(targets.shape)
        flat_TK = targets.reshape(len(tokens), -1).tolist()
        rows = [self.row(context) for context in tokens.tolist()]
        out = [row.logprob(v) for row, wanted in zip(rows, flat_TK, strict=True) for v in wanted]
        return np.array(out, np.float64).reshape(targets.shape)

    # ------------------------------------------------------------------------------- training

    def _cell(self, context: int, token: int) -> int:
        key = context, token
        if (cell := self._cells.get(key)) is None:
            cell = self._cells[key] = len(self._cells)
            self._tokens_of.setdefault(context, []).append(token)
            if cell == len(self._state):
                self._state = np.concatenate([self._state, np.zeros_like(self._state)])
        return cell

    def backward(
        self,
        tokens: NDArray[np.int64],
        targets: NDArray[np.int64],
        slopes: NDArray[np.float64],
        shard: int = 0,
    ) -> None:
        """Add the gradient of sum(slope * logprob): d logprob(v) / d logit(u) = [u = v] - p(u).

        Over cells that a step has touched and those of this datum: it must not depend on which
        other datums went through the same worker.
        """
        grad, mine = self.grads.setdefault(shard, {}), dict[int, dict[int, None]]()
        targets_TK, slopes_TK = targets.reshape(len(tokens), -1), slopes.reshape(len(tokens), -1)
        for context, row_targets, row_slopes in zip(
            tokens.tolist(), targets_TK.tolist(), slopes_TK.tolist(), strict=True
        ):
            if not any(row_slopes):
                continue
            row = self.row(context)
            known = mine.setdefault(context, dict.fromkeys(self._tokens_of.get(context, ())))
            for token, slope in zip(row_targets, row_slopes, strict=True):
                if slope:
                    known[token] = None
                    grad[context, token] = grad.get((context, token), 0.0) + GAIN * slope
            total = sum(row_slopes)
            for token in known:
                less = GAIN * total * math.exp(row.logprob(token))
                grad[context, token] = grad.get((context, token), 0.0) - less

    def gather(self, shard: int, more: Mapping[Cell, float]) -> None:
        """Add what was gathered elsewhere."""
        grad = self.grads.setdefault(shard, {})
        for cell, value in more.items():
            grad[cell] = grad.get(cell, 0.0) + value

    def share(self) -> None:
        """Put what was gathered aside; none is left."""
        self.shared, self.grads = self.grads, {}

    def add_brought(self) -> None:
        """Gather what came together in place of what was put aside."""
        for grads in self.brought:
            for shard, grad in grads.items():
                self.gather(shard, grad)
        self.shared, self.brought = {}, []

    @property
    def shared_bytes(self) -> int:
        """About what was put aside: a number and its two ids for each cell."""
        return sum(24 * len(grad) for grad in self.shared.values())

    def _sum_gradients(self) -> None:
        """Put the gathered gradients into the table; cells that are new come in their own order."""
        total = tree_sum(self.grads, _add) or {}
        self.grads = {}
        order = sorted(total)
        cells = [self._cell(*cell) for cell in order]  # may grow the table
        self._state[cells, 1] = [total[cell] for cell in order]

    def optim_step(self, params: OptimizerParams) -> dict[str, float]:
        """Apply and clear the gathered gradients."""
        check_params(self.optimizer, params)
        self._sum_gradients()
        used = self._state[: len(self._cells)]
        weights, grad, first, second = used.T
        norm = float(np.sqrt((grad**2).sum()))
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            grad *= params.grad_clip_norm / norm
        self.step += 1
        weights *= 1 - params.learning_rate * params.weight_decay
        UPDATES[self.optimizer].toy_step(weights, grad, first, second, self.step, params)
        used[:, 1] = 0
        self._rows.clear()
        return {"grad_norm:mean": norm, "step:max": float(self.step)}

    def mix(self, own: float, others: Sequence[tuple[ToyAdapter, float]]) -> None:
        """Make the table the sum of several, each times its coefficient; no moments are left."""
        for other, _ in others:
            if (other.lora.rank, other.lora.alpha) != (self.lora.rank, self.lora.alpha):
                raise InvalidInputError(
                    "the adapters have other modules, ranks or scales than each other; their "
                    "matrices cannot be added"
                )
        parts = [(dict(self._weights()), own), *((dict(o._weights()), by) for o, by in others)]
        for cell in [cell for weights, _ in parts for cell in weights]:
            self._cell(*cell)  # may grow the table
        self._state[:, 1:] = 0
        for cell, row in self._cells.items():
            self._state[row, 0] = sum(weights.get(cell, 0.0) * by for weights, by in parts)
        if not np.isfinite(self._state).all():
            raise InvalidInputError("the sums are not finite; choose smaller coefficients")
        self._rows.clear()

    def _weights(self) -> Iterator[tuple[Cell, float]]:
        return ((cell, self._state.item(row, 0)) for cell, row in self._cells.items())

    # --------------------------------------------------------------------------------- copies

    def export(self) -> dict[str, NDArray[Any]]:
        """All state as arrays; `load` of them gives an adapter that continues to the bit."""
        cells = np.array(list(self._cells), dtype=np.int64).reshape(-1, 2)
        return {
            "cells": cells,
            "step": np.array(self.step),
            "state": self._state[: len(cells)].copy(),
            **pack_gradients(self.grads),
        }

    def load(
        self, arrays: dict[str, NDArray[Any]], *, with_optimizer: bool, with_gradients: bool
    ) -> None:
        self._cells = {(int(c), int(v)): i for i, (c, v) in enumerate(arrays["cells"])}
        self._tokens_of = {}
        for context, token in self._cells:
            self._tokens_of.setdefault(context, []).append(token)
        self._state = np.zeros((max(64, len(self._cells)), 4))
        self.grads = unpack_gradients(arrays) if with_gradients else {}
        keep = [0, *([2, 3] if with_optimizer else [])]
        self._state[: len(self._cells), keep] = arrays["state"][:, keep]
        self.step = int(arrays["step"]) if with_optimizer else 0
        self._rows = {}
