"""Every native family samples what it trains: logprobs, forks, prefixes, preemption, draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from table import FAMILIES, HYBRIDS, VOCAB
from test_arithmetic import noisy_adapter, packed

from tinkex.engine import jobs
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler

PROMPT = np.arange(3, 40) % VOCAB


def run(sampler, adapter=None, **options):
    """The result of one job, alone in the sampler."""
    done = []
    job = jobs.SampleJob(
        **({"job_id": "j", "base_model": "m", "adapter_folder": None, "prompt": PROMPT} | options)
    )
    sampler.add(job, adapter, done.append, version="v")
    while sampler.has_work:
        sampler.step()
    assert isinstance(done[-1], jobs.Done), done[-1]
    return done[-1].result


def sampler_of(decoder, **config):
    return Sampler(decoder, SamplerConfig(**({"kv_bytes": 1 << 22, "block_size": 4} | config)))


def scored(decoder, adapter, tokens, start):
    """The trainer's logprobs of tokens from `start` on."""
    tokens = torch.as_tensor(tokens)
    with torch.no_grad():
        lora = LoraBatch([AdapterSpan(0, len(tokens), adapter)]) if adapter else None
        logp = packed(decoder, [tokens], lora).log_softmax(-1)
    return logp[start - 1 : -1].gather(1, tokens[start:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers(family_model, family):
    """Chunked prefill, forks of one prompt, and a second round over shared prefixes."""
    decoder = family_model(family).decoder()
    adapter = noisy_adapter(decoder, 1)
    sampler = sampler_of(decoder, max_pass_tokens=11)
    for seed in range(2):
        result = run(sampler, adapter, num_samples=3, max_tokens=9, seed=seed, stop_tokens=())
        assert result.prompt_cache_hit_tokens == (36 if seed else 0)
        for sequence in result.sequences:
            tokens = np.concatenate([PROMPT, sequence.tokens])
            truth = scored(decoder, adapter, tokens, len(PROMPT))
            np.testing.assert_allclose(sequence.logprobs, truth, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preempted_sample_goes_on_as_if_it_had_not_been(family_model, family):
    decoder = family_model(family).decoder()
    options = {"num_samples": 5, "max_tokens": 20, "seed": 5, "stop_tokens": ()}
    calm = run(sampler_of(decoder), **options)
    tight = sampler_of(decoder)
    tight.scheduler.pool.allocate(tight.scheduler.pool.num_blocks - 30)
    pressed = run(tight, **options)
    assert tight.scheduler.num_preempted > 0
    for one, other in zip(calm.sequences, pressed.sequences, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_frequencies_of_the_model(family_model, family):
    """Chi-square over the second token, so that the state after a decode step counts."""
    decoder = family_model(family).decoder()
    result = run(
        sampler_of(decoder, max_running=500), num_samples=500, max_tokens=2, seed=3, top_k=4
    )
    firsts = [int(sequence.tokens[0]) for sequence in result.sequences if len(sequence.tokens) > 1]
    first = max(set(firsts), key=firsts.count)
    seconds = [
        int(s.tokens[1]) for s in result.sequences if len(s.tokens) > 1 and s.tokens[0] == first
    ]
    with torch.no_grad():
        logits = packed(decoder, [torch.as_tensor([*PROMPT, first])])[-1]
    best = logits.topk(4)
    expected = best.values.softmax(-1).double().numpy() * len(seconds)
    observed = np.array([seconds.count(int(token)) for token in best.indices])
    assert observed.sum() == len(seconds)
    kept = expected > 3
    assert kept.sum() > 1  # or nothing would be compared
    scale = observed[kept].sum() / expected[kept].sum()
    assert stats.chisquare(observed[kept], expected[kept] * scale).pvalue > 1e-4


@pytest.mark.parametrize("family", HYBRIDS)
def test_company_and_saved_states_change_no_token(family_model, family):
    """Prompts that share a beginning, at once and one after the other, in few slots."""
    decoder = family_model(family).decoder()
    prompts = [np.concatenate([PROMPT[:24], np.full(7, 5 + i)]) for i in range(5)]
    options = {"max_tokens": 7, "temperature": 0.0, "stop_tokens": ()}
    alone = [run(sampler_of(decoder), prompt=p, **options).sequences[0] for p in prompts]
    sampler, done = sampler_of(decoder, max_running=3, max_pass_tokens=13), {}
    for number, prompt in enumerate([*prompts, *prompts]):
        job = jobs.SampleJob(
            job_id=str(number), base_model="m", adapter_folder=None, prompt=prompt, **options
        )
        sampler.add(job, None, lambda event: done.setdefault(event.job_id, []).append(event))
    while sampler.has_work:
        sampler.step()
    hits = 0
    for number in range(10):
        result = done[str(number)][-1].result
        hits += result.prompt_cache_hit_tokens
        assert result.sequences[0].tokens.tolist() == alone[number % 5].tokens.tolist()
        np.testing.assert_allclose(
            result.sequences[0].logprobs, alone[number % 5].logprobs, atol=1e-5
        )
    assert hits > 100


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="sums are another library's")
@pytest.mark.parametrize("family", ["qwen3-yarn", "qwen3_moe", "mixtral", "olmoe"])
def test_with_deterministic_a_mixtures_sampler_gives_the_trainers_bits(family_model, family):
    """Which other rows an expert computes changes no bit of any."""
    model = family_model(family)
    trainer = model.trainer(deterministic=True)
    lora = jobs.LoraSpec(rank=4, seed=1)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))
    adapter = trainer.find("a").adapter
    generator = torch.Generator().manual_seed(0)
    for _, _, b_Or in adapter.modules():
        b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.1)
    sampler = sampler_of(trainer.decoder, max_pass_tokens=23, exact=True)
    result = run(sampler, adapter, num_samples=3, max_tokens=9, seed=1, stop_tokens=())
    data = []
    for sequence in result.sequences:
        tokens = np.concatenate([PROMPT, sequence.tokens]).astype(np.int64)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
        data.append(jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs))
    (scored_job,) = trainer.train(
        [jobs.TrainJob(job_id="", adapter_id="a", data=tuple(data), loss_fn="cross_entropy")]
    )
    for output, sequence in zip(scored_job.outputs, result.sequences, strict=True):
        assert output["logprobs"][len(PROMPT) - 1 :].tolist() == sequence.logprobs.tolist()
