"""20,000 samples through the whole sampler follow the distribution that transformers computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tinkex.engine import jobs
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler

NUM_JOBS, NUM_EACH = 10, 2000
NUM = NUM_JOBS * NUM_EACH
PROMPT = [3, 14, 15, 92, 65]
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
}


def expected_probs(model, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0):
    """By definition, one token at a time, from transformers' logits in float64."""
    with torch.no_grad():
        logits_V = model(torch.tensor([PROMPT])).logits[0, -1].numpy() / temperature
    probs_V = np.exp(logits_V - logits_V.max())
    probs_V /= probs_V.sum()
    kept, mass = np.zeros(len(probs_V)), 0.0
    for rank, token in enumerate(np.argsort(-probs_V)):
        if rank == top_k or mass >= top_p:
            break
        kept[token] = probs_V[token]
        mass += probs_V[token]
    return kept / kept.sum()


def sampled_tokens(sampler: Sampler, **settings) -> np.ndarray:
    ends: list[jobs.Event] = []
    for index in range(NUM_JOBS):
        job = jobs.SampleJob(
            job_id=str(index),
            base_model="m",
            adapter_folder=None,
            prompt=np.array(PROMPT),
            num_samples=NUM_EACH,
            max_tokens=1,
            stop_tokens=(),
            seed=index,
            **settings,
        )
        sampler.add(job, None, ends.append)
    while sampler.has_work:
        sampler.step()
    results = [end.result for end in ends if isinstance(end, jobs.Done)]
    return np.concatenate([s.tokens for result in results for s in result.sequences])


@pytest.mark.parametrize("name", SETTINGS)
def test_20000_samples_pass_a_chi_square_test(tiny, name):
    model = tiny()
    tokens = sampled_tokens(
        Sampler(model.decoder(), SamplerConfig(kv_bytes=1 << 24)), **SETTINGS[name]
    )
    assert len(tokens) == NUM
    probs = expected_probs(model.truth, **SETTINGS[name])
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    # Cells that expect fewer than five samples are joined, as the test demands.
    common = probs * NUM >= 5
    observed, wanted = counts[common], probs[common] * NUM
    if (rest := probs[~common].sum() * NUM) > 0:
        observed, wanted = np.append(observed, counts[~common].sum()), np.append(wanted, rest)
    assert stats.chisquare(observed, wanted).pvalue > 0.001
