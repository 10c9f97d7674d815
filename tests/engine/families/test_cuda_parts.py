"""The decoder for CUDA computes what the plain one does, mixtures, sinks and delta layers included.

Off CUDA, Triton's interpreter runs its kernels on the CPU in fp32, and the library's attention
backward, which exists on CUDA alone, is replaced by autograd.
"""

from __future__ import annotations

import sys

import pytest
import torch
from table import FAMILIES, HYBRIDS, VOCAB
from test_arithmetic import noisy_adapter, packed, sequences_of

if sys.platform != "linux":
    pytest.skip("triton has no build for this system", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("on a card tests/engine/test_cuda.py holds them, in bf16", allow_module_level=True)

from tinkex.engine.cuda import adapter_operand, delta_rule
from tinkex.engine.cuda import delta as cuda_delta
from tinkex.engine.cuda.flash import PackedFlash
from tinkex.engine.cuda.mixed_layers import MixedLayerDecoder
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch
from tinkex.engine.model import delta
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.base_model import resolve
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import DeltaConfig
from tinkex.engine.model.weights import open_weights
from tinkex.engine.numerics.mxfp4 import PackedExperts


def by_autograd(self, layer_index, dout, q, k, v, out, lse):
    """What the library's backward computes, from the sinks that the forward was given."""
    bounds = [0]
    for length in self._lengths:
        bounds.append(bounds[-1] + length)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        attend = PackedCausal(bounds, self._config.windows)
        again = attend(layer_index, *leaves, self.sinks.get(layer_index))
    torch.testing.assert_close(again.detach(), out, rtol=1e-4, atol=1e-5)
    return torch.autograd.grad(again, leaves, dout)


def over_rows(a, b):
    """torch.mm with fp32 sums of bf16 numbers exists on CUDA alone."""
    return (a.t() @ b)[None]


@pytest.fixture
def cuda_decoder(monkeypatch):
    """`cuda_decoder(folder)`: the decoder for CUDA, wherever this runs."""
    monkeypatch.setattr(delta_rule, "CHUNK", 16)
    forward = PackedFlash.forward

    def remember(self, layer_index, q, k, v, sinks_H=None, **options):
        self.sinks[layer_index] = sinks_H
        return forward(self, layer_index, q, k, v, sinks_H, **options)

    monkeypatch.setattr(PackedFlash, "sinks", {}, raising=False)
    monkeypatch.setattr(PackedFlash, "forward", remember)
    monkeypatch.setattr(PackedFlash, "backward", by_autograd)
    monkeypatch.setattr(adapter_operand, "over_rows", over_rows)

    def load(folder, **options):
        source = resolve(str(folder))
        config = source.config()
        return MixedLayerDecoder(config, open_weights(source), dtype=torch.float32, **options)

    return load


@pytest.mark.parametrize(("family", "rank"), [*((f, 8) for f in FAMILIES), ("qwen3_moe", 3)])
def test_a_training_pass_gives_the_plain_decoders_numbers(family_model, cuda_decoder, family, rank):
    model = family_model(family)
    ours, plain = cuda_decoder(model.folder), model.decoder()
    adapters = [noisy_adapter(plain, seed, rank=rank) for seed in range(2)]
    # The last text is longer than any window. Hybrids have none, and their many layers take the
    # interpreter's time row by row.
    lengths = [5, 3, 6] if family in HYBRIDS else [7, 5, 12]
    texts, cut, size = sequences_of(lengths), sum(lengths[:2]), sum(lengths)
    lora = LoraBatch([AdapterSpan(0, cut, adapters[0]), AdapterSpan(cut, size, adapters[1])])
    slope = torch.randn(size, plain.config.hidden_size, generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(len(t)) for t in texts])
    answers = []
    for decoder in (plain, ours):
        for adapter in adapters:
            adapter.drop_grad()
            adapter.start_grad()
        routing = Routing()
        attend = PackedCausal([0, lengths[0], cut, size], decoder.config.windows)
        hidden = decoder.forward(torch.cat(texts), positions, attend, lora, routing=routing)
        hidden.backward(slope)
        answers.append((hidden.detach(), [a.grad.clone() for a in adapters], routing))
    (h1, g1, r1), (h2, g2, r2) = answers
    assert {k: v.tolist() for k, v in r1.chosen.items()} == {
        k: v.tolist() for k, v in r2.chosen.items()
    }
    assert float((h1 - h2).norm() / h1.norm()) < 1e-4
    for one, other in zip(g1, g2, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-3


def pass_of(decoder, adapter, given):
    """(hidden states, the adapter's gradient, where the rows went) of a packed training pass."""
    texts = sequences_of([7, 12])
    slope = torch.randn(19, decoder.config.hidden_size, generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(len(t)) for t in texts])
    attend = PackedCausal([0, 7, 19], decoder.config.windows)
    adapter.drop_grad()
    adapter.start_grad()
    routing, lora = Routing(given), LoraBatch([AdapterSpan(0, 19, adapter)])
    hidden = decoder.forward(torch.cat(texts), positions, attend, lora, routing=routing)
    hidden.backward(slope)
    return hidden.detach(), adapter.grad.clone(), routing.chosen


