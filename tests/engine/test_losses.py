"""Every loss has its written formula and its true gradient, and refuses what it would ignore."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tinkex.contract.losses import LOSSES, WEIGHTS, find_loss, read_settings
from tinkex.engine.jobs import CsrArray, TrainDatum
from tinkex.engine.train.data import Limits
from tinkex.engine.train.losses import gap_metrics, loss_values, prepare
from tinkex.errors import InvalidInputError, NotSupportedError

N = 12
LIMITS = {"path": "data[0]", "limits": Limits(vocab_size=50, max_length=64)}


def tensors(rng) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs whose ratios lie on both sides of every clip border, in float64."""
    logp = torch.tensor(-rng.uniform(0.2, 3, N))
    inputs = {
        "weights": torch.tensor(rng.normal(size=N)),
        "logprobs": logp - torch.tensor(rng.uniform(-1.8, 1.8, N)),
        "advantages": torch.tensor(rng.normal(size=N)),
    }
    return logp, inputs


def run(name, logp, inputs, **settings):
    loss = find_loss(name)
    names = {each.name for each in loss.inputs} - ({WEIGHTS.name} - {n.name for n in loss.needs})
    kept = {k: v for k, v in inputs.items() if k in names}
    return loss_values(loss, logp, kept, read_settings(loss, settings))


def formulas(logp, q, a, w):
    r = np.exp(logp - q)
    s = np.exp(np.mean(logp - q))
    far = np.abs(np.exp(logp) - np.exp(q)) > 0.2
    outward = np.where(a > 0, r > 1, r < 1)
    return {
        "cross_entropy": -w * logp,
        "importance_sampling": -r * a,
        "ppo": -np.minimum(r * a, np.clip(r, 0.8, 1.2) * a),
        "cispo": -np.clip(r, 0, 4) * a * logp,
        "dro": -(logp * a - 0.05 / 2 * (logp - q) ** 2),
        "gspo": -np.minimum(s * a, np.clip(s, 0.8, 1.2) * a),
        "dppo": -r * a * ~(far & outward),
        "sapo": -np.where(a > 0, 4.0, 4 / 1.05)
        / (1 + np.exp(np.where(a > 0, 1, 1.05) * (1 - r)))
        * a,
        "kl_divergence": np.exp(q - logp) - (q - logp) - 1,
        "reverse_kl": (logp - q) ** 2 / 2,
    }


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_values_are_those_of_the_formula(name, rng):
    logp, x = tensors(rng)
    expected = formulas(*(t.numpy() for t in (logp, x["logprobs"], x["advantages"], x["weights"])))
    np.testing.assert_allclose(run(name, logp, x).numpy(), expected[name], rtol=1e-12)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cispo"}))
def test_gradients_agree_with_finite_differences(name, rng):
    logp, x = tensors(rng)
    assert torch.autograd.gradcheck(
        lambda p: run(name, p, x).sum(), logp.requires_grad_(), eps=1e-7, atol=1e-5
    )


def test_cispo_keeps_the_ratio_out_of_its_gradient(rng):
    logp, x = tensors(rng)
    (slope,) = torch.autograd.grad(run("cispo", logp.requires_grad_(), x).sum(), logp)
    ratio = (logp - x["logprobs"]).exp().clamp(0, 4)
    torch.testing.assert_close(slope, (-ratio * x["advantages"]).detach())


def test_cispo_agrees_with_finite_differences_while_its_ratio_is_held(rng):
    """The ratio takes no gradient, so the difference is taken of the formula with it fixed."""
    logp, x = tensors(rng)
    (slope,) = torch.autograd.grad(run("cispo", logp.requires_grad_(), x).sum(), logp)
    logp = logp.detach().numpy()
    held = np.clip(np.exp(logp - x["logprobs"].numpy()), 0, 4) * x["advantages"].numpy()
    step = 1e-6 * np.eye(N)
    above, below = (-(held * (logp + sign * step)).sum(axis=1) for sign in (1, -1))
    np.testing.assert_allclose(slope.numpy(), (above - below) / 2e-6, rtol=0, atol=1e-5)


