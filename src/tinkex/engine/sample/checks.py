"""What can be wrong with a sample job, found before it is queued.

Knows the job and the size of the vocabulary; what depends on memory is the sampler's to check.
"""

from __future__ import annotations

import math

import numpy as np

from tinkex.engine import jobs
from tinkex.errors import InvalidInputError


def check_sample_job(job: jobs.SampleJob, vocab_size: int) -> None:
    """Refuse a job that does not fit the model.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    prompt = np.asarray(job.prompt)
    if prompt.ndim != 1 or len(prompt) == 0:
        raise InvalidInputError("must hold at least one token", path="prompt")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        at = int(np.flatnonzero((prompt < 0) | (prompt >= vocab_size))[0])
        raise InvalidInputError(
            f"token {prompt[at]} is outside the vocabulary 0..{vocab_size - 1}",
            path=f"prompt[{at}]",
        )
    for path, value, ok, need in (
        ("num_samples", job.num_samples, job.num_samples >= 1, "at least 1"),
        ("max_tokens", job.max_tokens, (job.max_tokens or 0) >= 0, "not negative"),
        (
            "temperature",
            job.temperature,
            math.isfinite(job.temperature) and job.temperature >= 0,
            "a number not below 0",
        ),
        ("top_p", job.top_p, 0 < job.top_p <= 1, "above 0 and at most 1"),
        ("topk_prompt_logprobs", job.topk_prompt_logprobs, job.topk_prompt_logprobs >= 0, "0 up"),
        ("topk_sample_logprobs", job.topk_sample_logprobs, job.topk_sample_logprobs >= 0, "0 up"),
        ("prompt_alt_tokens_k", job.prompt_alt_tokens_k, job.prompt_alt_tokens_k >= 0, "0 up"),
    ):
        if not ok:
            raise InvalidInputError(f"must be {need}, got {value}", path=path)
