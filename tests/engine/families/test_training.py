"""Every native family through the trainer: steps, checkpoints, replay, router load, merging."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from table import FAMILIES, MIXTURES, VOCAB
from test_arithmetic import packed, sequences_of
from training import save

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.checkpoint.reader import read
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoadAdapterJob,
    LoraSpec,
    OptimJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.mixture import Routing
from tinkex.export.merge import merge_adapter
from tinkex.export.stacked_experts import stack_experts


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
    save(first, folder, with_optimizer=True)
    second = model.trainer(deterministic=True)
    second.load(
        LoadAdapterJob(
            job_id="", adapter_id="a", base_model="m", folder=folder, with_optimizer=True
        )
    )
    steps(second, [1, 2])
    assert torch.equal(whole.adapters["a"].adapter.flat, second.adapters["a"].adapter.flat)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_crash_left_is_replayed_to_the_bit(family_model, family, tmp_path):
    """A snapshot between two passes of one step holds the gradients gathered so far."""
    model = family_model(family)
    whole = model.trainer(deterministic=True)
    create(whole)
    steps(whole, [0])
    whole.train([batch(1)])
    folder = str(tmp_path / "snapshot")
    save(whole, folder, with_gradients=True)
    again = model.trainer(deterministic=True)
    again.load(
        LoadAdapterJob(
            job_id="", adapter_id="a", base_model="m", folder=folder, with_optimizer=True
        )
    )
    flats, losses = [], []
    for trainer in (whole, again):
        losses.append([result.metrics["loss:sum"] for result in steps(trainer, [2, 3])])
        flats.append(trainer.adapters["a"].adapter.flat)
    assert losses[0] == losses[1]
    assert torch.equal(*flats)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_what_we_saved_and_we_read_what_peft_saves(family_model, family, tmp_path):
    """On attention, delta layers and the head: peft has no name for a linear of one expert."""
    from peft import PeftModel

    model = family_model(family)
    trainer = model.trainer()
    tied = trainer.decoder.config.tied_head
    create(trainer, train_mlp=False, train_unembed=not tied)
    steps(trainer, [0, 1], rate=0.05)
    save(trainer, tmp_path / "ours")
    (text,) = sequences_of([14])
    adapted = PeftModel.from_pretrained(copy.deepcopy(model.truth), tmp_path / "ours")
    with torch.no_grad():
        truth = adapted(text[None], use_cache=False).logits[0]
        ours = packed(
            trainer.decoder, [text], LoraBatch([AdapterSpan(0, 14, trainer.adapters["a"].adapter)])
        )
        plain = packed(trainer.decoder, [text])
    assert float((ours - truth).norm() / truth.norm()) < 1e-4
    assert float((plain - truth).norm() / truth.norm()) > 1e-2
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    back = read(
        str(tmp_path / "theirs"), trainer.decoder.targets, "cpu", with_optimizer=False
    ).adapter
    named = {part.target.module: (a, b) for part, a, b in back.modules()}
    for part, a, b in trainer.adapters["a"].adapter.modules():
        assert torch.equal(named[part.target.module][0], a)
        assert torch.equal(named[part.target.module][1], b)


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
    save(trainer, tmp_path / "peft")
    adapter = read(
        str(tmp_path / "peft"), trainer.decoder.targets, "cpu", with_optimizer=False
    ).adapter
    assert torch.equal(adapter.flat, trainer.adapters["a"].adapter.flat)
    merge_adapter(tmp_path / "peft", tmp_path / "merged", base=model.folder)
    texts = sequences_of([9, 14])
    with torch.no_grad():
        ours = packed(trainer.decoder, texts, LoraBatch([AdapterSpan(0, 23, adapter)]))
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


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_stacked_with_a_shared_side_come_in_and_merge(family_model, family, tmp_path):
    """w1, w2 and w3 in 3-D tensors: one A for gate and up of all experts, one B for down."""
    from safetensors.torch import save_file

    model = family_model(family)
    decoder = model.decoder()
    config = decoder.config
    count, hidden, size = config.experts.count, config.hidden_size, config.experts.size
    rng = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=rng) * 0.1

    shapes = {
        "w1": (noise(1, 2, hidden), noise(count, size, 2)),
        "w3": (noise(1, 2, hidden), noise(count, size, 2)),
        "w2": (noise(count, 2, size), noise(1, hidden, 2)),
    }
    stored = {}
    for name, (a, b) in shapes.items():
        prefix = f"base_model.model.model.layers.0.mlp.experts.{name}"
        stored |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    (tmp_path / "ad").mkdir()
    save_file(stored, tmp_path / "ad" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "m"}
    (tmp_path / "ad" / "adapter_config.json").write_text(json.dumps(settings))
    adapter = read(str(tmp_path / "ad"), decoder.targets, "cpu", with_optimizer=False).adapter
    named = {part.target.module: (a, b) for part, a, b in adapter.modules()}
    block = "model.layers.0.mlp.experts"
    assert len(named) == 3 * count
    assert torch.equal(named[f"{block}.1.up_proj"][0], shapes["w3"][0][0])
    assert torch.equal(named[f"{block}.1.down_proj"][0], shapes["w2"][0][1])
    merge_adapter(tmp_path / "ad", tmp_path / "merged", base=model.folder)
    texts = sequences_of([9, 14])
    with torch.no_grad():
        ours = packed(decoder, texts, LoraBatch([AdapterSpan(0, 23, adapter)]))
        theirs = packed(load_decoder(str(tmp_path / "merged")), texts)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("family", MIXTURES)
def test_a_prescribed_routing_is_followed(family_model, family):
    """What one pass chose, given to another, gives its numbers; another choice gives others."""
    decoder = family_model(family).decoder()
    (text,) = sequences_of([13])
    attend = PackedCausal([0, 13], decoder.config.windows)
    free, again, other = Routing(), Routing(), Routing()

    def run(routing):
        with torch.no_grad():
            return decoder.forward(text, torch.arange(13), attend, routing=routing)

    expected = run(free)
    again.given = dict(free.chosen)
    assert torch.equal(run(again), expected)
    count = decoder.config.experts.count
    other.given = {layer: (chosen + 1) % count for layer, chosen in free.chosen.items()}
    assert not torch.allclose(run(other), expected)
    assert all(torch.equal(other.chosen[layer], other.given[layer]) for layer in other.given)


def test_an_adapter_with_stacked_experts_is_the_same_adapter(family_model, tmp_path):
    model = family_model("qwen3_5_moe")
    trainer = model.trainer()
    create(trainer)
    steps(trainer, [0])
    save(trainer, tmp_path / "ad")
    targets = trainer.decoder.targets
    before = read(str(tmp_path / "ad"), targets, "cpu", with_optimizer=False).adapter
    assert stack_experts(tmp_path / "ad") == 3 * 4
    assert torch.equal(
        read(str(tmp_path / "ad"), targets, "cpu", with_optimizer=False).adapter.flat, before.flat
    )
    assert stack_experts(tmp_path / "ad") == 3 * 4  # stacked already: nothing changes
