"""The pipeline that adds regularizers to a loss (R22)."""

from __future__ import annotations

import math
import pickle
import threading
import time

import pytest
import torch

from tinkex import events
from tinkex.errors import InvalidInputError, RegularizerError, RegularizerTimeoutError
from tinkex.regularizers import L1, L2, ElasticNet, Entropy, Pipeline, RegularizerSpec

X = [-0.5, -1.2, -0.8, -2.1, -0.3, -1.5, -0.9, -1.8, -0.6, -1.1]


def logprobs():
    return torch.tensor(X, dtype=torch.float64, requires_grad=True)


def base(data, x):
    x = x if isinstance(x, torch.Tensor) else torch.cat(list(x))
    return -x.mean(), {"seen": 1.0}


SPECS = [
    RegularizerSpec(L1(), 0.01, "sparsity"),
    RegularizerSpec(Entropy(), 0.5, "entropy"),
    RegularizerSpec(L2(center="mean"), 0.0, "spread"),
]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("timeout_s", [30.0, None])
def test_the_total_is_the_base_plus_the_weighted_terms_with_a_real_graph(parallel, timeout_s):
    """R22: loss_total = base + sum(weight_i x reg_i)."""
    x = logprobs()
    total, output = Pipeline(base, SPECS, parallel=parallel, timeout_s=timeout_s).compute([], x)
    direct = -x.mean() + 0.01 * x.abs().sum() + 0.5 * (x.exp() * x).sum()
    assert total.item() == output.loss_total == pytest.approx(direct.item(), abs=1e-12)
    assert output.regularizer_total == pytest.approx(0.01 * 10.8 - 0.5 * 3.197162, abs=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v in (total, direct)))
    assert output.base_loss.value == pytest.approx(1.08)
    assert output.base_loss.metrics == {"seen": 1.0}
    assert output.regularizers["spread"].contribution == 0.0


def test_gradient_norms_of_base_terms_and_total_are_measured():
    """R22: base, each term, weighted and total, all with respect to the logprobs."""
    x = logprobs()
    total, output = Pipeline(base, SPECS, track_grad_norms=True).compute([], x)
    assert output.base_loss.grad_norm == pytest.approx(1 / math.sqrt(10))
    sparsity = output.regularizers["sparsity"]
    assert sparsity.grad_norm == pytest.approx(3.1623, abs=5e-5)
    assert sparsity.grad_norm_weighted == pytest.approx(0.031623, abs=5e-7)
    assert output.regularizers["entropy"].grad_norm == pytest.approx(0.6867, abs=6e-5)
    assert output.regularizers["spread"].grad_norm == pytest.approx(3.4848, abs=5e-5)
    (gradient,) = torch.autograd.grad(total, x)  # The graph is still there to train with.
    assert output.total_grad_norm == pytest.approx(gradient.norm().item())


def test_norms_span_all_datums_and_ignore_those_a_term_does_not_touch():
    a, b = logprobs(), logprobs()
    first_only = RegularizerSpec(lambda data, xs: (xs[0].sum(), {}), 1.0, "first")
    _, output = Pipeline(base, [first_only], track_grad_norms=True).compute([], [a, b])
    assert output.regularizers["first"].grad_norm == pytest.approx(math.sqrt(10))


def test_the_pipeline_is_a_custom_loss_with_flat_metrics():
    total, metrics = Pipeline(base, SPECS, track_grad_norms=True)([], [logprobs()])
    assert total.requires_grad
    assert metrics["base_loss:sum"] == pytest.approx(1.08)
    assert metrics["regularizer/sparsity:sum"] == pytest.approx(10.8)
    assert metrics["contribution/sparsity:sum"] == pytest.approx(0.108)
    assert metrics["grad_norm/base:mean"] == pytest.approx(1 / math.sqrt(10))
    assert metrics["base/seen"] == 1.0


def test_parallel_terms_run_at_the_same_time():
    together = threading.Barrier(3)

    def meets(data, x):
        together.wait(timeout=60)
        return x.sum(), {}

    specs = [RegularizerSpec(meets, 1.0, f"r{i}") for i in range(3)]
    total, _ = Pipeline(base, specs, parallel=True).compute([], logprobs())
    assert total.item() == pytest.approx(1.08 - 3 * 10.8)


def test_sequential_terms_run_one_after_another():
    order = []

    def note(name):
        return RegularizerSpec(lambda data, x: (order.append(name) or x.sum(), {}), 1.0, name)

    Pipeline(base, [note("a"), note("b"), note("c")], parallel=False).compute([], logprobs())
    assert order == ["a", "b", "c"]


