"""Deterministic mode on a CPU: the trainer gives the sampler's logprobs to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tinkex.engine import jobs
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.exact_attention import exact_attention
from tinkex.engine.model.shape import ModelConfig, RopeConfig
from tinkex.engine.model.weights import RandomWeights
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer

if not torch.backends.mkl.is_available():
    pytest.skip("torch has no MKL here; its sums are another library's", allow_module_level=True)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("length", [1, 7, 256, 601])
def test_exact_attention_and_its_gradients_are_attention_s(length, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, length, 32, requires_grad=True) for n in (6, 2, 2))
    out = exact_attention(q, k, v, torch.full((2,), length), window)
    seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
    want = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    dout = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_size": 64,
    "mlp_size": 512,
    "norm_eps": 1e-6,
    "rope": RopeConfig(theta=1e6),
    "max_context_length": 2048,
}
FAMILIES = {
    "llama": ModelConfig(arch="llama", **SHAPE),
    "qwen3": ModelConfig(arch="qwen3", qk_norm=True, **SHAPE),
    "qwen2": ModelConfig(arch="qwen2", qkv_bias=True, tied_head=True, **SHAPE),
    "windowed": ModelConfig(arch="mistral", windows=(None, 100, None), **SHAPE),
}


@pytest.mark.parametrize("pass_tokens", [512, 37])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_gives_the_sampler_s_logprobs_to_the_bit(family, pass_tokens):
    """Two adapters and none in one batch, prompts of 1 to 500 tokens, whole and in chunks."""
    config = FAMILIES[family]
    decoder = Decoder(config, RandomWeights(config, seed=1))
    trainer = Trainer(decoder, base_model="m", config=TrainerConfig(deterministic=True))
    generator = torch.Generator().manual_seed(3)
    for rank in (8, 5):
        lora = jobs.LoraSpec(rank=rank, seed=rank)
        create = jobs.CreateAdapterJob(job_id="c", adapter_id=str(rank), base_model="m", lora=lora)
        trainer.create(create)
        for _, _, b_Or in trainer.find(str(rank)).adapter.modules():
            b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.05)
    rng = np.random.default_rng(0)
    asked = [(rng.integers(0, 1024, n), rank) for n, rank in ((1, 8), (500, 5), (33, 8), (250, 8))]
    sampler, ends = Sampler(decoder, SamplerConfig(exact=True, max_pass_tokens=pass_tokens)), {}
    for number, (prompt, rank) in enumerate(asked):
        job = jobs.SampleJob(
            job_id=str(number), base_model="m", adapter_folder=None, prompt=prompt,
            num_samples=1 + number % 2, max_tokens=12, seed=number, stop_tokens=(),
        )  # fmt: skip
        adapter = trainer.find(str(rank)).adapter.frozen_copy()
        sampler.add(job, adapter, lambda event: ends.update({event.job_id: event}), str(rank))
    while sampler.has_work:
        sampler.step()
    for number, (prompt, rank) in enumerate(asked):
        for sample in ends[str(number)].result.sequences:
            tokens, before = np.concatenate([prompt, sample.tokens]), len(prompt) - 1
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": np.concatenate([np.zeros(before, np.float32), sample.logprobs]),
                "advantages": np.repeat(np.float32([0, 1]), [before, len(sample.tokens)]),
            }
            datum = jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs)
            job = jobs.TrainJob(
                job_id="t", adapter_id=str(rank), data=(datum,), loss_fn="importance_sampling"
            )
            (result,) = trainer.train([job])
            assert not isinstance(result, Exception), result
            assert result.metrics["sampler_gap_max:max"] == 0
            assert result.metrics["loss:sum"] == -len(sample.tokens)
