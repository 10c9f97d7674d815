"""Every native family computes what transformers computes, and its adapters learn what they should.

The truth is float64; see `table`.
"""

from __future__ import annotations

import pytest
import torch
from table import FAMILIES, VOCAB, merged
from torch.func import functional_call

from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.families import FAMILIES as NATIVE
from tinkex.engine.model.mixture import combine
from tinkex.engine.model.shape import ExpertsConfig

LENGTHS = [7, 12, 12, 1, 30]


def test_every_native_family_has_a_row():
    dense = {"llama", "mistral", "qwen2", "qwen3"}  # tests/engine/test_decoder.py
    assert dense | set(FAMILIES) >= set(NATIVE)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Several chunks of the delta rule in texts as short as these."""
    monkeypatch.setattr("tinkex.engine.model.delta.CHUNK", 5)


def packed(decoder, sequences, lora=None, **options):
    """Logits of several sequences, computed in one stream."""
    bounds = [0]
    for sequence in sequences:
        bounds.append(bounds[-1] + len(sequence))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    attend = PackedCausal(bounds, decoder.config.windows)
    hidden = decoder.forward(torch.cat(sequences), positions, attend, lora, **options)
    return decoder.head(hidden, lora)


def sequences_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family_model, family):
    model = family_model(family)
    decoder = model.decoder()
    assert type(decoder) is Decoder
    sequences = sequences_of(LENGTHS)
    with torch.no_grad():
        ours = packed(decoder, sequences)
        truth = torch.cat([model.truth(s[None], use_cache=False).logits[0] for s in sequences])
    assert float((ours - truth).norm() / truth.norm()) < 1e-5
    torch.testing.assert_close(
        ours.double(), truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max())
    )


def noisy_adapter(decoder, seed, rank=3):
    adapter = fresh_adapter(
        decoder.targets,
        rank=rank,
        alpha=6.0,
        kinds=["attn", "mlp", "unembed"],
        seed=seed,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(seed)
    for _, _, b_Or in adapter.modules():
        b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.1)
    return adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_two_tenants_get_the_gradients_of_float64(family_model, family):
    """Our decoder in float64, since fp32 alone moves a delta rule's gradient by 1e-4 (its norm
    divides by outputs near zero); recomputed layers must give the very same bits."""
    model = family_model(family)
    decoder = model.decoder(torch.float64)
    adapters = [noisy_adapter(decoder, seed, rank=2 + seed) for seed in range(2)]
    texts = sequences_of([7, 11, 19])
    bounds = [0, 7, 37]
    lora = LoraBatch([AdapterSpan(0, 7, adapters[0]), AdapterSpan(7, 37, adapters[1])])
    slope = torch.randn(37, VOCAB, generator=torch.Generator().manual_seed(5))
    leaves = [p for a in adapters for p in a.parameters()]
    runs = []
    for room in (1e9, 0):
        logits = packed(decoder, texts, lora, room=room)
        runs.append(torch.autograd.grad(logits, leaves, slope, materialize_grads=True))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    expected, grads = [], []
    for number, adapter in enumerate(adapters):
        parameters = merged(model.truth, adapter)
        mine = texts[:1] if number == 0 else texts[1:]
        calls = [
            functional_call(
                model.truth, parameters, (text[None],), {"use_cache": False}, tie_weights=False
            ).logits[0]
            for text in mine
        ]
        whole = torch.cat(calls)
        expected.append(whole)
        part = slope[bounds[number] : bounds[number + 1]].double()
        own = list(adapter.parameters())
        grads += torch.autograd.grad(whole, own, part, materialize_grads=True)
    truth, logits = torch.cat(expected).detach(), logits.detach()
    assert float((logits - truth).norm() / truth.norm()) < 1e-6
    scale = torch.cat([g.flatten() for g in grads]).norm() / len(grads) ** 0.5
    for mine, reference in zip(runs[0], grads, strict=True):
        error = (mine.double() - reference.double()).norm()
        assert float(error) < 1e-5 * float(max(scale, reference.norm()))


def test_the_clamped_activation_has_the_slope_of_its_formula():
    """Gate and up on both sides of their limits, where the tiny models above seldom are."""
    config = ExpertsConfig(count=2, per_token=1, size=64, clamp=7.0)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 128, generator=generator, dtype=torch.float64) * 8).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    assert bool((gate > 7).any())
    assert bool((up < -7).any())
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    plain = gate * torch.sigmoid(gate * 1.702) * (up + 1)
    ours = combine(config, x)
    assert torch.equal(ours, plain)
    slope = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(plain, x, slope)
    torch.testing.assert_close(torch.autograd.grad(ours, x, slope)[0], expected)