@pytest.mark.parametrize(("family", "rank"), [("olmoe", 8), ("gpt_oss", 8), ("qwen3_moe", 3)])
def test_prescribed_experts_are_followed_forward_and_backward(
    family_model, cuda_decoder, family, rank
):
    """Half of the rows are prescribed; rank 3 takes the way of adapters that cannot be grouped."""
    model = family_model(family)
    ours, plain = cuda_decoder(model.folder), model.decoder()
    adapter = noisy_adapter(plain, 1, rank=rank)
    free = pass_of(plain, adapter, {})[2]
    given = {layer: (chosen + 1) % plain.config.experts.count for layer, chosen in free.items()}
    for chosen in given.values():
        chosen[::2] = -1
    (h1, g1, c1), (h2, g2, c2) = (pass_of(one, adapter, given) for one in (plain, ours))
    for layer, rows in given.items():
        assert torch.equal(c2[layer][1::2], rows[1::2])
        assert torch.equal(c2[layer].sort().values, c1[layer].sort().values)
    assert float((h1 - h2).norm() / h1.norm()) < 1e-4
    assert float((g1 - g2).norm() / g1.norm()) < 1e-3


def test_experts_kept_in_4_bits_give_the_same_bits(mxfp4, cuda_decoder):
    whole, kept = (cuda_decoder(mxfp4[0], keep_packed=flag) for flag in (False, True))
    assert isinstance(kept.layers[0].mixture.down_EDM, PackedExperts)
    adapter = noisy_adapter(whole, 1, rank=8)
    one, other = (pass_of(decoder, adapter, {}) for decoder in (whole, kept))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1, 7]], ids=["a step", "some tokens"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_on_the_card_follow_the_rule(family_model, family, lengths):
    decoder = family_model(family).decoder()
    weights, eps = decoder.layers[0].delta, decoder.config.norm_eps
    config = weights.config
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    fused = noise(sum(lengths), config.channels + config.values + 2 * config.value_heads)
    conv = noise(6, config.conv_width - 1, config.channels)
    heads = noise(6, config.value_heads, config.key_size, config.value_size)
    slots = [4, 0, 5]
    expected = {}

    class Plainly:
        """Each sequence's tokens from its state, by the plain rule."""

        def recur(self, index, weights, x, g, beta):
            outputs, start = [], 0
            for slot, length in zip(slots, lengths, strict=True):
                rows = slice(start, start := start + length)
                before = delta.DeltaState(conv[[slot]], heads[[slot]])
                some = (t[None, rows] for t in (x, g, beta))
                out, expected[slot] = delta.mix(weights, *some, before)
                outputs.append(out[0])
            return torch.cat(outputs)

        def __call__(self, *args):
            raise AssertionError

    truth = decoder._delta(0, weights, fused, Plainly())
    tokens = cuda_delta.TokenBounds.of(slots, lengths, fused.device)
    ours = cuda_delta.advance(weights, weights.in_order(fused), conv, heads, tokens, eps)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    for slot, after in expected.items():
        torch.testing.assert_close(conv[slot], after.conv_BwC[0])
        torch.testing.assert_close(heads[slot], after.heads_BHkv[0], rtol=1e-4, atol=1e-5)


def test_logits_without_autograd_are_the_plain_decoders(family_model, cuda_decoder):
    for family in ("olmoe", "qwen3_5_moe", "gpt_oss"):
        model = family_model(family)
        texts = sequences_of([4, 9])
        with torch.no_grad():
            ours, truth = packed(cuda_decoder(model.folder), texts), packed(model.decoder(), texts)
        assert ours.shape == (13, VOCAB)
        assert float((ours - truth).norm() / truth.norm()) < 1e-4, family


def test_chunks_on_the_card_are_the_rule_forward_and_backward():
    """Several lengths; decays from almost none to almost all."""
    rng = torch.Generator().manual_seed(0)
    config = DeltaConfig(key_heads=1, value_heads=2, key_size=16, value_size=16)
    lengths = [3, 70, 130]
    num = sum(lengths)

    def noise(*shape):
        return torch.randn(*shape, generator=rng)

    weights = delta.DeltaWeights(config, noise(config.channels, 4), noise(2), noise(2), noise(16))
    x = noise(num, config.channels).requires_grad_()
    g = (-noise(num, 2).abs() * 10.0 ** noise(2)).requires_grad_()
    beta = noise(num, 2).sigmoid().requires_grad_()
    slope = noise(num, 2, 16)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    truth = PackedCausal(bounds).recur(0, weights, x, g, beta)
    ours = delta_rule.mix_packed(weights, x, g, beta, lengths)
    torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-4)
    expected = torch.autograd.grad(truth, (x, g, beta), slope)
    for mine, reference in zip(
        torch.autograd.grad(ours, (x, g, beta), slope), expected, strict=True
    ):
        assert float((mine - reference).norm() / reference.norm()) < 1e-3
