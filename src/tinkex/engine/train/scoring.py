"""From hidden states to logprobs, losses and the gradient of the hidden states, in chunks.

Logits exist for a few hundred rows at a time, never for the whole stream. Rows that cannot have a
gradient (weight or advantage zero) go through the head forward only. A loss that is local to its
token is differentiated while its logits are still there; one that needs the whole datum (gspo,
custom) first gets all logprobs, and its rows pass the head a second time.

Shapes: N rows of a chunk, n of them in one run, D hidden, V vocabulary, K candidates per position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkex.engine.lora.adapter import LoraBatch
from tinkex.engine.model.decoder import DecoderLike
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.numerics.softmax import total
from tinkex.engine.train.graph_cost import LossBudget
from tinkex.engine.train.sharded_softmax import ShardedSoftmax
from tinkex.errors import TinkerError

Rows = NDArray[np.int64]
Evaluate = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""(logprobs, inputs of the same rows) -> (scalar loss, metrics)."""


@dataclass(slots=True, kw_only=True)
class RowRun:
    """Consecutive rows scored alike: datums of one job, or one datum of a whole-datum loss."""

    start: int
    stop: int
    targets: Tensor
    """[rows], or [rows, K]; `logprobs`, `slopes` and most inputs have the same shape."""
    inputs: Mapping[str, Tensor]
    active: NDArray[np.bool_]
    evaluate: Evaluate
    token_local: bool
    budget: LossBudget | None = None
    """Of a traced loss: what it may cost, and where its first refusal is kept."""
    piece: tuple[int, int] = (0, 0)
    """Rows of different pieces never share a chunk."""

    logprobs: Tensor = field(init=False)
    slopes: Tensor | None = None
    """d loss / d logprobs of a whole-datum loss."""
    losses: list[Tensor] = field(default_factory=list)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    error: TinkerError | None = None
    """Set when `evaluate` refused its inputs; the run then has no gradient."""

    def part(self, rows: Rows) -> tuple[slice, Rows] | None:
        """Which of a chunk's sorted rows are mine, and their rows inside the run."""
        low, high = np.searchsorted(rows, (self.start, self.stop))
        return None if low == high else (slice(int(low), int(high)), rows[low:high] - self.start)


def score(
    decoder: DecoderLike,
    hidden_TD: Tensor,
    runs: Sequence[RowRun],
    lora: LoraBatch,
    *,
    backward: bool,
    chunk_rows: int,
    after_traced: Callable[[], None] = lambda: None,
) -> Tensor | None:
    """Fill every run's logprobs and losses; with `backward`, returns d loss / d hidden.

    Adapter gradients of the head are added to their `.grad` on the way. `after_traced` is called
    after the traced loss of each datum, so that others can use the device in between.
    """
    for run in runs:
        run.logprobs = torch.empty(run.targets.shape, device=hidden_TD.device)
    head = _Head(
        decoder, hidden_TD.detach(), lora, torch.zeros_like(hidden_TD) if backward else None
    )
    for _, piece in groupby(runs, lambda run: run.piece):
        _score_piece(head, list(piece), backward, chunk_rows, after_traced)
    return head.dhidden_TD


def _score_piece(
    head: _Head,
    runs: Sequence[RowRun],
    backward: bool,
    chunk_rows: int,
    after_traced: Callable[[], None],
) -> None:
    local = [run for run in runs if run.token_local]
    whole = [run for run in runs if not run.token_local]
    for rows in _chunks(_rows(local, active=True), chunk_rows):
        head.visit(rows, local, evaluate=True, backward=backward)
    # Rows without a gradient are still scored: their logprobs are part of the answer.
    for rows in _chunks(_rows(local, active=False), chunk_rows):
        head.visit(rows, local, evaluate=False, backward=False)
    for rows in _chunks(_rows(whole), chunk_rows):
        head.visit(rows, whole, evaluate=False, backward=False)
    for run in whole:
        _evaluate_whole(run, backward)
        if run.budget is not None:
            after_traced()
    # A whole loss has no slopes before all its logprobs are there. Until then the logits of all its
    # rows would take too much memory, so they are computed twice.
    sloped = [run for run in whole if run.slopes is not None]
    for rows in _chunks(_rows(sloped), chunk_rows):
        head.visit(rows, sloped, evaluate=False, backward=True)


