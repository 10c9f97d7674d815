"""Training equals peft + transformers + torch.optim, alone or in company, and never leaks.

The truth is the peft model in float64; our float32 tensors must lie within 1e-5 of it, relative to
their length as vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine.jobs import (
    AdamParams,
    CreateAdapterJob,
    CustomLoss,
    LoraSpec,
    MuonParams,
    OptimJob,
    SaveAdapterJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.engine.losses import check_settings, find_loss, loss_values
from tinkex.errors import (
    EngineError,
    InvalidInputError,
    ModelNotFoundError,
    NotSupportedError,
    TinkerError,
)

FAMILIES = [
    "llama-tied-llama3-rope",
    "llama-biased-linear-rope",
    "mistral-window",
    "qwen2-window",
    "qwen3",
]
LENGTHS = [7, 12, 12, 1, 30]
RL = ["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"]


def make(trainer, adapter_id: str = "a", *, noise: float = 0.1, **lora: Any):
    """An adapter that already changes the model: B is random, not zero."""
    spec = LoraSpec(**({"rank": 4, "seed": 1, "alpha": 8.0} | lora))
    trainer.create(CreateAdapterJob(job_id="", adapter_id=adapter_id, base_model="tiny", lora=spec))
    resident = trainer.adapters[adapter_id]
    generator = torch.Generator().manual_seed(spec.rank)
    with torch.no_grad():
        for _, _, b_Or in resident.adapter.modules():
            b_Or.copy_(torch.randn(b_Or.shape, generator=generator) * noise)
    return resident


def make_data(rng, loss_fn: str = "cross_entropy", lengths=LENGTHS) -> tuple[TrainDatum, ...]:
    data = []
    for length in lengths:
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 97, length)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
            inputs["weights"][: length // 3] = 0
        else:
            inputs["logprobs"] = -rng.uniform(3, 6, length).astype(np.float32)
            if loss_fn != "kl_divergence":
                inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(TrainDatum(tokens=rng.integers(0, 97, length), inputs=inputs))
    return tuple(data)


def job(data, loss_fn="cross_entropy", adapter_id="a", **options) -> TrainJob:
    return TrainJob(job_id="", adapter_id=adapter_id, data=data, loss_fn=loss_fn, **options)


def train(trainer, *jobs: TrainJob) -> list[TrainResult]:
    results = trainer.train(list(jobs))
    for result in results:
        if isinstance(result, TinkerError):
            raise result
    return results


def named_grads(trainer, adapter_id: str = "a") -> dict[str, torch.Tensor]:
    """Gathered gradients by peft's names."""
    resident = trainer.adapters[adapter_id]
    views, at, named = resident.adapter.views(resident.grad), 0, {}
    for group in resident.adapter.groups.values():
        for index, part in enumerate(group.parts):
            named[f"{part.target.module}.lora_A"] = views[at][part.row : part.row + part.rank]
            named[f"{part.target.module}.lora_B"] = views[at + 1 + index]
        at += 1 + len(group.parts)
    return named


def peft_model(base, trainer, folder, adapter_id: str = "a"):
    """The same adapter, loaded by peft from the folder we wrote, in float64."""
    import copy

    from peft import PeftModel

    trainer.save(SaveAdapterJob(job_id="", adapter_id=adapter_id, folder=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        import warnings

        patch.setattr(warnings, "warn", lambda *a, **k: None)  # peft: tied head carries an adapter
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder, is_trainable=True)
    return model.double()


def truth(model, data, loss_fn: str, **settings):
    """Logprobs per datum, the loss and its gradients, by autograd through the peft model."""
    loss = find_loss(loss_fn)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        logits_TV = model(torch.as_tensor(datum.tokens)[None]).logits[0]
        columns = targets if targets.ndim == 2 else targets[:, None]
        logp = logits_TV.log_softmax(-1).gather(1, columns)
        logp = logp if targets.ndim == 2 else logp[:, 0]
        inputs = {
            k: torch.as_tensor(v).double() for k, v in datum.inputs.items() if k != "target_tokens"
        }
        values = loss_values(loss, logp, inputs, check_settings(loss_fn, loss, settings))
        total = total + values.sum()
        logprobs.append(logp.detach())
    total.backward()
    grads = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for name, p in model.named_parameters()
        if "lora_" in name
    }
    return logprobs, float(total.detach()), grads


