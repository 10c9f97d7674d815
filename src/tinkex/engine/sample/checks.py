"""What can be wrong with a sample job, found before it is queued.

Knows the job, the size of the vocabulary and how experts are chosen; what depends on memory is the
sampler's to check.
"""

from __future__ import annotations

import numpy as np

from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.routing import ExpertCounts
from tinkex.contract.sampling import check_draws, check_vocabulary
from tinkex.contract.settings import check
from tinkex.engine import jobs
from tinkex.engine.numerics import routed_experts
from tinkex.errors import InvalidInputError


def check_sample_job(
    job: jobs.SampleJob, vocab_size: int, experts: ExpertCounts | None = None
) -> None:
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
    check(job)  # A job is both `DrawSettings` and `SampleOptions`.
    check_vocabulary(job, vocab_size)
    check_draws(job, len(prompt))
    if job.routed_experts:
        routed_experts.require(experts, job.base_model, ROUTED_EXPERTS)
