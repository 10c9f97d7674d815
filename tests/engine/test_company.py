"""Packing, splitting and company change no number, and in deterministic mode no bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from training import assert_close, job, make, make_data, named_grads, train

from tinkex.errors import InvalidInputError


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo", "gspo"])
@pytest.mark.parametrize(
    "config",
    [{"max_tokens": 13}, {"head_rows": 3}, {"activation_bytes": 1}, {"deterministic": True}],
    ids=lambda config: next(iter(config)),
)
def test_any_split_of_a_batch_gives_the_same_numbers(tiny, rng, loss_fn, config):
    data = make_data(rng, loss_fn)
    whole, split = tiny("qwen3").trainer(), tiny("qwen3").trainer(**config)
    make(whole), make(split)
    (expected,), (got,) = train(whole, job(data, loss_fn)), train(split, job(data, loss_fn))
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5, atol=1e-5)
    assert got.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for name, grad in named_grads(whole).items():
        assert_close(named_grads(split)[name], grad, name)


def test_order_of_datums_changes_nothing(tiny, rng):
    data = make_data(rng)
    one, other = tiny().trainer(), tiny().trainer()
    make(one), make(other)
    (forwards,), (backwards,) = train(one, job(data)), train(other, job(data[::-1]))
    for ours, theirs in zip(backwards.outputs[::-1], forwards.outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5, atol=1e-6)
    for name, grad in named_grads(one).items():
        assert_close(named_grads(other)[name], grad, name)


def test_tenants_of_different_rank_share_a_pass_and_get_their_own_numbers(tiny, rng):
    ranks = {"a": 1, "b": 4, "c": 17}
    together = tiny().trainer()
    data = {name: make_data(rng) for name in ranks}
    for name, rank in ranks.items():
        make(together, name, rank=rank, train_mlp=name != "b")
    results = train(together, *(job(data[name], adapter_id=name) for name in ranks))
    for (name, rank), result in zip(ranks.items(), results, strict=True):
        alone = tiny().trainer()
        make(alone, name, rank=rank, train_mlp=name != "b")
        (expected,) = train(alone, job(data[name], adapter_id=name))
        for ours, theirs in zip(result.outputs, expected.outputs, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5, atol=1e-6)
        for key, grad in named_grads(alone, name).items():
            assert_close(named_grads(together, name)[key], grad, key)


def test_a_neighbour_cannot_change_a_single_bit(tiny, rng):
    """Same company in shape, wildly different in content, down to an adapter full of NaN."""
    mine, quiet, loud = make_data(rng), make_data(rng), make_data(rng)

    def run(neighbour_data, poison):
        trainer = tiny().trainer()
        make(trainer, "a"), make(trainer, "b")
        if poison:
            trainer.adapters["b"].adapter.flat.fill_(math.nan)
        results = trainer.train([job(mine), job(neighbour_data, adapter_id="b")])
        return results, trainer.adapters["a"].grad.clone()

    (calm, _), calm_grad = run(quiet, poison=False)
    (shaken, failed), shaken_grad = run(loud, poison=True)
    assert isinstance(failed, InvalidInputError)
    assert torch.equal(calm_grad, shaken_grad)
    for ours, theirs in zip(calm.outputs, shaken.outputs, strict=True):
        np.testing.assert_array_equal(ours["logprobs"], theirs["logprobs"])


def test_in_deterministic_mode_company_changes_no_bit(tiny, rng):
    mine, theirs = make_data(rng), make_data(rng, lengths=[3, 40, 9])
    alone, company = (tiny().trainer(deterministic=True) for _ in range(2))
    make(alone), make(company), make(company, "b", rank=9)
    (expected,) = train(alone, job(mine))
    _, got = train(company, job(theirs, adapter_id="b"), job(mine))
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(a["logprobs"], b["logprobs"])
    assert torch.equal(alone.adapters["a"].grad, company.adapters["a"].grad)


def test_a_pass_of_another_between_two_of_ours_takes_no_gradient_away(tiny, rng):
    """A long job lets others' short ones by; in deterministic mode it has gathered shards then."""
    mine, theirs = make_data(rng), make_data(rng, lengths=[3])
    alone, visited = (tiny().trainer(deterministic=True) for _ in range(2))
    make(alone), make(visited), make(visited, "b", rank=9)
    is_visiting = False

    def visit() -> None:
        nonlocal is_visiting
        if not is_visiting:
            is_visiting = True
            train(visited, job(theirs, adapter_id="b"))
            is_visiting = False

    visited.passes.after_pass = visit
    train(alone, job(mine)), train(visited, job(mine))
    assert torch.equal(alone.adapters["a"].grad, visited.adapters["a"].grad)
    assert visited.adapters["b"].grad is not None


def test_in_deterministic_mode_order_and_split_change_no_bit_of_a_logprob(tiny, rng):
    data = make_data(rng)
    trainer = tiny("qwen3").trainer(deterministic=True)
    make(trainer)
    (whole,) = train(trainer, job(data))
    (reversed_,) = train(trainer, job(data[::-1]))
    pieces = [output for datum in data for output in train(trainer, job((datum,)))[0].outputs]
    for one, two, three in zip(whole.outputs, reversed_.outputs[::-1], pieces, strict=True):
        np.testing.assert_array_equal(one["logprobs"], two["logprobs"])
        np.testing.assert_array_equal(one["logprobs"], three["logprobs"])


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_shards_side_by_side_are_the_shards_one_after_the_other(tiny, rng, loss_fn, monkeypatch):
    """What a decoder gets that keeps pieces apart; that no bit differs is shown on CUDA."""
    data = make_data(rng, loss_fn, lengths=[7, 12, 12, 1, 30, 3, 20, 9, 14, 30, 5])
    after, beside = (tiny("qwen3").trainer(deterministic=True) for _ in range(2))
    make(after), make(beside)
    passes = []
    forward = beside.decoder.forward

    def watched(tokens_T, positions_T, attend, lora, **options):
        passes.append((len(tokens_T), lora.apart, len(lora.spans)))
        return forward(tokens_T, positions_T, attend, lora, **options)

    monkeypatch.setattr(beside.decoder, "forward", watched)
    monkeypatch.setattr(beside.decoder, "batch_invariant", True)
    monkeypatch.setattr(beside.decoder, "keeps_pieces_apart", True)
    for _ in range(2):  # gradients are gathered
        (expected,), (got,) = train(after, job(data, loss_fn)), train(beside, job(data, loss_fn))
    assert passes[0] == (sum(len(datum.tokens) for datum in data), True, 8)
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5, atol=1e-5)
    ours, theirs = beside.adapters["a"].grads, after.adapters["a"].grads
    assert sorted(ours) == sorted(theirs) == list(range(8))
    for shard, grad in theirs.items():
        assert_close(ours[shard], grad, str(shard))