@pytest.mark.parametrize("parallel", [True, False])
def test_an_overdue_term_fails_by_name_and_in_time(parallel):
    release = threading.Event()

    def slow(data, x):
        release.wait(200)
        return x.sum(), {}

    specs = [RegularizerSpec(L1(), 1.0, "quick"), RegularizerSpec(slow, 1.0, "slow")]
    begin = time.monotonic()
    with pytest.raises(
        RegularizerTimeoutError, match="regularizer 'slow': not done after 2 s"
    ) as e:
        Pipeline(base, specs, parallel=parallel, timeout_s=2.0).compute([], logprobs())
    release.set()
    assert time.monotonic() - begin < 100
    assert isinstance(e.value, TimeoutError)


def test_a_failing_term_fails_by_name_with_its_cause():
    def broken(data, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(RegularizerError, match="'broken': the regularizer failed: mine") as caught:
        Pipeline(base, [RegularizerSpec(broken, 1.0)]).compute([], logprobs())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.name == "broken"
    assert pickle.loads(pickle.dumps(caught.value)).name == "broken"


def test_a_failing_base_is_told_from_a_regularizer():
    with pytest.raises(RegularizerError, match="base loss failed: no base"):
        Pipeline(lambda d, x: (_ for _ in ()).throw(ValueError("no base")), SPECS).compute(
            [], logprobs()
        )


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda d, x: x.sum(), "must return (loss, metrics), got Tensor"),
        (lambda d, x: (x.sum(), {}, 1), "got tuple of length 3"),
        (lambda d, x: (x, {}), "must be a scalar, got shape (10,)"),
        (lambda d, x: (x.sum().detach(), {}), "is detached"),
        (lambda d, x: (x.sum() * float("nan"), {}), "is nan"),
        (lambda d, x: (3.0, {}), "must be a torch tensor, got float"),
        (lambda d, x: (x.sum(), 3), "must be a dict"),
    ],
)
def test_each_answer_that_cannot_be_trained_on_has_its_own_error(fn, word):
    with pytest.raises(RegularizerError, match="regularizer 'mine'") as caught:
        Pipeline(base, [RegularizerSpec(fn, 1.0, "mine")]).compute([], logprobs())
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: RegularizerSpec(L1(), -0.1, "l1"), "0 or more, got -0.1"),
        (lambda: RegularizerSpec(L1(), float("nan"), "l1"), "got nan"),
        (lambda: RegularizerSpec(L1(), float("inf"), "l1"), "got inf"),
        (lambda: RegularizerSpec(L1(), "1", "l1"), "got '1'"),
        (lambda: RegularizerSpec(3, 1.0, "x"), "expected a function, got 3"),
        (lambda: RegularizerSpec(L1(), 1.0, 7), "expected a string, got 7"),
        (lambda: Pipeline(base, [RegularizerSpec(L1()), RegularizerSpec(L1())]), "'l1' is used 2"),
        (lambda: Pipeline(3, []), "expected a function, got 3"),
        (lambda: Pipeline(base, [], timeout_s=0), "must be above 0"),
    ],
)  # fmt: skip
def test_a_bad_pipeline_is_refused_when_it_is_made(make, word):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert word in str(caught.value)


def test_a_spec_is_named_after_its_function():
    def my_penalty(data, x):
        return x.sum(), {}

    assert RegularizerSpec(my_penalty).name == "my_penalty"
    assert RegularizerSpec(ElasticNet()).name == "elastic_net"


def test_every_term_tells_the_event_bus():
    """R19: events per regularizer, with value and contribution."""
    seen = []
    end = events.subscribe(seen.append)
    Pipeline(base, [RegularizerSpec(L1(), 0.5, "l1")]).compute([], logprobs())
    end()
    stops = {
        e.fields["regularizer"]: e.fields for e in seen if e.name == "regularizer.compute.stop"
    }
    assert stops["l1"]["value"] == pytest.approx(10.8)
    assert stops["l1"]["contribution"] == pytest.approx(5.4)
    assert stops["l1"]["duration_s"] >= 0
    assert "base" in stops


def test_no_specs_is_the_base_alone():
    total, output = Pipeline(base).compute([], logprobs())
    assert total.item() == pytest.approx(1.08)
    assert output.regularizers == {}


@pytest.mark.timeout(1200)
def test_terms_side_by_side_never_stop_each_other():
    """Two threads on one leaf tensor deadlock inside torch 2.13 within some thousand rounds."""

    def base(data, logprobs):
        return -sum((x * torch.ones_like(x)).sum() for x in logprobs), {}

    def last(data, logprobs):
        return -sum(x[-1] for x in logprobs), {}

    specs = [RegularizerSpec(last, 0.1, name=name) for name in ("a", "b")]
    for _ in range(3000):
        leaves = [torch.randn(5, requires_grad=True) for _ in range(4)]
        total, _ = Pipeline(base, specs).compute([None] * 4, leaves)
        expected = -sum(x.sum() + 0.2 * x[-1] for x in leaves)
        torch.testing.assert_close(total, expected)
