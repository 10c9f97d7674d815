"""On the model users start with, sampler and trainer agree, and packing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datums import train_datum
from training import distance, job, make, train

from tinkex.engine import jobs
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import TrainDatum
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.paged import kv_bytes_per_token
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.trainer import Trainer

SHARED = "Once upon a time, in a small town by the sea, there lived an old fisherman who"
TEXTS = [SHARED, SHARED + " had a cat", "def fibonacci(n):", SHARED]
ROOM = 112


@pytest.fixture(scope="module")
def trainer(default_model_dir) -> Trainer:
    trainer = Trainer(load_decoder(str(default_model_dir)), base_model="default")
    make(trainer, rank=4, noise=0.01)
    return trainer


@pytest.fixture(scope="module")
def sampled(trainer, default_model_dir) -> list[tuple[list[int], jobs.SampleResult]]:
    """Prompts and what was sampled, in chunks of 16, with a cache that holds half of it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    kv_bytes = ROOM * kv_bytes_per_token(trainer.decoder.config, torch.float32)
    config = SamplerConfig(kv_bytes=kv_bytes, block_size=4, max_pass_tokens=16)
    sampler = Sampler(trainer.decoder, config)
    weights = trainer.adapters["a"].adapter.frozen_copy()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    ends: dict[str, jobs.Event] = {}
    for index, prompt in enumerate(prompts):
        sample = jobs.SampleJob(
            job_id=str(index),
            base_model="default",
            adapter_folder="a",
            prompt=np.array(prompt),
            num_samples=2,
            max_tokens=20,
            stop_tokens=(),
            seed=index,
        )
        sampler.add(sample, weights, lambda event: ends.update({event.job_id: event}))
    while sampler.has_work:
        sampler.step()
    assert sampler.scheduler.num_preempted > 0
    results = [ends[str(index)].result for index in range(len(prompts))]
    assert sum(result.prompt_cache_hit_tokens for result in results) > 0
    return list(zip(prompts, results, strict=True))


def as_data(sampled) -> tuple[TrainDatum, ...]:
    data = []
    for prompt, result in sampled:
        for sequence in result.sequences:
            tokens = np.array([*prompt, *sequence.tokens])
            data.append(train_datum(tokens))
    return tuple(data)


def test_sampler_and_trainer_agree_on_logprobs(trainer, sampled):
    """users.md 2: with KV cache, prefix reuse, chunked prefill and preemption on."""
    (scored,) = train(trainer, job(as_data(sampled), backward=False))
    sequences = [(len(p), s) for p, result in sampled for s in result.sequences]
    gaps = []
    for (num_prompt, sequence), output in zip(sequences, scored.outputs, strict=True):
        expected = output["logprobs"][num_prompt - 1 :]
        assert distance(sequence.logprobs, expected) < 1e-5
        gaps.append(np.abs(sequence.logprobs - expected))
    gap = np.concatenate(gaps)
    print(f"\nsampler to trainer: mean {gap.mean():.1e}, largest {gap.max():.1e} nats")
    assert gap.mean() < 1e-5


def test_packing_changes_nothing(trainer, sampled):
    data = as_data(sampled)
    (packed,) = train(trainer, job(data, backward=False))
    for datum, together in zip(data, packed.outputs, strict=True):
        (alone,) = train(trainer, job((datum,), backward=False))
        assert distance(together["logprobs"], alone.outputs[0]["logprobs"]) < 1e-5