def distance(ours, theirs) -> float:
    """The length of the difference, relative to the length of the truth."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    return float((ours - theirs).norm()) / max(float(theirs.norm()), 1e-12)


def assert_close(ours, theirs, what: str, tolerance: float = 1e-5) -> None:
    assert (error := distance(ours, theirs)) < tolerance, f"{what}: off by {error:.2e}"


def check_against_truth(trainer, model, data, loss_fn: str) -> None:
    logprobs, loss, grads = truth(model, data, loss_fn)
    (result,) = train(trainer, job(data, loss_fn))
    for ours, theirs in zip(result.outputs, logprobs, strict=True):
        assert ours["logprobs"].shape == tuple(theirs.shape)
        assert_close(ours["logprobs"], theirs, "logprobs")
    # The terms of an RL loss cancel, so its sum is only as exact as its tokens.
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5 * result.num_tokens)
    assert result.num_tokens == sum(len(datum.tokens) for datum in data)
    ours = named_grads(trainer)
    assert set(ours) == set(grads)
    for name, grad in grads.items():
        assert_close(ours[name], grad, name)


# --------------------------------------------------------------------------------------- oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_loss_and_every_gradient_match_peft(tiny, family, rng, tmp_path):
    """R31: all adapted modules of each family, ragged datums packed in one pass."""
    model = tiny(family)
    trainer = model.trainer()
    make(trainer)
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    check_against_truth(trainer, oracle, make_data(rng), "cross_entropy")


@pytest.mark.parametrize("loss_fn", [*RL, "kl_divergence"])
def test_every_loss_and_its_gradients_match_peft(tiny, loss_fn, rng, tmp_path):
    model = tiny()
    trainer = model.trainer(head_rows=10)
    make(trainer)
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    check_against_truth(trainer, oracle, make_data(rng, loss_fn), loss_fn)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "kl_divergence"])
def test_soft_targets_match_peft(tiny, loss_fn, rng, tmp_path):
    """2-D targets: several candidates per position, logprobs in their shape."""
    model = tiny()
    trainer = model.trainer(head_rows=5)
    make(trainer)
    data = []
    for length, width in ((6, 3), (9, 2), (4, 2)):
        scores = rng.normal(size=(length, width))
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        name = "weights" if loss_fn == "cross_entropy" else "logprobs"
        value = p if loss_fn == "cross_entropy" else np.log(p)
        inputs = {
            "target_tokens": rng.integers(0, 97, (length, width)),
            name: value.astype(np.float32),
        }
        data.append(TrainDatum(tokens=rng.integers(0, 97, length), inputs=inputs))
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    check_against_truth(trainer, oracle, tuple(data), loss_fn)


def test_the_default_model_trains_as_peft_trains_it(default_model_dir, rng, tmp_path):
    """R31: logprobs, loss, gradients and one AdamW step on the model users start with."""
    from transformers import AutoModelForCausalLM

    from tinkex.engine.decoder import load_decoder
    from tinkex.engine.trainer import Trainer

    trainer = Trainer(load_decoder(str(default_model_dir)), base_model="default")
    resident = make(trainer, rank=4, noise=0.01)
    base = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float64)
    oracle = peft_model(base, trainer, tmp_path / "ck")
    data = tuple(
        TrainDatum(
            tokens=rng.integers(0, 49152, n),
            inputs={
                "target_tokens": rng.integers(0, 49152, n),
                "weights": np.ones(n, np.float32),
            },
        )
        for n in (5, 11)
    )
    logprobs, loss, grads = truth(oracle, data, "cross_entropy")
    (result,) = train(trainer, job(data))
    for ours, theirs in zip(result.outputs, logprobs, strict=True):
        assert_close(ours["logprobs"], theirs, "logprobs")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    # Thirty layers of fp32 rounding: peft in fp32 itself lies up to 2.3e-5 from the truth.
    errors = [distance(named_grads(trainer)[name], grad) for name, grad in grads.items()]
    assert np.median(errors) < 1e-5
    assert max(errors) < 3e-5
    parameters = [p for p in oracle.parameters() if p.requires_grad]
    # A large eps keeps the step proportional to the gradient, so its errors show as they are.
    torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1).step()
    params = AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.1)
    trainer.optim(OptimJob(job_id="", adapter_id="a", params=params))
    theirs = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.detach()
        for name, p in oracle.named_parameters()
        if "lora_" in name
    }
    for part, a_rI, b_Or in resident.adapter.modules():
        assert_close(a_rI.detach(), theirs[f"{part.target.module}.lora_A"], "A", 3e-5)
        assert_close(b_Or.detach(), theirs[f"{part.target.module}.lora_B"], "B", 3e-5)


def test_one_adamw_step_matches_torch_through_the_model(tiny, rng, tmp_path):
    model = tiny("qwen3")
    trainer = model.trainer()
    resident = make(trainer)
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    data = make_data(rng)
    truth(oracle, data, "cross_entropy")
    train(trainer, job(data))
    parameters = [p for p in oracle.parameters() if p.requires_grad]
    # A large eps keeps the step proportional to the gradient, so its errors show.
    torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1).step()
    params = AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.1)
    metrics = trainer.optim(OptimJob(job_id="", adapter_id="a", params=params)).metrics
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-5)
    theirs = dict(oracle.named_parameters())
    for part, a_rI, b_Or in resident.adapter.modules():
        name = f"base_model.model.{part.target.module}"
        assert_close(a_rI.detach(), theirs[f"{name}.lora_A.default.weight"].detach(), name)
        assert_close(b_Or.detach(), theirs[f"{name}.lora_B.default.weight"].detach(), name)


# ------------------------------------------------------------------------------ packing, isolation


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


def test_gradients_accumulate_over_calls_and_a_step_clears_them(tiny, rng):
    data = make_data(rng)
    once, thrice = tiny().trainer(), tiny().trainer()
    make(once), make(thrice)
    train(once, job(data))
    for piece in (data[:2], data[2:3], data[3:]):
        train(thrice, job(piece))
    for name, grad in named_grads(once).items():
        assert_close(named_grads(thrice)[name], grad, name)
    thrice.optim(OptimJob(job_id="", adapter_id="a", params=AdamParams()))
    assert thrice.adapters["a"].grad is None


def test_two_jobs_of_one_adapter_in_one_call_add_up(tiny, rng):
    data = make_data(rng)
    one, two = tiny().trainer(), tiny().trainer()
    make(one), make(two)
    train(one, job(data))
    train(two, job(data[:2]), job(data[2:]))
    for name, grad in named_grads(one).items():
        assert_close(named_grads(two)[name], grad, name)


def test_forward_only_gathers_no_gradient_and_scores_the_same(tiny, rng):
    data = make_data(rng, "ppo")
    trainer = tiny().trainer()
    make(trainer)
    (scored,) = train(trainer, job(data, "ppo", backward=False))
    assert trainer.adapters["a"].grad is None
    (trained,) = train(trainer, job(data, "ppo"))
    assert scored.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=1e-6)
    for ours, theirs in zip(scored.outputs, trained.outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-6)


def test_an_untrained_adapter_scores_as_the_base_model(tiny, rng):
    trainer = tiny().trainer()
    make(trainer, noise=0.0)
    data = make_data(rng)
    (result,) = train(trainer, job(data))
    for datum, ours in zip(data, result.outputs, strict=True):
        with torch.no_grad():
            logits_TV = tiny().truth(torch.as_tensor(datum.tokens)[None]).logits[0]
        targets = torch.as_tensor(datum.inputs["target_tokens"])[:, None]
        assert_close(ours["logprobs"], logits_TV.log_softmax(-1).gather(1, targets)[:, 0], "logp")


def test_training_lowers_the_loss(tiny, rng):
    data = tuple(
        TrainDatum(tokens=d.tokens, inputs=d.inputs | {"weights": np.ones(len(d.tokens))})
        for d in make_data(rng)
    )
    trainer = tiny().trainer()
    make(trainer, noise=0.0)
    losses = []
    for _ in range(15):
        (result,) = train(trainer, job(data))
        losses.append(result.metrics["loss:sum"])
        params = AdamParams(learning_rate=0.02)
        trainer.optim(OptimJob(job_id="", adapter_id="a", params=params))
    assert losses[-1] < 0.5 * losses[0]


def test_muon_lowers_the_loss_too(tiny, rng):
    data = make_data(rng, lengths=[20, 20])
    data = tuple(
        TrainDatum(tokens=d.tokens, inputs=d.inputs | {"weights": np.ones(20)}) for d in data
    )
    trainer = tiny().trainer()
    spec = LoraSpec(rank=4, seed=1)
    trainer.create(
        CreateAdapterJob(job_id="", adapter_id="a", base_model="tiny", lora=spec, optimizer="muon")
    )
    losses = []
    for _ in range(15):
        (result,) = train(trainer, job(data))
        losses.append(result.metrics["loss:sum"])
        params = MuonParams(learning_rate=0.02)
        trainer.optim(OptimJob(job_id="", adapter_id="a", params=params))
    assert losses[-1] < 0.5 * losses[0]


# ---------------------------------------------------------------------------------------- metrics


def test_the_gap_to_the_sampler_is_in_every_result_that_carries_logprobs(tiny, rng):
    """An importance ratio that drifts must be visible (users.md, 2)."""
    trainer = tiny().trainer()
    make(trainer)
    data = make_data(rng, lengths=[20])
    (clean,) = train(trainer, job(data, backward=False))
    assert not any(name.startswith("sampler_gap") for name in clean.metrics)
    shifted = clean.outputs[0]["logprobs"] + np.float32(0.25)
    carrying = TrainDatum(tokens=data[0].tokens, inputs=data[0].inputs | {"logprobs": shifted})
    (result,) = train(trainer, job((carrying,), backward=False))
    assert result.metrics["sampler_gap_mean:mean"] == pytest.approx(0.25, rel=1e-4)
    assert result.metrics["sampler_gap_max:max"] == pytest.approx(0.25, rel=1e-4)
    k3 = math.exp(-0.25) + 0.25 - 1
    assert result.metrics["sampler_gap_k3:mean"] == pytest.approx(k3, rel=1e-3)


def test_metric_names_have_one_colon_and_count_tokens(tiny, rng):
    trainer = tiny().trainer()
    make(trainer)
    (result,) = train(trainer, job(make_data(rng)))
    assert all(name.count(":") == 1 for name in result.metrics)
    assert result.metrics["num_tokens:sum"] == sum(LENGTHS)
    assert result.metrics["num_active_tokens:sum"] == sum(n - n // 3 for n in LENGTHS)
    assert result.metrics["train_time_s:sum"] > 0


# --------------------------------------------------------------------------------------- seeds


def test_equal_seeds_give_equal_adapters_whatever_else_is_trained(tiny):
    trainer = tiny().trainer()

    def weights(**spec) -> dict[str, torch.Tensor]:
        lora = LoraSpec(**({"rank": 4, "seed": 7} | spec))
        trainer.create(CreateAdapterJob(job_id="", adapter_id="s", base_model="t", lora=lora))
        adapter = trainer.adapters["s"].adapter
        return {part.target.module: a.detach().clone() for part, a, _ in adapter.modules()}

    full, attention = weights(), weights(train_mlp=False, train_unembed=False)
    assert set(attention) < set(full)
    assert all(".self_attn." in name for name in attention)
    assert all(torch.equal(attention[name], full[name]) for name in attention)
    other = weights(seed=8)
    assert not any(torch.equal(other[name], full[name]) for name in full)


# ---------------------------------------------------------------------------------------- errors


def custom_graph(metric_scale: float = 2.0) -> CustomLoss:
    """loss = sum(exp(logprobs) * advantages), metric = its double."""
    nodes = [
        *({"op": "placeholder", "name": name, "target": name, "args": [], "kwargs": {}}
          for name in ("logprobs", "advantages")),
        {"op": "call_function", "name": "e", "target": "torch.exp",
         "args": [{"ref": "logprobs"}], "kwargs": {}},
        {"op": "call_function", "name": "m", "target": "operator.mul",
         "args": [{"ref": "e"}, {"ref": "advantages"}], "kwargs": {}},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "m"}], "kwargs": {}},
        {"op": "call_function", "name": "d", "target": "operator.mul",
         "args": [{"ref": "s"}, metric_scale], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "kwargs": {},
         "args": [{"tuple": [{"ref": "s"}, {"dict": {"custom/double:sum": {"ref": "d"}}}]}]},
    ]  # fmt: skip
    return CustomLoss(
        inputs=(("logprobs", 1), ("advantages", 1)), graph={"format": 1, "nodes": nodes}
    )


def test_a_traced_custom_loss_trains_in_one_pass(tiny, rng):
    """R21: loss:sum is the custom loss, its metrics come back, its gradient is true."""
    data = make_data(rng, "ppo")
    trainer, reference = tiny().trainer(), tiny().trainer()
    make(trainer), make(reference)
    (result,) = train(trainer, job(data, "custom", custom_loss=custom_graph()))
    # exp(logp) * A is importance sampling with q = 0 and the sign turned.
    same = tuple(
        TrainDatum(
            tokens=d.tokens,
            inputs={
                "target_tokens": d.inputs["target_tokens"],
                "advantages": -d.inputs["advantages"],
                "logprobs": np.zeros(len(d.tokens), np.float32),
            },
        )
        for d in data
    )
    (expected,) = train(reference, job(same, "importance_sampling"))
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert result.metrics["custom/double:sum"] == pytest.approx(2 * result.metrics["loss:sum"])
    for name, grad in named_grads(reference).items():
        assert_close(named_grads(trainer)[name], grad, name)


def test_a_custom_loss_that_fails_on_one_datum_spares_the_others(tiny, rng):
    good, bad = make_data(rng, "ppo"), list(make_data(rng, "ppo"))
    wrong = {"target_tokens": bad[1].inputs["target_tokens"], "advantages": np.ones(5, np.float32)}
    bad[1] = TrainDatum(tokens=bad[1].tokens, inputs=wrong)  # 12 logprobs, 5 advantages
    trainer = tiny().trainer()
    make(trainer, "a"), make(trainer, "b")
    failed, fine = trainer.train(
        [
            job(tuple(bad), "custom", custom_loss=custom_graph()),
            job(good, "ppo", adapter_id="b"),
        ]
    )
    assert isinstance(failed, InvalidInputError)
    assert failed.path == "data[1]"
    assert isinstance(fine, TrainResult)
    assert trainer.adapters["a"].grad is None
    assert trainer.adapters["b"].grad is not None


BAD = np.array([1.0, np.nan, 1.0], np.float32)
ONES = np.ones(3, np.float32)
TARGETS = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (job((), adapter_id="a"), InvalidInputError),
        (job(make_data(np.random.default_rng(0)), adapter_id="nobody"), ModelNotFoundError),
        (job(make_data(np.random.default_rng(0)), "sft"), NotSupportedError),
        (job((TrainDatum(tokens=np.array([1, 2, 97]),
                         inputs={"target_tokens": TARGETS, "weights": ONES}),)), InvalidInputError),
        (job((TrainDatum(tokens=TARGETS, inputs={"target_tokens": TARGETS, "weights": BAD}),)),
         InvalidInputError),
        (job((TrainDatum(tokens=np.zeros(129, int), inputs={
            "target_tokens": np.zeros(129, int), "weights": np.zeros(129)}),)), InvalidInputError),
        (job(make_data(np.random.default_rng(0)), loss_fn_config={"beta": 1.0}), InvalidInputError),
        (job(make_data(np.random.default_rng(0)), "custom"), InvalidInputError),
    ],
    ids=["empty", "no adapter", "no loss", "token", "nan", "context", "setting", "no graph"],
)  # fmt: skip
def test_a_refused_job_changes_nothing_and_the_next_one_works(tiny, rng, wrong, error):
    """Issue B: a typed error before any state changes; neighbours in the same call are served."""
    trainer, untouched = tiny().trainer(), tiny().trainer()
    make(trainer), make(trainer, "b"), make(untouched)
    good = make_data(rng)
    refused, served = trainer.train([wrong, job(good, adapter_id="b")])
    assert isinstance(refused, error)
    assert isinstance(served, TrainResult)
    assert trainer.adapters["a"].grad is None
    assert torch.equal(trainer.adapters["a"].adapter.flat, untouched.adapters["a"].adapter.flat)
    assert isinstance(trainer.train([job(good)])[0], TrainResult)


def test_a_diverged_loss_is_an_error_and_keeps_earlier_gradients(tiny, rng):
    trainer = tiny().trainer()
    make(trainer)
    train(trainer, job(make_data(rng)))
    before = trainer.adapters["a"].grad.clone()
    extreme = make_data(rng, "importance_sampling", lengths=[5])
    extreme[0].inputs["logprobs"][2] = -1e30  # the ratio overflows
    good = make_data(rng, lengths=[4])
    failed, fine = trainer.train([job(extreme, "importance_sampling"), job(good)])
    assert isinstance(failed, InvalidInputError)
    assert str(failed).startswith("data[0]: the loss is not finite")
    assert isinstance(fine, TrainResult)
    alone = tiny().trainer()
    make(alone)
    train(alone, job(good))
    torch.testing.assert_close(trainer.adapters["a"].grad, before + alone.adapters["a"].grad)


@pytest.mark.parametrize("shortage", [1, 99], ids=["once", "always"])
def test_a_pass_that_does_not_fit_is_tried_in_smaller_pieces(tiny, rng, monkeypatch, shortage):
    """Gradients of the passes that were under way when memory ran out are dropped, not doubled."""
    data = make_data(rng)
    trainer, plenty = tiny().trainer(max_tokens=40), tiny().trainer()
    make(trainer), make(plenty)
    forward, sizes = trainer.decoder.forward, []

    def short_of_memory(tokens_T, *args, **kwargs):
        sizes.append(len(tokens_T))
        if 2 <= len(sizes) < 2 + shortage:
            raise torch.OutOfMemoryError("out of memory")
        return forward(tokens_T, *args, **kwargs)

    monkeypatch.setattr(trainer.decoder, "forward", short_of_memory)
    (result,) = trainer.train([job(data)])
    if shortage > 1:
        assert isinstance(result, EngineError)
        assert trainer.adapters["a"].grad is None
        return
    train(plenty, job(data))
    for name, grad in named_grads(plenty).items():
        assert_close(named_grads(trainer)[name], grad, name)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"rank": 0}, "lora.rank"),
        ({"rank": 513}, "lora.rank"),
        ({"rank": 4, "alpha": math.nan}, "lora.alpha"),
        ({"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}, "lora"),
    ],
)
def test_impossible_adapters_are_refused(tiny, spec, field):
    trainer = tiny().trainer()
    with pytest.raises(InvalidInputError) as caught:
        trainer.create(
            CreateAdapterJob(job_id="", adapter_id="a", base_model="t", lora=LoraSpec(**spec))
        )
    assert caught.value.path == field
    assert trainer.adapters == {}


def test_a_refused_step_changes_nothing(tiny, rng):
    trainer = tiny().trainer()
    resident = make(trainer)
    train(trainer, job(make_data(rng)))
    before = resident.adapter.flat.clone(), resident.grad.clone()
    wrong = OptimJob(job_id="", adapter_id="a", params=AdamParams(learning_rate=-1.0))
    with pytest.raises(InvalidInputError, match="learning_rate"):
        trainer.optim(wrong)
    assert torch.equal(resident.adapter.flat, before[0])
    assert torch.equal(resident.grad, before[1])
    assert resident.optimizer.step == 0
