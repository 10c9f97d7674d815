"""What cannot be done is refused with a typed error, changes nothing, and the next call works."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from training import assert_close, job, make, make_data, named_grads, train

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.jobs import (
    CreateAdapterJob,
    CsrArray,
    LoraSpec,
    OptimJob,
    TrainDatum,
    TrainResult,
)
from tinkex.errors import EngineError, InvalidInputError, ModelNotFoundError, NotSupportedError

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
        (job((TrainDatum(tokens=TARGETS, inputs={"target_tokens": TARGETS, "weights": ONES[:2]}),)),
         InvalidInputError),
        (job((TrainDatum(tokens=TARGETS, inputs={
            "target_tokens": TARGETS[:2], "weights": ONES[:2]}),)),
         InvalidInputError),
        (job((TrainDatum(tokens=TARGETS, inputs={
            "target_tokens": TARGETS[:, None], "logprobs": ONES, "advantages": ONES}),), "ppo"),
         InvalidInputError),
        (job(make_data(np.random.default_rng(0)), loss_fn_config={"beta": 1.0}), InvalidInputError),
        (job(make_data(np.random.default_rng(0)), "custom"), InvalidInputError),
    ],
    ids=["empty", "no adapter", "no loss", "token", "nan", "context", "weights shape",
         "targets shape", "2-D targets for RL", "setting", "no graph"],
)  # fmt: skip
def test_a_refused_job_changes_nothing_and_the_next_one_works(tiny, rng, wrong, error):
    """A typed error before any state changes; neighbours in the same call are served."""
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
    make(trainer)
    assert set(trainer.adapters) == {"a"}


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


def test_sparse_inputs_that_would_fill_the_memory_are_refused_before_they_are_made(tiny, rng):
    """Without a server too: its check is the engine's own."""
    wide = CsrArray(
        values=np.ones(1, np.float32),
        crow_indices=np.array([0, 1, 1, 1]),
        col_indices=np.array([0]),
        shape=(3, 2**26),
    )
    whole = CsrArray(
        values=np.ones(1, np.int64),
        crow_indices=np.array([0, 1, 1, 1]),
        col_indices=np.array([0]),
        shape=(3, 2**26),
    )
    trainer = tiny().trainer()
    make(trainer)
    datum = TrainDatum(tokens=TARGETS, inputs={"target_tokens": whole, "weights": wide})
    (refused,) = trainer.train([job((datum,))])
    assert isinstance(refused, InvalidInputError)
    assert "shape [3, 67108864] with 1 stored values" in str(refused)
    (served,) = trainer.train([job(make_data(rng))])
    assert isinstance(served, TrainResult)
