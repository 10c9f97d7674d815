"""The trainer gathers, steps, scores and reports as its results say."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from training import (
    LENGTHS,
    assert_close,
    custom_graph,
    job,
    make,
    make_data,
    named_grads,
    train,
)

from tinkex.contract.optimizers import OPTIMIZERS, AdamParams
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoraSpec,
    OptimJob,
    TrainDatum,
    TrainResult,
)
from tinkex.engine.numerics.memory_in_use import is_out_of_memory
from tinkex.engine.train.data import Limits
from tinkex.engine.train.tasks import MAX_TURNS, check_job
from tinkex.errors import InvalidInputError


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


@pytest.mark.parametrize(("optimizer", "rate"), [("muon", 0.02), ("lion", 0.01)])
def test_other_optimizers_lower_the_loss_too(tiny, rng, optimizer, rate):
    data = make_data(rng, lengths=[20, 20])
    data = tuple(
        TrainDatum(tokens=d.tokens, inputs=d.inputs | {"weights": np.ones(20)}) for d in data
    )
    trainer = tiny().trainer()
    spec = LoraSpec(rank=4, seed=1)
    trainer.create(
        CreateAdapterJob(
            job_id="", adapter_id="a", base_model="tiny", lora=spec, optimizer=optimizer
        )
    )
    losses = []
    for _ in range(15):
        (result,) = train(trainer, job(data))
        losses.append(result.metrics["loss:sum"])
        params = OPTIMIZERS[optimizer](learning_rate=rate)
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


def test_a_result_says_when_its_passes_ran_and_how_many_tokens_of_it_were_in_them(tiny, rng):
    trainer = tiny().trainer(max_tokens=max(LENGTHS))
    make(trainer), make(trainer, "b")
    data = make_data(rng)
    began_at = time.time()
    for result in train(trainer, job(data), job(data, adapter_id="b")):
        assert len(result.turns) > 1
        assert sum(turn.size for turn in result.turns) == sum(LENGTHS)
        moments = [began_at, *(moment for turn in result.turns for moment in turn[1:3])]
        assert moments == sorted(moments)


def test_many_passes_are_told_as_few(tiny, rng):
    task = check_job(job(make_data(rng)), Limits(vocab_size=1 << 20, max_length=1 << 20))
    for number in range(1000):
        task.note_pass(number, number + 0.5, 10)
    assert len(task.turns) <= MAX_TURNS
    assert sum(turn.size for turn in task.turns) == 10_000
    assert (task.turns[0].began_at, task.turns[-1].ended_at) == (0, 999.5)


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


# ----------------------------------------------------------------------------------- custom losses


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


def test_a_cpu_without_memory_is_told_from_other_faults():
    with pytest.raises(RuntimeError) as full:
        torch.empty(1 << 46)
    assert is_out_of_memory(full.value)
    assert not is_out_of_memory(RuntimeError("sizes do not match"))
