"""How the toy engine draws tokens and scores prompts.

The dense functions are the plain statement of what the draw settings mean; the tests of the real
sampler use them as oracle. Knows rows of logits, not threads or checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.sampling import EMPTY_LOGPROB, DrawSettings
from tinkex.engine import jobs
from tinkex.engine.sample.rng import PROMPT_ALT, sample_key, uniform
from tinkex.engine.toy.model import Row, ToyAdapter


def log_softmax(logits_V: NDArray[np.float64]) -> NDArray[np.float64]:
    top = logits_V.max()
    shifted: NDArray[np.float64] = logits_V - (top + np.log(np.exp(logits_V - top).sum()))
    return shifted


def _filtered(row: Row, job: DrawSettings) -> NDArray[np.float64]:
    """Logprobs of the distribution sampled from: bias, temperature, top_k, top_p and min_p."""
    logits_V = _biased(row, job) / max(job.temperature, 1e-30)
    order_V = np.argsort(-logits_V, kind="stable")
    if job.top_k > 0:
        logits_V[order_V[job.top_k :]] = -np.inf
    if job.top_p < 1:
        probs_V = np.exp(log_softmax(logits_V))[order_V]
        logits_V[order_V[np.cumsum(probs_V) - probs_V >= job.top_p]] = -np.inf
    if job.min_p:
        logits_V[logits_V < logits_V.max() + np.log(job.min_p)] = -np.inf
    return log_softmax(logits_V)


def _biased(row: Row, job: DrawSettings) -> NDArray[np.float64]:
    logits_V = row.dense()
    for token, added in (job.logit_bias or {}).items():
        logits_V[token] += added
    return logits_V


def draw(row: Row, job: DrawSettings, u: float) -> tuple[int, float, NDArray[np.float64] | None]:
    """Draw a token; gives it, its logprob, and the distribution where it was made.

    Greedy sampling reports logprobs at T = 1.
    """
    if job.temperature == 0:
        if job.logit_bias:
            logprobs_V = log_softmax(_biased(row, job))
            token = int(logprobs_V.argmax())
            return token, float(logprobs_V[token]), logprobs_V
        token = max(row.logits, key=lambda v: (row.logits[v], -v))
        if row.logits[token] < 0:  # All seen tokens were trained below the unseen ones.
            token = int(row.dense().argmax())
        return token, row.logprob(token), None
    if job.top_k > 0 or job.top_p < 1 or job.min_p or job.logit_bias or job.temperature != 1:
        logprobs_V = _filtered(row, job)
        token = min(
            int(np.searchsorted(np.cumsum(np.exp(logprobs_V)), u, side="right")),
            row.vocab_size - 1,
        )
        while not np.isfinite(logprobs_V[token]):  # Rounding put u past the last allowed token.
            token -= 1
        return token, float(logprobs_V[token]), logprobs_V
    token = _draw_sparse(row, u)
    return token, row.logprob(token), None


def _draw_sparse(row: Row, u: float) -> int:
    """Inverse distribution function without a dense vector: seen tokens first, then the others."""
    seen = 0.0
    for token, logit in row.logits.items():
        seen += math.exp(logit - row.log_z)
        if u < seen:
            return token
    num_unseen = row.vocab_size - len(row.logits)
    if num_unseen == 0:
        return next(reversed(row.logits))
    rank = min(num_unseen - 1, int((u - seen) / (1 - seen) * num_unseen))
    for token in sorted(row.logits):  # The rank-th id that is not among the seen ones.
        rank += token <= rank
    return rank


def top(logprobs_V: NDArray[np.float64], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k likeliest; cells that a filter or a small vocabulary leaves empty are at the end."""
    best = np.argsort(-logprobs_V, kind="stable")[:k]
    best = best[np.isfinite(logprobs_V[best])]
    ids, values = np.zeros(k, np.int32), np.full(k, EMPTY_LOGPROB, np.float32)
    ids[: len(best)], values[: len(best)] = best, logprobs_V[best]
    return ids, values


