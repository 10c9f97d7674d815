"""Every native family through the trainer: steps, checkpoints, replay, router load, merging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from table import FAMILIES, MIXTURES, VOCAB
from test_arithmetic import packed, sequences_of

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.checkpoint import read_adapter
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoadAdapterJob,
    LoraSpec,
    OptimJob,
    SaveAdapterJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.engine.lora.adapter import LoraBatch, Span
from tinkex.engine.model.decoder import load_decoder
from tinkex.recipes.merge import merge_adapter


def create(trainer, **lora):
    spec = LoraSpec(**({"rank": 2, "seed": 1} | lora))
    trainer.create(
        CreateAdapterJob(job_id="", adapter_id="a", base_model=trainer.base_model, lora=spec)
    )


def batch(seed: int) -> TrainJob:
    rng = np.random.default_rng(seed)
    data = []
    for length in (5, 17, 9):
        inputs = {
            "target_tokens": rng.integers(0, VOCAB, length),
            "weights": np.ones(length, np.float32),
        }
        data.append(TrainDatum(tokens=rng.integers(0, VOCAB, length), inputs=inputs))
    return TrainJob(job_id="", adapter_id="a", data=tuple(data), loss_fn="cross_entropy")


def steps(trainer, seeds, rate=0.01) -> list[TrainResult]:
    results = []
    for seed in seeds:
        (result,) = trainer.train([batch(seed)])
        assert isinstance(result, TrainResult), result
        trainer.optim(OptimJob(job_id="", adapter_id="a", params=AdamParams(learning_rate=rate)))
        results.append(result)
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_resumed_from_disk_is_the_same_to_the_bit(family_model, family, tmp_path):
    model = family_model(family)
    whole = model.trainer(deterministic=True)
    create(whole)
    losses = [result.metrics["loss:sum"] for result in steps(whole, [0, 0, 1, 2])]
    assert losses[1] < losses[0]
    first = model.trainer(deterministic=True)
    create(first)
    steps(first, [0, 0])
    folder = str(tmp_path / "ck")
    first.save(SaveAdapterJob(job_id="", adapter_id="a", folder=folder, with_optimizer=True))
    second = model.trainer(deterministic=True)
    second.load(
        LoadAdapterJob(
            job_id="", adapter_id="a", base_model="m", folder=folder, with_optimizer=True
        )
    )
    steps(second, [1, 2])
    assert torch.equal(whole.adapters["a"].adapter.flat, second.adapters["a"].adapter.flat)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_of_a_batch_gives_the_same_gradient(family_model, family):
    grads = []
    for config in ({}, {"max_tokens": 7}, {"activation_bytes": 1}, {"deterministic": True}):
        trainer = family_model(family).trainer(**config)
        create(trainer)
        steps(trainer, [3], rate=0.02)
        trainer.train([batch(4)])
        grads.append(trainer.adapters["a"].grad)
    for grad in grads[1:]:
        assert float((grad - grads[0]).norm() / grads[0].norm()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_goes_out_comes_back_and_merges(family_model, family, tmp_path):
    model = family_model(family)
    trainer = model.trainer()
    create(trainer)
    steps(trainer, [0, 1], rate=0.05)
    trainer.save(SaveAdapterJob(job_id="", adapter_id="a", folder=str(tmp_path / "peft")))
    adapter = read_adapter(str(tmp_path / "peft"), trainer.decoder.targets, "cpu")
    assert torch.equal(adapter.flat, trainer.adapters["a"].adapter.flat)
    merge_adapter(tmp_path / "peft", tmp_path / "merged", base=model.folder)
    texts = sequences_of([9, 14])
    with torch.no_grad():
        ours = packed(trainer.decoder, texts, LoraBatch([Span(0, 23, adapter)]))
        theirs = packed(load_decoder(str(tmp_path / "merged")), texts)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("family", MIXTURES)
def test_a_result_tells_how_the_router_spread_the_tokens(family_model, family):
    trainer = family_model(family).trainer(max_tokens=20)
    create(trainer)
    (result,) = steps(trainer, [0])
    metrics = {key: value for key, value in result.metrics.items() if key.startswith("e_")}
    assert metrics["e_dropped:sum"] == 0
    assert 0 < metrics["e_frac_with_tokens:mean"] <= 1
    assert 0 < metrics["e_frac_oversubscribed:mean"] < 1
    assert metrics["e_max_violation:max"] >= metrics["e_max_violation:mean"] > 0
    assert -1 <= metrics["e_min_violation:mean"] < 0
    experts = trainer.decoder.config.experts.count
    assert 0 < metrics["e_entropy:mean"] < np.log(experts)
