"""Packed copies change the speed of a product, not its value, and never reach training."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.model import packed_weights


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    assert packed_weights.pack([weight])
    return weight


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 32, 200])
@pytest.mark.parametrize("extras", ["", "bias"])
def test_a_packed_product_equals_the_plain_one(weight, num_rows, extras):
    x = torch.randn(num_rows, 64)
    bias = torch.randn(96) if "bias" in extras else None
    with torch.inference_mode():
        got = packed_weights.product(x, weight, bias)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-4)


def test_outside_inference_mode_nothing_is_packed(weight):
    with torch.no_grad():
        assert packed_weights.product(torch.randn(2, 64), weight, None) is None


def test_a_weight_without_a_copy_takes_the_plain_way():
    with torch.inference_mode():
        assert packed_weights.product(torch.randn(2, 8), torch.randn(8, 8), None) is None


def test_too_little_memory_means_no_copies(monkeypatch, caplog):
    weight = torch.randn(8, 8)
    monkeypatch.setattr(packed_weights, "free_bytes", lambda: 100)
    assert not packed_weights.pack([weight])
    assert "plain weights" in caplog.text
    assert not hasattr(weight, packed_weights._ATTRIBUTE)