def stack(rows: list[tuple[NDArray[np.int32], NDArray[np.float32]]], k: int) -> jobs.TopK:
    return jobs.TopK(
        token_ids=np.array([ids for ids, _ in rows], np.int32).reshape(len(rows), k),
        logprobs=np.array([values for _, values in rows], np.float32).reshape(len(rows), k),
    )


def ends_with_stop(tokens: list[int], stops: tuple[str, ...]) -> bool:
    """Whether the last token completes a stop, in a text of one printable character a token."""
    text = "".join(chr(32 + token % 95) for token in tokens)
    return any(stop in text and stop not in text[:-1] for stop in stops)


def prompt_scores(job: jobs.SampleJob, adapter: ToyAdapter, seed: int) -> dict[str, Any]:
    """Everything a job may ask about its prompt; T = 1 except for alternative draws."""
    prompt = np.asarray(job.prompt, np.int64)
    out: dict[str, Any] = {}
    last_n = job.prompt_logprobs_last_n
    first = 1 if last_n is None else max(1, len(prompt) - last_n)
    if job.prompt_logprobs:
        scores_T = np.full(len(prompt), np.nan, np.float32)
        scores_T[first:] = adapter.logprobs(prompt[first - 1 : -1], prompt[first:])
        out["prompt_logprobs"] = scores_T
    if k := job.topk_prompt_logprobs:
        ids_TK = np.zeros((len(prompt), k), np.int32)
        values_TK = np.full((len(prompt), k), EMPTY_LOGPROB, np.float32)
        for t in range(first, len(prompt)):
            row = adapter.row(int(prompt[t - 1]))
            ids_TK[t], values_TK[t] = top(log_softmax(row.dense()), k)
        out["topk_prompt"] = jobs.TopK(token_ids=ids_TK, logprobs=values_TK)
    if job.target_prompt_logprobs is not None:
        out["target_prompt_logprobs"] = _target_scores(job.target_prompt_logprobs, prompt, adapter)
    if k := job.prompt_alt_tokens_k:
        out["prompt_alt"] = _alternatives(job, adapter, seed, k)
    return out


def _target_scores(
    targets: jobs.Array | jobs.CsrArray, prompt: NDArray[np.int64], adapter: ToyAdapter
) -> jobs.Array | jobs.CsrArray:
    """Logprobs of the given ids, in the given layout; a skipped cell (-1) is NaN."""
    if isinstance(targets, jobs.CsrArray):
        rows = np.repeat(np.arange(targets.shape[0]), np.diff(targets.crow_indices))
        ids = targets.values.astype(np.int64)
    else:
        rows = np.repeat(np.arange(targets.shape[0]), targets.shape[1])
        ids = targets.reshape(-1).astype(np.int64)
    scores = adapter.logprobs(prompt[rows], np.maximum(ids, 0)).astype(np.float32)
    scores[ids < 0] = np.nan
    if not isinstance(targets, jobs.CsrArray):
        return scores.reshape(targets.shape)
    return jobs.CsrArray(
        values=scores,
        crow_indices=targets.crow_indices,
        col_indices=targets.col_indices,
        shape=targets.shape,
    )


def _alternatives(job: jobs.SampleJob, adapter: ToyAdapter, seed: int, k: int) -> jobs.TopK:
    """k draws at every prompt position from 1, from the distribution the job samples from."""
    prompt = [int(t) for t in job.prompt]
    draws = [
        [draw(adapter.row(c), job, uniform(sample_key(seed, j, PROMPT_ALT), t)) for j in range(k)]
        for t, c in enumerate(prompt[:-1])
    ]
    return jobs.TopK(
        token_ids=np.array([[d[0] for d in row] for row in draws], np.int32).reshape(-1, k),
        logprobs=np.array([[d[1] for d in row] for row in draws], np.float32).reshape(-1, k),
    )
