"""Every penalty against the documents' numbers and an independent numpy implementation (R22).

The numpy functions below are the oracle: written from the formulas alone, they share no code with
the penalties. Gradients are checked by central differences of the oracle itself.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tinkex.errors import InvalidInputError
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
)
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput

X = np.array([-0.5, -1.2, -0.8, -2.1, -0.3, -1.5, -0.9, -1.8, -0.6, -1.1])
Q = np.log(np.array([0.22, 0.18, 0.12, 0.1, 0.08, 0.07, 0.06, 0.06, 0.06, 0.05]))
M = np.log(np.random.default_rng(0).dirichlet(np.ones(4), size=3))
N = np.log(np.random.default_rng(1).dirichlet(np.ones(4), size=3))


def run(penalty, *arrays, data=()):
    """Value and gradient, in double precision."""
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    value, metrics = penalty(data, tensors[0] if len(tensors) == 1 else tensors)
    assert value.dim() == 0
    assert all(isinstance(v, float) for v in metrics.values())
    gradients = torch.autograd.grad(value, tensors)
    return value.item(), [g.numpy() for g in gradients]


def differences(oracle, *arrays, h=1e-6):
    """Central differences of a numpy function of several arrays."""
    gradients = []
    for which, array in enumerate(arrays):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[which][index] += sign * h
                ends.append(oracle(*moved))
            gradient[index] = (ends[0] - ends[1]) / (2 * h)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize(
    ("penalty", "value", "norm"),
    [
        (L1(reduction="sum"), 10.8, 3.1623),
        (Entropy(mode="maximize", temperature=1.0), -3.1972, 0.6867),
        (Entropy(mode="maximize", temperature=0.5), -1.9354, 0.4833),
        (L2(center="mean"), 3.036, 3.4848),
        (ElasticNet(l1_ratio=0.6), 12.36, 4.8349),
        (KLDivergence(direction="forward", reference=torch.tensor(Q)), 6.087, 3.7822),
        (KLDivergence(direction="reverse", reference=torch.tensor(Q)), -1.1569, 0.3603),
        (KLDivergence(direction="symmetric", reference=torch.tensor(Q)), 2.465, 1.7687),
    ],
)
def test_the_values_and_gradient_norms_that_were_promised(penalty, value, norm):
    """R22."""
    ours, (gradient,) = run(penalty, X)
    assert ours == pytest.approx(value, abs=5e-5)
    assert np.linalg.norm(gradient) == pytest.approx(norm, abs=6e-5)


# ---------------------------------------------------------------------------------- the oracles


def total(values, reduction):
    values = np.concatenate([np.ravel(v) for v in values])
    return values.sum() if reduction == "sum" else values.mean()


def np_l2(*arrays, reduction, clip, center):
    x = np.concatenate([np.ravel(a) for a in arrays])
    c = x.mean() if center == "mean" else (center or 0.0)
    y = x - c if clip is None else np.clip(x - c, -clip, clip)
    return total([y * y], reduction)


def np_elastic(*arrays, l1_ratio, reduction):
    first = total([np.abs(a) for a in arrays], reduction)
    second = total([a * a for a in arrays], reduction)
    return l1_ratio * first + (1 - l1_ratio) * second


def np_rows(array, form):
    if form == "per_token":
        return np.stack([np.ravel(array), np.log1p(-np.exp(np.ravel(array)))], axis=1)
    return np.atleast_2d(array)


def np_entropy(*arrays, mode, temperature, normalize, reduction, form):
    values = []
    for row in itertools.chain(*(np_rows(a, form) for a in arrays)):
        z = row
        if temperature != 1.0:
            z = row / temperature
            z = z - np.log(np.exp(z).sum())
        h = -np.sum(np.exp(z) * z)
        values.append(h / math.log(len(row)) if normalize else h)
    return total([values], reduction) * (1 if mode == "minimize" else -1)


def np_kl(*arrays, reference, direction, reduction, form):
    forward, reverse = [], []
    for x, y in zip(arrays, reference, strict=True):
        if form == "per_token":
            forward.append(np.exp(y) / np.exp(x) - 1 - (y - x))
            reverse.append(np.exp(x) / np.exp(y) - 1 - (x - y))
        else:
            x, y = np.atleast_2d(x), np.atleast_2d(y)
            forward.append((np.exp(x) * (x - y)).sum(1))
            reverse.append((np.exp(y) * (y - x)).sum(1))
    f, r = total(forward, reduction), total(reverse, reduction)
    return {"forward": f, "reverse": r, "symmetric": 0.5 * (f + r)}[direction]


def np_consistency(*arrays, paired, metric, reduction):
    values = []
    for x, y in zip(arrays, paired, strict=True):
        if metric == "cosine":
            for a, b in zip(np.atleast_2d(x), np.atleast_2d(y), strict=True):
                values.append([1 - a @ b / math.sqrt(a @ a) / math.sqrt(b @ b)])
        elif metric == "kl":
            values.append(np.cosh(x - y) - 1)
        else:
            values.append((x - y) ** 2 if metric == "mse" else np.abs(x - y))
    return total(values, reduction)


def np_orthogonality(matrix, *, mode, axis):
    vectors = matrix if axis == "rows" else matrix.T
    gram = np.array([[u @ v for v in vectors] for u in vectors])
    if mode == "soft":
        return sum(gram[i, j] ** 2 for i in range(len(gram)) for j in range(len(gram)) if i != j)
    rest = gram - np.eye(len(gram))
    return (rest**2).sum() if mode == "hard" else np.linalg.svd(rest)[1].max()


def np_gradient_penalty(*arrays, target_norm, reduction, alpha=1.0, reference=None):
    """f(z) = sum exp(z) has the gradient exp(z)."""
    values = []
    for i, x in enumerate(arrays):
        z = x if reference is None else alpha * x + (1 - alpha) * reference[i]
        values.append([(np.linalg.norm(np.exp(z)) - target_norm) ** 2])
    return total(values, reduction)


def agree(penalty, oracle, *arrays):
    value, gradients = run(penalty, *arrays)
    assert value == pytest.approx(oracle(*arrays), rel=1e-9, abs=1e-12)
    for ours, theirs in zip(gradients, differences(oracle, *arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


INPUTS = {"vector": (X,), "several": (X, X[:4] * 0.7), "matrix": (M,), "matrices": (M, N)}
REDUCTIONS = ("sum", "mean")


def variants(**options):
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_l1_is_its_formula(inputs, reduction):
    agree(
        L1(reduction=reduction),
        lambda *a: total([np.abs(x) for x in a], reduction),
        *INPUTS[inputs],
    )


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options", variants(reduction=REDUCTIONS, clip=(None, 0.36, 1.01), center=(None, "mean", -0.95))
)
def test_l2_is_its_formula(inputs, options):
    agree(L2(**options), lambda *a: np_l2(*a, **options), *INPUTS[inputs])


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("options", variants(reduction=REDUCTIONS, l1_ratio=(0.0, 0.3, 1.0)))
def test_elastic_net_is_its_formula(inputs, options):
    agree(ElasticNet(**options), lambda *a: np_elastic(*a, **options), *INPUTS[inputs])


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options",
    variants(
        mode=("minimize", "maximize"),
        temperature=(1.0, 0.5, 3.0),
        normalize=(False, True),
        reduction=REDUCTIONS,
        form=("raw", "per_token"),
    ),
)
def test_entropy_is_its_formula(inputs, options):
    agree(Entropy(**options), lambda *a: np_entropy(*a, **options), *INPUTS[inputs])


REFERENCES = {
    "vector": (Q,),
    "several": (Q, Q[:4]),
    "matrix": (N,),
    "matrices": (N, M),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options",
    variants(
        direction=("forward", "reverse", "symmetric"),
        reduction=REDUCTIONS,
        form=("raw", "per_token"),
    ),
)
def test_kl_is_its_formula(inputs, options):
    reference = [torch.tensor(q) for q in REFERENCES[inputs]]
    agree(
        KLDivergence(reference=reference, **options),
        lambda *a: np_kl(*a, reference=REFERENCES[inputs], **options),
        *INPUTS[inputs],
    )


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "options", variants(metric=("mse", "l1", "cosine", "kl"), reduction=REDUCTIONS)
)
def test_consistency_is_its_formula(inputs, options):
    paired = [torch.tensor(q) for q in REFERENCES[inputs]]
    agree(
        Consistency(paired=paired, **options),
        lambda *a: np_consistency(*a, paired=REFERENCES[inputs], **options),
        *INPUTS[inputs],
    )


@pytest.mark.parametrize(
    "options", variants(mode=("soft", "hard", "spectral"), axis=("rows", "columns"))
)
def test_orthogonality_is_its_formula(options):
    agree(Orthogonality(**options), lambda m: np_orthogonality(m, **options), M)
    agree(
        Orthogonality(**options),
        lambda a, b: np_orthogonality(np.stack([a, b]), **options),
        X[:4],
        X[4:8],
    )


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("options", variants(target_norm=(0.0, 1.0), reduction=REDUCTIONS))
def test_gradient_penalty_is_its_formula_through_the_second_derivative(inputs, options):
    agree(
        GradientPenalty(**options), lambda *a: np_gradient_penalty(*a, **options), *INPUTS[inputs]
    )
    reference = [torch.tensor(q) for q in REFERENCES[inputs]]
    agree(
        GradientPenalty(interpolated=True, alpha=0.3, reference=reference, **options),
        lambda *a: np_gradient_penalty(*a, alpha=0.3, reference=REFERENCES[inputs], **options),
        *INPUTS[inputs],
    )


# ------------------------------------------------------------------- what the numbers are about


def test_entropy_of_a_distribution_is_its_entropy_and_the_mass_says_so():
    value, metrics = Entropy(mode="minimize")((), torch.log(torch.full((1, 8), 0.125)))
    assert value.item() == pytest.approx(math.log(8), abs=1e-6)
    assert metrics["mass"] == pytest.approx(1.0)


def test_a_vector_over_positions_is_called_what_it_is(caplog, monkeypatch):
    """R22: it says that the raw form is no entropy, once, and what to use instead."""
    monkeypatch.setattr("tinkex.regularizers.distributions._told", set())
    for _ in range(2):
        _, metrics = Entropy()((), torch.tensor(X))
    assert metrics["mass"] == pytest.approx(np.exp(X).sum())
    assert caplog.text.count("form='per_token'") == 1


def test_per_token_kl_is_never_negative_and_zero_only_in_agreement():
    kl = KLDivergence(reference=torch.tensor(Q), form="per_token", direction="symmetric")
    assert kl((), torch.tensor(X))[0] > 0
    assert kl((), torch.tensor(Q))[0] == pytest.approx(0.0)


def test_a_reference_comes_from_a_field_a_function_or_a_list():
    datum = Datum(ModelInput.from_ints([1]), {"reference_logprobs": Q})
    by_tensor = run(KLDivergence(reference=torch.tensor(Q)), X)[0]
    by_field = run(KLDivergence(reference="reference_logprobs"), X, data=[datum])[0]
    by_function = run(KLDivergence(reference=lambda data, logprobs: [torch.tensor(Q)]), X)[0]
    by_list = run(KLDivergence(reference=Q.tolist()), X)[0]
    assert [by_field, by_function, by_list] == pytest.approx([by_tensor] * 3, rel=1e-6)


def test_a_reference_takes_no_gradient():
    reference = torch.tensor(Q, requires_grad=True)
    value, _ = KLDivergence(reference=reference)((), torch.tensor(X, requires_grad=True))
    value.backward()
    assert reference.grad is None


def test_penalties_are_named_after_their_class():
    names = [p.name for p in (L1(), ElasticNet(), KLDivergence(), GradientPenalty())]
    assert names == ["l1", "elastic_net", "kl_divergence", "gradient_penalty"]


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: L1(reduction="max"), "reduction: expected one of sum, mean, got 'max'"),
        (lambda: L2(clip=-1.0), "clip"),
        (lambda: L2(center="median"), "center"),
        (lambda: ElasticNet(l1_ratio=1.5), "l1_ratio: expected a number in [0.0, 1.0], got 1.5"),
        (lambda: ElasticNet(l1_ratio=float("nan")), "l1_ratio"),
        (lambda: Entropy(mode="up"), "mode"),
        (lambda: Entropy(temperature=0.0), "temperature: must be above 0"),
        (lambda: KLDivergence(direction="sideways"), "direction"),
        (lambda: KLDivergence(form="cooked"), "form"),
        (lambda: Consistency(metric="l3"), "metric"),
        (lambda: Orthogonality(axis="diagonal"), "axis"),
        (lambda: GradientPenalty(target_norm=-1.0), "target_norm"),
        (lambda: GradientPenalty(interpolated=True), "reference"),
        (lambda: GradientPenalty(fn=3), "fn"),
        (lambda: KLDivergence()((), torch.tensor(X)), "reference: is missing"),
        (lambda: KLDivergence(reference=torch.zeros(3))((), torch.tensor(X)), "shape (3,)"),
        (lambda: KLDivergence(reference="ref")([{"a": 1}], torch.tensor(X)), "data[0]"),
        (lambda: KLDivergence(reference=[Q.tolist()] * 2)((), torch.tensor(X)), "2 tensors for 1"),
        (lambda: Orthogonality()((), torch.tensor(X)), "two or more 1-D tensors"),
        (lambda: Orthogonality()((), [torch.tensor(X), torch.tensor(X[:3])]), "one length"),
        (lambda: GradientPenalty(fn=torch.sum)((), torch.tensor(X, requires_grad=True)), "linear"),
        (lambda: GradientPenalty(fn=torch.exp)((), torch.tensor(X, requires_grad=True)), "scalar"),
        (lambda: L1()((), []), "got no tensors"),
        (lambda: L1()((), torch.zeros(0)), "non-empty"),
        (lambda: L1()((), torch.zeros(2, 2, 2)), "1-D or 2-D"),
        (lambda: L1()((), torch.zeros(2, dtype=torch.int64)), "floating point"),
        (lambda: L1()((), [torch.zeros(2), torch.tensor([0.0, math.inf])]), "logprobs[1]: 1 of 2"),
    ],
)  # fmt: skip
def test_a_bad_option_or_input_says_what_it_is(make, word):
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert word in str(caught.value)


def test_importing_the_regularizers_loads_no_torch():
    code = "import sys, tinkex.regularizers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