def test_sapo_is_a_policy_gradient_near_the_sampler_and_fades_far_from_it():
    """At r = 1 the gate's slope is 1; at r = 6 nearly nothing is left, and less for bad tokens."""
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    x = {
        "logprobs": logp.detach() - torch.tensor([0.0, 0.0, math.log(6), math.log(6)]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
    }
    (slope,) = torch.autograd.grad(run("sapo", logp, x).sum(), logp)
    assert slope[:2].tolist() == pytest.approx([-1.0, 1.0])
    assert -0.2 < float(slope[2]) < -float(slope[3]) < 0


def test_soft_targets_of_kl_divergence_agree_with_finite_differences(rng):
    q = torch.log_softmax(torch.tensor(rng.normal(size=(4, 3))), dim=-1)
    logp = torch.log_softmax(torch.tensor(rng.normal(size=(4, 3))), dim=-1)
    values = run("kl_divergence", logp, {"logprobs": q})
    torch.testing.assert_close(
        values.sum(), torch.nn.functional.kl_div(logp, q, reduction="sum", log_target=True)
    )
    assert torch.autograd.gradcheck(
        lambda p: run("kl_divergence", p, {"logprobs": q}).sum(), logp.requires_grad_()
    )


def test_per_token_clip_limits_override_the_settings(rng):
    logp, x = tensors(rng)
    limits = {
        "clip_low_threshold": torch.full_like(logp, 0.5),
        "clip_high_threshold": torch.full_like(logp, 1.5),
    }
    per_token = run("ppo", logp, x | limits)
    by_setting = run("ppo", logp, x, clip_low_threshold=0.5, clip_high_threshold=1.5)
    torch.testing.assert_close(per_token, by_setting)
    assert not torch.equal(per_token, run("ppo", logp, x))


def test_gspo_leaves_prompt_tokens_out_of_its_ratio():
    """Clients fill prompts with logprob 0 and advantage 0."""
    logp = torch.tensor([-9.0, -1.0, -2.0])
    x = {"logprobs": torch.tensor([0.0, -1.1, -1.9]), "advantages": torch.tensor([0.0, 1.0, 1.0])}
    values = run("gspo", logp, x)
    assert values[0] == 0
    assert float(values[1]) == pytest.approx(-math.exp(0.0), rel=1e-6)


def test_the_gap_counts_sampled_tokens_only():
    x = {"logprobs": torch.tensor([0.0, -1.0, -2.0])}
    gap = gap_metrics(torch.tensor([-5.0, -1.5, -2.0]), x)
    assert gap is not None
    assert gap.num_tokens == 2
    assert gap.max_abs == pytest.approx(0.5)
    assert gap.sum_k3 == pytest.approx(math.exp(-0.5) + 0.5 - 1)


# ---------------------------------------------------------------------------------------- checks


def datum(**inputs) -> TrainDatum:
    given = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)} | inputs
    kept = {key: value for key, value in given.items() if value is not None}
    return TrainDatum(tokens=np.array([1, 2, 3]), inputs=kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": None}, "loss 'cross_entropy' needs weights; given: target_tokens"),
        ({"advantages": np.ones(3, np.float32)}, "no use for advantages"),
        ({"weights": np.ones(4, np.float32)}, r"shape \[4\], target_tokens has \[3\]"),
        ({"weights": np.array([1, np.nan, 1])}, "nan at position 1 is not finite"),
        ({"target_tokens": np.array([2, 3, 50])}, "token 50 is outside the vocabulary 0..49"),
        ({"target_tokens": np.array([2, 3, -1])}, "token -1 is outside"),
        ({"target_tokens": np.array([2.0, 3, 4])}, "must be int64"),
        ({"target_tokens": np.array([2, 3]), "weights": np.ones(2)}, "2 rows for 3 model input"),
        ({"target_tokens": np.ones((3, 1, 1), int), "weights": np.ones((3, 1, 1))}, "1-D or 2-D"),
    ],
)
def test_wrong_inputs_name_the_field_and_the_value(changes, message):
    with pytest.raises(InvalidInputError, match=message) as caught:
        prepare(datum(**changes), find_loss("cross_entropy"), **LIMITS)
    assert caught.value.path.startswith("data[0]")


def test_context_overflow_and_empty_inputs_are_refused():
    long = TrainDatum(
        tokens=np.zeros(65, int),
        inputs={"target_tokens": np.zeros(65, int), "weights": np.zeros(65)},
    )
    with pytest.raises(InvalidInputError, match="65 tokens; the model takes 1 to 64"):
        prepare(long, find_loss("cross_entropy"), **LIMITS)
    empty = TrainDatum(
        tokens=np.zeros(0, int), inputs={"target_tokens": np.zeros(0, int), "weights": np.zeros(0)}
    )
    with pytest.raises(InvalidInputError, match="0 tokens"):
        prepare(empty, find_loss("cross_entropy"), **LIMITS)


def test_rl_losses_refuse_soft_targets():
    two = np.ones((3, 2))
    wrong = datum(target_tokens=np.ones((3, 2), int), weights=None, logprobs=two, advantages=two)
    with pytest.raises(InvalidInputError, match="must be 1-D, got shape"):
        prepare(wrong, find_loss("ppo"), **LIMITS)


def test_unknown_losses_and_settings_are_refused_by_name():
    with pytest.raises(NotSupportedError, match="stable_reinforce has no public definition.*ppo"):
        find_loss("stable_reinforce")
    ppo = find_loss("ppo")
    for settings, message in [
        ({"clip_hi": 1.0}, "no such setting"),
        ({"clip_high_threshold": "1.2"}, "finite number"),
        ({"clip_high_threshold": math.nan}, "finite number"),
        (
            {"clip_low_threshold": 2.0},
            "clip_high_threshold 1.2 must be at least clip_low_threshold",
        ),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            read_settings(ppo, settings)


def test_sparse_targets_mean_what_their_dense_form_means():
    targets = np.array([[5, 0], [6, 7], [0, 0]])
    weights = np.array([[0.5, 0.0], [0.25, 0.75], [0.0, 0.0]], np.float32)

    def csr(dense):
        counts = (dense != 0).sum(axis=1)
        return CsrArray(
            values=dense[dense != 0],
            crow_indices=np.concatenate([[0], np.cumsum(counts)]),
            col_indices=np.nonzero(dense)[1],
            shape=dense.shape,
        )

    loss = find_loss("cross_entropy")
    sparse = prepare(datum(target_tokens=csr(targets), weights=csr(weights)), loss, **LIMITS)
    dense = prepare(datum(target_tokens=targets, weights=weights), loss, **LIMITS)
    assert torch.equal(sparse.targets, dense.targets)
    assert torch.equal(sparse.inputs["weights"], dense.inputs["weights"])
    assert dense.active_T.tolist() == [True, True, False]


def test_inconsistent_sparse_indices_are_refused():
    broken = CsrArray(
        values=np.array([5]),
        crow_indices=np.array([0, 1, 1]),
        col_indices=np.array([0]),
        shape=(3, 2),
    )
    with pytest.raises(InvalidInputError, match="sparse indices"):
        prepare(
            datum(target_tokens=broken, weights=np.ones((3, 2))),
            find_loss("cross_entropy"),
            **LIMITS,
        )
