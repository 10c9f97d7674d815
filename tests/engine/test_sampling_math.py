"""Tokens are drawn from exactly the distribution that the settings describe."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tinkex.contract.sampling import DrawSettings
from tinkex.engine.numerics.ops import CPU
from tinkex.engine.sample.rng import sample_key, uniform, uniform_table, uniforms
from tinkex.engine.sample.sampling_math import Settings, draw, top_sampled
from tinkex.engine.toy.model import Row
from tinkex.engine.toy.sampling import _filtered

VOCAB = 300
NUM = 20_000
SETTINGS = {
    "plain": DrawSettings(temperature=1.0, top_k=-1, top_p=1.0),
    "cold": DrawSettings(temperature=0.6, top_k=-1, top_p=1.0),
    "hot": DrawSettings(temperature=1.7, top_k=-1, top_p=1.0),
    "top_k": DrawSettings(temperature=1.0, top_k=7, top_p=1.0),
    "top_p": DrawSettings(temperature=1.0, top_k=-1, top_p=0.8),
    "min_p": DrawSettings(min_p=0.05),
    "logit_bias": DrawSettings(logit_bias={3: 4.0, 7: -100.0, 299: 1.5}),
    "biased nucleus": DrawSettings(top_p=0.8, min_p=0.02, logit_bias={3: 4.0, 0: 2.0}),
    "all": DrawSettings(temperature=0.8, top_k=20, top_p=0.7),
}


def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def expected(setting: DrawSettings) -> np.ndarray:
    """Probabilities by the plain numpy version."""
    row = Row(VOCAB, dict(enumerate(logits().tolist())))
    return np.exp(_filtered(row, setting))


def numbers(keys: Iterable[int]) -> torch.Tensor:
    return torch.tensor([uniforms(key, 0) for key in keys], dtype=torch.float64)


def drawn(setting: DrawSettings, num: int = NUM) -> tuple[np.ndarray, np.ndarray]:
    u = numbers(sample_key(7, i) for i in range(num))
    settings = Settings.of([setting] * num, VOCAB)
    tokens, logprobs = draw(logits().repeat(num, 1), settings, u)
    return tokens.numpy(), logprobs.numpy()


@pytest.mark.parametrize("name", SETTINGS)
def test_20000_draws_pass_a_chi_square_test(name):
    probs = expected(SETTINGS[name])
    tokens, _ = drawn(SETTINGS[name])
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    # Cells that expect fewer than five draws are joined, as the test demands.
    common = probs * NUM >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(probs[common], probs[~common].sum()) * NUM
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted * (NUM / wanted.sum())).pvalue > 0.001


@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_are_those_of_the_distribution_sampled_from(name):
    tokens, logprobs = drawn(SETTINGS[name], 500)
    np.testing.assert_allclose(logprobs, np.log(expected(SETTINGS[name])[tokens]), atol=1e-5)


def test_rows_of_one_batch_keep_their_own_settings():
    """A row gives the same alone and in a batch with every other setting."""
    rows = [
        *SETTINGS.values(),
        DrawSettings(temperature=0.0, top_k=-1, top_p=1.0),
        DrawSettings(temperature=0.0, top_k=3, top_p=0.5),
    ] * 20
    u = numbers(sample_key(3, i) for i in range(len(rows)))
    together, together_lp = draw(logits().repeat(len(rows), 1), Settings.of(rows, VOCAB), u)
    for i, row in enumerate(rows):
        alone, alone_lp = draw(logits()[None].clone(), Settings.of([row], VOCAB), u[i : i + 1])
        assert alone.item() == together[i].item()
        assert alone_lp.item() == pytest.approx(together_lp[i].item(), abs=1e-5)


def test_greedy_takes_the_best_and_reports_temperature_one():
    tokens, logprobs = drawn(DrawSettings(temperature=0.0, top_k=5, top_p=0.3), 2)
    assert tokens.tolist() == [int(logits().argmax())] * 2
    expected_lp = CPU.logprobs_of(logits()[None], torch.tensor(tokens[:1])[:, None])[:, 0]
    assert logprobs[0] == pytest.approx(expected_lp.item(), abs=1e-6)


def test_greedy_takes_the_best_after_the_bias_and_reports_its_logprob():
    rows = [DrawSettings(temperature=0.0, logit_bias={5: 50.0}), DrawSettings(temperature=0.0)]
    tokens, logprobs = draw(logits().repeat(2, 1), Settings.of(rows, VOCAB), numbers([1, 2]))
    assert tokens.tolist() == [5, int(logits().argmax())]
    biased = logits().clone()
    biased[5] += 50
    assert float(logprobs[0]) == pytest.approx(float(biased.log_softmax(0)[5]), abs=1e-6)
    assert float(logprobs[1]) == pytest.approx(float(logits().log_softmax(0).max()), abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53, 0.5])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(name, u):
    cruel = torch.full((1, VOCAB), -1e9)
    cruel[0, 100:103] = torch.tensor([0.0, -1.0, 0.5])
    settings = Settings.of([SETTINGS[name]], VOCAB)
    tokens, logprobs = draw(cruel, settings, torch.tensor([[u, u, u]], dtype=torch.float64))
    assert tokens.item() in (100, 101, 102)
    assert logprobs.item() > -10


def test_top_p_sorts_everything_when_few_candidates_do_not_hold_it():
    """A nearly flat row: its nucleus is wider than the short cut."""
    flat = torch.zeros(1, 2000)
    u = numbers(sample_key(1, i) for i in range(4000))
    settings = Settings.of([DrawSettings(temperature=1.0, top_k=-1, top_p=0.9)] * 400, 2000)
    seen: set[int] = set()
    for part in u.split(400):
        seen |= set(draw(flat.repeat(400, 1), settings, part)[0].tolist())
    assert 1500 < len(seen) <= 1801


WIDE = 900  # more than the candidates that are tried before everything is sorted
ROWS = st.builds(
    DrawSettings,
    temperature=st.sampled_from([0.0, 5e-324, 1e-30, 0.3, 1.0, 1.7, 1e6]),
    top_k=st.sampled_from([-1, 1, 5, 511, 513, 600, WIDE - 1, WIDE, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([None, 0.0, 5e-324, 1e-5, 0.2, 1.0]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, WIDE - 1), st.integers(-100, 100)),
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROWS, min_size=2, max_size=4), seed=st.integers(0, 100))
def test_any_row_draws_in_any_company_what_it_draws_alone(rows: list[DrawSettings], seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits_NV = torch.randn(len(rows), WIDE, generator=generator) * 2
    u = numbers(sample_key(seed, i) for i in range(len(rows)))
    together, together_lp = draw(logits_NV.clone(), Settings.of(rows, WIDE), u)
    for i, row in enumerate(rows):
        one = slice(i, i + 1)
        alone, alone_lp = draw(logits_NV[one].clone(), Settings.of([row], WIDE), u[one])
        assert alone.item() == together[i].item()
        assert alone_lp.item() == pytest.approx(together_lp[i].item(), rel=1e-5, abs=1e-5)


def test_top_p_is_a_share_of_a_wide_top_k_in_any_company():
    """The short cut has 512 candidates, top_k leaves 600, and a neighbour has no top_k."""
    rows = [DrawSettings(top_k=600, top_p=0.1), DrawSettings(top_p=0.5)]
    logits_NV = torch.randn(1, 2000, generator=torch.Generator().manual_seed(3)).repeat(2, 1)
    for i in range(20):
        u = numbers([sample_key(5, i)] * 2)
        together, together_lp = draw(logits_NV.clone(), Settings.of(rows, 2000), u)
        alone, alone_lp = draw(logits_NV[:1].clone(), Settings.of(rows[:1], 2000), u[:1])
        assert alone.item() == together[0].item()
        assert alone_lp.item() == pytest.approx(together_lp[0].item(), abs=1e-5)


def test_min_p_sorts_everything_when_more_than_few_candidates_are_likely_enough():
    flat = torch.randn(400, 2000, generator=torch.Generator().manual_seed(1)) * 0.1
    u = numbers(sample_key(11, i) for i in range(400))
    for min_p in (0.5, 0.9):
        tokens, logprobs = draw(
            flat.clone(), Settings.of([DrawSettings(min_p=min_p)] * 400, 2000), u
        )
        likely = flat.log_softmax(1).exp()
        kept = likely >= min_p * likely.amax(1, keepdim=True)
        expected = (likely * kept / (likely * kept).sum(1, keepdim=True)).log()
        picked = expected.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, picked, rtol=0, atol=2e-5)
        assert kept.sum(1).max() > 512 or min_p == 0.9


def test_top_sampled_lists_the_distribution_and_leaves_filtered_cells_empty():
    setting = DrawSettings(temperature=0.7, top_k=3, top_p=1.0)
    settings = Settings.of([setting, DrawSettings(temperature=1.0, top_k=-1, top_p=1.0)], VOCAB)
    scaled = logits().repeat(2, 1)
    draw(scaled, settings, torch.full((2, 3), 0.1))
    ids, values = top_sampled(scaled, settings, 5)
    probs = expected(setting)
    assert values[0, 3:].tolist() == [-99999.0] * 2
    assert ids[0, 3:].tolist() == [0, 0]
    np.testing.assert_allclose(values[0, :3], np.log(np.sort(probs)[::-1][:3]), atol=1e-5)
    np.testing.assert_allclose(values[1], logits().log_softmax(0)[ids[1]], atol=1e-5)


def test_uniform_numbers_are_uniform_and_independent_of_order():
    keys = [sample_key(0, i) for i in range(200)]
    numbers = np.array([[uniform(key, t) for t in range(100)] for key in keys])
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.001
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03


def test_rounding_changes_hardly_any_token_of_a_large_flat_vocabulary():
    """Logits that differ in their last bits, as they do with the batch: 3 of 20,000 may flip.

    One number for all cells would flip ten times as many at least: the sum before a cell is off by
    more than the cell's own weight. That is counted too, or this would show nothing.
    """
    vocab, num = 49_152, 200
    generator = torch.Generator().manual_seed(1)
    plain = DrawSettings(temperature=1.0, top_k=-1, top_p=1.0)
    flips = flips_of_one = 0
    for start in range(100):
        row = torch.randn(vocab, generator=generator) * 2
        noisy = row + torch.randn(vocab, generator=generator) * 5e-6
        u = numbers(sample_key(start, i) for i in range(num))
        settings = Settings.of([plain] * num, vocab)
        one, other = (draw(x.expand(num, -1).clone(), settings, u)[0] for x in (row, noisy))
        flips += int((one != other).sum())
        first = u[:, 0].contiguous()
        ends = [x.double().softmax(0).cumsum(0) for x in (row, noisy)]
        one, other = (torch.searchsorted(end, first) for end in ends)
        flips_of_one += int((one != other).sum())
    assert flips <= 3
    assert flips_of_one >= 30


def test_the_numbers_of_one_draw_are_independent():
    sets = np.array([uniforms(sample_key(5, i), t) for i in range(200) for t in range(100)])
    assert (
        sets[:, 0] == [uniform(sample_key(5, i), t) for i in range(200) for t in range(100)]
    ).all()
    correlation = np.corrcoef(sets.T) - np.eye(sets.shape[1])
    assert np.abs(correlation).max() < 0.03
    for column in sets.T:
        assert stats.kstest(column, "uniform").pvalue > 0.001


def test_many_uniform_numbers_at_once_are_the_same_numbers():
    keys = [sample_key(seed, index) for seed in (0, 7, 2**63 - 1) for index in range(5)]
    positions = [0, 1, 2**31, 5, 9] * 3
    table = uniform_table(keys, positions)
    assert table.tolist() == [list(uniforms(k, p)) for k, p in zip(keys, positions, strict=True)]