def _rows(runs: Sequence[RowRun], active: bool | None = None) -> Rows:
    pieces = [
        np.arange(run.start, run.stop)
        if active is None
        else run.start + np.flatnonzero(run.active == active)
        for run in runs
    ]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def _chunks(rows: Rows, chunk_rows: int) -> Iterator[Rows]:
    num_chunks = -(-len(rows) // chunk_rows)
    yield from np.array_split(rows, num_chunks) if num_chunks else ()


def _evaluate_whole(run: RowRun, backward: bool) -> None:
    leaf = run.logprobs.clone().requires_grad_(backward)
    try:
        with torch.enable_grad():
            loss, metrics = run.evaluate(leaf, run.inputs)
        # Copies: a view of something large would keep it until the pass ends, for each datum.
        run.metrics = {name: value.clone() for name, value in metrics.items()}
        run.losses.append(loss.detach().to(torch.float64, copy=True))
        if loss.requires_grad:
            run.slopes = torch.autograd.grad(loss, leaf)[0].clone()
    except TinkerError as error:
        run.error = error
        if run.budget is not None:
            run.budget.error = error
    finally:
        if run.budget is not None:
            run.budget.end()


class _Head:
    """Takes rows of the stream through the head, a chunk at a time."""

    def __init__(
        self, decoder: DecoderLike, hidden_TD: Tensor, lora: LoraBatch, dhidden_TD: Tensor | None
    ) -> None:
        self._decoder, self._hidden_TD, self._lora = decoder, hidden_TD, lora
        self.dhidden_TD = dhidden_TD

    @torch.no_grad()
    def visit(self, rows: Rows, runs: Sequence[RowRun], *, evaluate: bool, backward: bool) -> None:
        """Logprobs of `rows` into their runs; their losses and gradients when asked for."""
        device = self._hidden_TD.device
        index = _row_index(rows, device)
        hidden_ND = self._hidden_TD[index]
        lora = self._lora.select(rows)
        pieces = [
            ScoredRows(run, part[0], _row_index(part[1], device))
            for run in runs
            if (part := run.part(rows)) is not None
        ]
        decoder, group = self._decoder, self._decoder.group
        # Where bits count, losses take the very logits that the sampler draws from.
        is_sharded = group.size > 1 and not group.exact
        softmax: _Softmax
        if is_sharded:
            logits_Nv = decoder.head_shard(hidden_ND, lora)
            softmax = ShardedSoftmax(logits_Nv, pieces, group, decoder.tokens.start)
        else:
            softmax = _softmax(decoder.ops, decoder.head(hidden_ND, lora), pieces)
        for piece, logprobs_nK in zip(pieces, softmax.logprobs, strict=True):
            piece.settle(logprobs_nK, evaluate, backward)
        if not backward or self.dhidden_TD is None:
            return
        dlogits_NV = softmax.backward(pieces)
        back = decoder.head_shard_backward if is_sharded else decoder.head_backward
        self.dhidden_TD[index] = back(dlogits_NV, hidden_ND, lora)


def _row_index(rows: Rows, device: torch.device) -> slice | Tensor:
    """Sorted rows as an index; a slice when nothing lies between them."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    return torch.from_numpy(rows).to(device)


@dataclass(slots=True)
class ScoredRows:
    """The rows of one run inside one chunk."""

    run: RowRun
    rows: slice
    """Among the chunk's rows."""
    inside: slice | Tensor
    """Among the run's rows."""
    slopes_nK: Tensor | None = None

    def columns(self) -> Tensor:
        return _two_dims(self.run.targets[self.inside])

    def settle(self, logprobs_nK: Tensor, evaluate: bool, backward: bool) -> None:
        """Store logprobs, evaluate a token-local loss, and find the slopes."""
        run = self.run
        if run.slopes is not None:
            self.slopes_nK = _two_dims(run.slopes[self.inside])
            return
        leaf = logprobs_nK if run.targets.ndim == 2 else logprobs_nK.squeeze(1)
        run.logprobs[self.inside] = leaf
        if not evaluate:
            return
        inputs = {name: value[self.inside] for name, value in run.inputs.items()}
        with torch.enable_grad():
            loss, _ = run.evaluate(leaf.requires_grad_(backward), inputs)
        run.losses.append(loss.detach())
        if backward:
            self.slopes_nK = _two_dims(torch.autograd.grad(loss, leaf)[0])


class _Softmax(Protocol):
    """The softmax of a chunk's logits, as logprobs of each piece's targets and their backward."""

    logprobs: list[Tensor]

    def backward(self, pieces: Sequence[ScoredRows]) -> Tensor:
        """d loss / d logits = slope * (one-hot - softmax). The logits are gone afterwards."""


def _softmax(ops: Ops, logits_NV: Tensor, pieces: Sequence[ScoredRows]) -> _Softmax:
    if ops.fuses_softmax and all(piece.run.targets.ndim == 1 for piece in pieces):
        return _FusedSoftmax(ops, logits_NV, pieces)
    return _PlainSoftmax(ops, logits_NV, pieces)


class _PlainSoftmax:
    """In the memory of the logits, for any number of candidates."""

    def __init__(self, ops: Ops, logits_NV: Tensor, pieces: Sequence[ScoredRows]) -> None:
        log_total_N1 = ops.subtract_top_(logits_NV)
        picked = [logits_NV[piece.rows].gather(1, piece.columns()) for piece in pieces]
        self._exp_NV = logits_NV.exp_()
        self._total_N1 = total(self._exp_NV)
        if log_total_N1 is None:  # as `softmax.log_total`, without its copy
            log_total_N1 = self._total_N1.log()
        self.logprobs = [
            picked_nK - log_total_N1[piece.rows]
            for piece, picked_nK in zip(pieces, picked, strict=True)
        ]

    def backward(self, pieces: Sequence[ScoredRows]) -> Tensor:
        # d logprob_t / d logit_v = [v = t] - softmax_v: first -sum(slopes) * softmax in place, then
        # the one-hot part.
        scale_N1 = torch.zeros_like(self._total_N1)
        for piece in pieces:
            if piece.slopes_nK is not None:
                scale_N1[piece.rows] = -piece.slopes_nK.sum(dim=1, keepdim=True)
        self._exp_NV.mul_(scale_N1.div_(self._total_N1))
        for piece in pieces:
            if piece.slopes_nK is not None:
                self._exp_NV[piece.rows].scatter_add_(1, piece.columns(), piece.slopes_nK)
        return self._exp_NV


class _FusedSoftmax:
    """The softmax of one target per row, which reads the logits once each way."""

    def __init__(self, ops: Ops, logits_NV: Tensor, pieces: Sequence[ScoredRows]) -> None:
        self._ops, self._logits_NV = ops, logits_NV
        top_N1, log_total_N1 = ops.log_total(logits_NV)
        self._lse_N = (top_N1 + log_total_N1)[:, 0]
        self.logprobs = [
            logits_NV[piece.rows].gather(1, piece.columns())
            - top_N1[piece.rows]
            - log_total_N1[piece.rows]
            for piece in pieces
        ]

    def backward(self, pieces: Sequence[ScoredRows]) -> Tensor:
        slopes_N = torch.zeros_like(self._lse_N)
        targets_N = torch.zeros_like(self._lse_N, dtype=torch.int64)
        for piece in pieces:
            if piece.slopes_nK is not None:
                slopes_N[piece.rows] = piece.slopes_nK[:, 0].float()
                targets_N[piece.rows] = piece.columns()[:, 0]
        return self._ops.logit_gradient(self._logits_NV, self._lse_N, targets_N, slopes_N)


def _two_dims(values: Tensor) -> Tensor:
    return values if values.ndim == 2 else values.unsqueeze(1)
