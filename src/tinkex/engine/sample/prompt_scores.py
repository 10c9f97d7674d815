"""What a sample job asks about its prompt, gathered pass by pass while the prompt is prefilled.

Row t of the logits predicts prompt position t + 1. Everything is at temperature 1, except the
alternative draws, which follow the job's own settings. Knows logits and positions, not models or
caches.

Shapes: T prompt tokens, N rows of a pass, V vocabulary, K columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkex.contract.sampling import EMPTY_LOGPROB
from tinkex.engine import jobs
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.sample.rng import PROMPT_ALT, sample_key, uniform_table
from tinkex.engine.sample.sampling_math import (
    Settings,
    draw,
    top_logprobs,
)
from tinkex.errors import InvalidInputError


class PromptScores:
    """The answers for one prompt; `add` fills in the rows of one pass."""

    def __init__(self, job: jobs.SampleJob, seed: int, vocab_size: int) -> None:
        self.job, self.seed, self.vocab_size = job, seed, vocab_size
        self.prompt_T = np.asarray(job.prompt, np.int64)
        length = len(self.prompt_T)
        last_n = job.prompt_logprobs_last_n
        self.first = 1 if last_n is None else max(1, length - last_n)
        """First position whose logprob (and top-k) is asked for."""
        everything = job.target_prompt_logprobs is not None or job.prompt_alt_tokens_k > 0
        self.first_computed = 1 if everything else self.first
        self.logprobs_T = np.full(length, np.nan, np.float32)
        self.topk = empty_topk(length, job.topk_prompt_logprobs)
        self.alt = empty_topk(length - 1, job.prompt_alt_tokens_k)
        self.targets = _Targets(job.target_prompt_logprobs, length, vocab_size)

    @staticmethod
    def wanted(job: jobs.SampleJob) -> bool:
        return bool(
            job.prompt_logprobs
            or job.topk_prompt_logprobs
            or job.prompt_alt_tokens_k
            or job.target_prompt_logprobs is not None
        )

    def rows(self, start: int, stop: int) -> range:
        """Which of the prompt's rows [start, stop) are needed."""
        return range(max(start, self.first_computed - 1), min(stop, len(self.prompt_T) - 1))

    def add(self, ops: Ops, rows: range, logits_NV: Tensor) -> None:
        """Record the answers that the logits of `rows` give."""
        skip = max(0, self.first - 1 - rows.start)
        if skip < len(rows):
            self._add_scores(ops, rows[skip:], logits_NV[skip:])
        self.targets.add(ops, rows, logits_NV)
        if self.job.prompt_alt_tokens_k:
            self._add_alternatives(ops, rows, logits_NV)

    def _add_scores(self, ops: Ops, rows: range, logits_NV: Tensor) -> None:
        at = slice(rows.start + 1, rows.stop + 1)
        if self.job.prompt_logprobs:
            targets_N = torch.from_numpy(self.prompt_T[at]).to(logits_NV.device)
            self.logprobs_T[at] = ops.logprobs_of(logits_NV, targets_N[:, None])[:, 0].cpu().numpy()
        if k := self.job.topk_prompt_logprobs:
            ids_NK, values_NK = top_logprobs(ops, logits_NV, k)
            width = ids_NK.shape[1]
            self.topk.token_ids[at, :width] = ids_NK.cpu().numpy()
            self.topk.logprobs[at, :width] = values_NK.cpu().numpy()

    def _add_alternatives(self, ops: Ops, rows: range, logits_NV: Tensor) -> None:
        job = self.job
        settings = Settings.of([job] * len(rows), self.vocab_size, ops)
        for j in range(job.prompt_alt_tokens_k):
            key = sample_key(self.seed, j, PROMPT_ALT)
            uniform_N3 = ops.send(uniform_table([key] * len(rows), rows))
            # A copy, because `draw` overwrites its logits and the next alternative needs them too.
            tokens_N, logprobs_N = draw(logits_NV.clone(), settings, uniform_N3)
            self.alt.token_ids[rows.start : rows.stop, j] = tokens_N.cpu().numpy()
            self.alt.logprobs[rows.start : rows.stop, j] = logprobs_N.cpu().numpy()

    def result(self) -> dict[str, Any]:
        """Fields of `SampleResult`."""
        job = self.job
        return {
            "prompt_logprobs": self.logprobs_T if job.prompt_logprobs else None,
            "topk_prompt": self.topk if job.topk_prompt_logprobs else None,
            "prompt_alt": self.alt if job.prompt_alt_tokens_k else None,
            "target_prompt_logprobs": self.targets.result(),
        }


class _Targets:
    """Logprobs of given ids at given positions, in the layout they came in; -1 gives NaN."""

    def __init__(
        self, targets: jobs.Array | jobs.CsrArray | None, length: int, vocab_size: int
    ) -> None:
        self.given = targets
        if targets is None:
            return
        shape = tuple(targets.shape)
        where = "target_prompt_logprobs"
        if len(shape) != 2 or shape[0] != length - 1:
            raise InvalidInputError(
                f"must have shape [{length - 1}, K] for a prompt of {length}, got {list(shape)}",
                path=where,
            )
        if isinstance(targets, jobs.CsrArray):
            self._bounds = np.asarray(targets.crow_indices, np.int64)
            self._ids = np.asarray(targets.values, np.int64)
        else:
            self._bounds = np.arange(shape[0] + 1) * shape[1]
            self._ids = targets.reshape(-1).astype(np.int64)
        if self._ids.size and (self._ids.min() < -1 or self._ids.max() >= vocab_size):
            raise InvalidInputError(
                f"ids must be -1 or 0..{vocab_size - 1}, got {self._ids.min()}..{self._ids.max()}",
                path=where,
            )
        self._scores: NDArray[np.float32] = np.full(len(self._ids), np.nan, np.float32)

    def add(self, ops: Ops, rows: range, logits_NV: Tensor) -> None:
        if self.given is None:
            return
        cells = slice(self._bounds[rows.start], self._bounds[rows.stop])
        ids = self._ids[cells]
        row_of = np.repeat(np.arange(len(rows)), np.diff(self._bounds[rows.start : rows.stop + 1]))
        kept = ids >= 0
        at = torch.from_numpy(row_of[kept]).to(logits_NV.device)
        picked = logits_NV[at, torch.from_numpy(ids[kept]).to(logits_NV.device)]
        scores = np.full(len(ids), np.nan, np.float32)
        top_N1, log_total_N1 = ops.log_total(logits_NV)
        scores[kept] = (picked - top_N1[at, 0] - log_total_N1[at, 0]).cpu().numpy()
        self._scores[cells] = scores

    def result(self) -> jobs.Array | jobs.CsrArray | None:
        if self.given is None:
            return None
        if not isinstance(self.given, jobs.CsrArray):
            return self._scores.reshape(self.given.shape)
        return jobs.CsrArray(
            values=self._scores,
            crow_indices=self.given.crow_indices,
            col_indices=self.given.col_indices,
            shape=self.given.shape,
        )


def empty_topk(num_rows: int, k: int) -> jobs.TopK:
    return jobs.TopK(
        token_ids=np.zeros((num_rows, k), np.int32),
        logprobs=np.full((num_rows, k), EMPTY_LOGPROB, np.float32),
    )
