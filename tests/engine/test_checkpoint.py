"""A checkpoint is a PEFT folder, training goes on from it to the bit, and bad ones are refused."""

from __future__ import annotations

import json
import shutil
from bisect import bisect_left
from pathlib import Path

import numpy as np
import pytest
import torch
import training
from safetensors.torch import load_file, save_file

from tinkex.contract.optimizers import OPTIMIZERS
from tinkex.engine.checkpoint import reader, writer
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoadAdapterJob,
    LoraSpec,
    OptimJob,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.errors import InvalidInputError, ModelNotFoundError, NotSupportedError


def create(trainer, optimizer="adamw", **spec) -> None:
    lora = LoraSpec(**({"rank": 4, "seed": 1} | spec))
    trainer.create(
        CreateAdapterJob(
            job_id="", adapter_id="a", base_model="tiny", lora=lora, optimizer=optimizer
        )
    )


def train(trainer, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = {"target_tokens": rng.integers(0, 97, 9), "weights": np.ones(9, np.float32)}
    data = (TrainDatum(tokens=rng.integers(0, 97, 9), inputs=inputs),)
    job = TrainJob(job_id="", adapter_id="a", data=data, loss_fn="cross_entropy")
    assert isinstance(trainer.train([job])[0], TrainResult)


def step(trainer, optimizer="adamw") -> None:
    params = OPTIMIZERS[optimizer](learning_rate=0.01)
    trainer.optim(OptimJob(job_id="", adapter_id="a", params=params))


def save(trainer, folder: Path, **options) -> Path:
    training.save(trainer, folder, **options)
    return folder


def load(trainer, folder: Path, *, with_optimizer: bool) -> None:
    trainer.load(
        LoadAdapterJob(
            job_id="",
            adapter_id="a",
            base_model="tiny",
            folder=str(folder),
            with_optimizer=with_optimizer,
        )
    )


def state(trainer) -> torch.Tensor:
    return trainer.adapters["a"].adapter.flat.clone()


# ---------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_to_the_bit(tiny, tmp_path, optimizer):
    """users.md 5: optimizer state restored, bit for bit."""
    straight = tiny().trainer()
    create(straight, optimizer)
    for seed in range(2):
        train(straight, seed), step(straight, optimizer)
    folder = save(straight, tmp_path / "ck", with_optimizer=True)
    resumed = tiny().trainer()
    load(resumed, folder, with_optimizer=True)
    for trainer in (straight, resumed):
        for seed in (7, 8):
            train(trainer, seed), step(trainer, optimizer)
    assert torch.equal(state(straight), state(resumed))
    assert resumed.adapters["a"].optimizer.step == 4


def test_without_the_optimizer_the_next_step_is_a_first_step(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer), train(trainer, 0), step(trainer)
    folder = save(trainer, tmp_path / "ck", with_optimizer=True)
    fresh = tiny().trainer()
    load(fresh, folder, with_optimizer=False)
    assert fresh.adapters["a"].optimizer.step == 0
    assert torch.equal(state(fresh), state(trainer))
    for one in (trainer, fresh):
        train(one, 1), step(one)
    assert not torch.equal(state(fresh), state(trainer))


def test_a_recovery_snapshot_holds_gathered_gradients(tiny, tmp_path):
    """A worker that dies between forward_backward and optim_step loses nothing."""
    straight = tiny().trainer()
    create(straight), train(straight, 0), step(straight), train(straight, 1)
    folder = save(straight, tmp_path / "snapshot", with_gradients=True)
    resumed = tiny().trainer()
    load(resumed, folder, with_optimizer=True)
    for trainer in (straight, resumed):
        train(trainer, 2), step(trainer)
    assert torch.equal(state(straight), state(resumed))


def test_a_load_drops_gradients_that_belong_to_other_weights(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck", with_optimizer=True)
    train(trainer, 0)
    load(trainer, folder, with_optimizer=True)
    assert trainer.adapters["a"].grad is None


def test_asking_for_an_optimizer_that_was_not_saved_is_an_error(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer), train(trainer, 0), step(trainer)
    folder = save(trainer, tmp_path / "ck")
    before = state(trainer)
    with pytest.raises(InvalidInputError, match="without optimizer state"):
        load(trainer, folder, with_optimizer=True)
    assert torch.equal(state(trainer), before)


# ------------------------------------------------------------------------------------------ peft


def peft_logits(base, folder: Path) -> torch.Tensor:
    import copy

    from peft import PeftModel

    model = PeftModel.from_pretrained(copy.deepcopy(base), folder).double().eval()
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits[0]


def our_logits(trainer) -> torch.Tensor:
    from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch
    from tinkex.engine.model.attention import PackedCausal

    decoder = trainer.decoder
    lora = LoraBatch([AdapterSpan(0, 20, trainer.adapters["a"].adapter)])
    with torch.no_grad():
        attend = PackedCausal([0, 20], decoder.config.windows)
        hidden_TD = decoder.forward(torch.arange(20), torch.arange(20), attend, lora)
        return decoder.head(hidden_TD, lora)


@pytest.mark.parametrize("family", ["llama-biased-linear-rope", "qwen3"])
@pytest.mark.parametrize(
    "spec", [{}, {"train_mlp": False, "train_unembed": False}], ids=["all", "attn"]
)
def test_what_we_write_loads_in_peft(tiny, tmp_path, family, spec):
    """users.md 3: weights must get out unchanged."""
    model = tiny(family)
    trainer = model.trainer()
    create(trainer, alpha=11.0, **spec)
    for seed in range(3):
        train(trainer, seed), step(trainer)
    folder = save(trainer, tmp_path / "ck")
    torch.testing.assert_close(
        our_logits(trainer), peft_logits(model.truth, folder).float(), rtol=1e-4, atol=1e-4
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    assert "q_proj" in config["target_modules"]
    assert ("down_proj" in config["target_modules"]) == (not spec)


def test_what_peft_writes_trains_on_here(tiny, tmp_path):
    """Different ranks and alphas per module, rank-stabilised scaling, only some modules."""
    import copy

    from peft import LoraConfig, get_peft_model

    model = tiny("qwen3")
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 7},
        alpha_pattern={"down_proj": 9},
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    peer = get_peft_model(copy.deepcopy(model.truth).float(), config)
    peer.save_pretrained(tmp_path / "peft")
    trainer = model.trainer()
    load(trainer, tmp_path / "peft", with_optimizer=False)
    with torch.no_grad():
        expected = peer.double()(torch.arange(20)[None]).logits[0]
    torch.testing.assert_close(our_logits(trainer), expected.float(), rtol=1e-4, atol=1e-4)
    train(trainer, 0), step(trainer)
    folder = save(trainer, tmp_path / "ours")
    torch.testing.assert_close(
        our_logits(trainer), peft_logits(model.truth, folder).float(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_arithmetic_that_is_not_ours_is_refused_by_name(tiny, tmp_path, change, message):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotSupportedError, match=message):
        load(trainer, folder, with_optimizer=False)


def test_an_adapter_of_another_model_is_refused(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    other = tiny("mistral-window").trainer()  # wider heads: other shapes
    with pytest.raises(InvalidInputError, match=r"q_proj.*this base model needs"):
        load(other, folder, with_optimizer=False)
    assert other.adapters == {}


# ----------------------------------------------------------------------------------------- files


def test_a_checkpoint_is_never_overwritten(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    with pytest.raises(InvalidInputError, match="never overwritten"):
        save(trainer, folder)


def test_a_save_that_fails_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    trainer = tiny().trainer()
    create(trainer)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_save_tensors", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(trainer, tmp_path / "ck")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_named_by_its_content(tiny, tmp_path):
    trainer = tiny().trainer()
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        create(trainer, seed=seed)
        save(trainer, tmp_path / name)
    names = {name: reader.content_of(tmp_path / name) for name in ("a", "again", "b")}
    assert names["a"] == names["again"] != names["b"]
    manifest = tmp_path / "a" / "tinkex.json"
    manifest.unlink()  # as in a folder that peft wrote
    assert reader.content_of(tmp_path / "a") == names["a"]


def test_a_missing_or_damaged_folder_is_refused(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    with pytest.raises(ModelNotFoundError, match="no checkpoint"):
        load(trainer, tmp_path / "nowhere", with_optimizer=False)
    folder = save(trainer, tmp_path / "ck")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load(trainer, damaged, with_optimizer=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ({"lora_alpha": "big"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"((a+)+)+": 1}}, "too elaborate"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ],
)
def test_a_hostile_config_is_refused(tiny, tmp_path, config, message):
    """Folders come from strangers: a config may neither crash nor stall the engine."""
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    file = folder / "adapter_config.json"
    if isinstance(config, dict):
        config = json.dumps(json.loads(file.read_text()) | config)
    file.write_text(config)
    with pytest.raises(InvalidInputError, match=message):
        load(trainer, folder, with_optimizer=False)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no LoRA matrix"),
        ({"lora_A": torch.zeros(0, 32), "lora_B": torch.zeros(32, 0)}, "rank of 1 to 512"),
        ({"lora_A": torch.zeros(4, 32)}, "only half"),
        ({"lora_magnitude_vector": torch.zeros(4)}, "no LoRA matrix"),
    ],
)
def test_weights_that_are_no_adapter_are_refused(tiny, tmp_path, tensors, message):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    named = {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidInputError, match=message):
        load(trainer, folder, with_optimizer=False)


PREFIX = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"base_model.model.{'.' * 2000}.lora_A.weight", "no adaptable module"),
        (f"{PREFIX}self_attn.z_proj.lora_A.weight", "no adaptable module"),
        (f"{PREFIX}mlp.experts.w1.lora_A.weight", r"no adaptable module .*experts\.0\.gate_proj"),
        ("a1", "no LoRA matrix"),
    ],
)
def test_names_are_judged_before_a_tensor_is_made(tiny, tmp_path, monkeypatch, name, message):
    """A file may name very many tensors, and each costs time in which nobody else has a turn."""
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    save_file({name: torch.zeros(4, 32)}, folder / "adapter_model.safetensors")
    monkeypatch.setattr(reader, "_parse_tensors", lambda weights: pytest.fail("it was read"))
    with pytest.raises((InvalidInputError, NotSupportedError), match=message):
        load(trainer, folder, with_optimizer=False)


def test_a_file_larger_than_any_adapter_is_not_read(tiny, tmp_path, monkeypatch):
    trainer = tiny().trainer()
    create(trainer)
    folder = save(trainer, tmp_path / "ck")
    monkeypatch.setattr(reader, "HEADER_BYTES", 0)
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 30)  # a hole, which takes no room
    monkeypatch.setattr(reader, "_read_bytes", lambda path: pytest.fail("it was read"))
    with pytest.raises(InvalidInputError, match="the largest adapter of this model"):
        load(trainer, folder, with_optimizer=False)


def test_gradients_of_other_names_are_not_read(tiny, tmp_path, monkeypatch):
    trainer = tiny().trainer()
    create(trainer)
    train(trainer, 0)
    folder = save(trainer, tmp_path / "ck", with_optimizer=True, with_gradients=True)
    own = load_file(folder / "gradients.safetensors")
    save_file(own | {"other": torch.zeros(1)}, folder / "gradients.safetensors")
    read: list[set[str]] = []
    real = reader._from_modules

    def watched(adapter, stored, *rest):
        read.append(set(stored))
        return real(adapter, stored, *rest)

    monkeypatch.setattr(reader, "_from_modules", watched)
    load(trainer, folder, with_optimizer=False)
    assert read
    assert all(names == own.keys() for names in read)


def test_the_size_reported_is_the_size_on_disk(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    size_bytes = training.save(trainer, tmp_path / "ck", with_optimizer=True)
    assert size_bytes == sum(file.stat().st_size for file in (tmp_path / "ck").iterdir())


def test_moments_that_are_zero_are_not_stored_and_come_back_to_the_bit(tiny, tmp_path):
    """After one step half of the moments are: A has no gradient while B is zero."""
    trainer = tiny().trainer()
    create(trainer)
    fresh = save(trainer, tmp_path / "fresh", with_optimizer=True)
    assert (fresh / "optimizer.safetensors").stat().st_size < 100
    train(trainer, 0)
    step(trainer)
    once = save(trainer, tmp_path / "once", with_gradients=True)
    weights = (once / "adapter_model.safetensors").stat().st_size
    assert (once / "optimizer.safetensors").stat().st_size < 1.5 * weights
    before = {slot: flat.clone() for slot, flat in trainer.find("a").optimizer.moments.items()}
    load(trainer, once, with_optimizer=True)
    for slot, flat in trainer.find("a").optimizer.moments.items():
        assert torch.equal(flat, before[slot])
    manifest = json.loads((once / "tinkex.json").read_text())
    (once / "tinkex.json").write_text(json.dumps({**manifest, "zeros_left_out": False}))
    with pytest.raises(InvalidInputError, match="holds no state for"):
        load(trainer, once, with_optimizer=True)


def _changed(folder, **manifest):
    """Write other fields into a folder's manifest."""
    file = folder / "tinkex.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))


def test_what_a_manifest_claims_is_no_name_of_its_content(tiny, tmp_path):
    trainer = tiny().trainer()
    for name, seed in (("a", 1), ("b", 2)):
        create(trainer, seed=seed)
        save(trainer, tmp_path / name)
    own, other = (reader.content_of(tmp_path / name) for name in "ab")
    _changed(tmp_path / "b", content_sha256=own)
    assert reader.content_of(tmp_path / "b") == other != own
    with pytest.raises(InvalidInputError, match="'b' is damaged"):
        load(trainer, tmp_path / "b", with_optimizer=False)
    with pytest.raises(InvalidInputError, match="'b' is damaged"):
        trainer.read_snapshot(str(tmp_path / "b"))
    assert trainer.read_snapshot(str(tmp_path / "a")).content == own


@pytest.mark.parametrize("stretch", [64, 1000, 8 << 20])
def test_a_digest_read_is_the_digest_written(tiny, tmp_path, monkeypatch, stretch):
    for module in (reader, writer):
        monkeypatch.setattr(module, "STRETCH", stretch)
    trainer = tiny().trainer()
    create(trainer)
    save(trainer, tmp_path / "ck")
    manifest = json.loads((tmp_path / "ck" / "tinkex.json").read_text())
    assert reader.content_of(tmp_path / "ck") == manifest["content_sha256"]
    load(trainer, tmp_path / "ck", with_optimizer=False)


def test_folders_without_a_digest_load(tiny, tmp_path):
    trainer = tiny().trainer()
    create(trainer)
    save(trainer, tmp_path / "ck")
    content = reader.content_of(tmp_path / "ck")
    for claim in (None, ""):
        _changed(tmp_path / "ck", content_sha256=claim)
        load(trainer, tmp_path / "ck", with_optimizer=False)
        assert trainer.read_snapshot(str(tmp_path / "ck")).content == content


def test_a_config_of_any_depth_is_read_or_refused(tiny, tmp_path):
    """Some depths can be read and not written; which ones depends on Python and on who calls."""
    trainer = tiny().trainer()
    create(trainer)
    save(trainer, tmp_path / "ck")
    file = tmp_path / "ck" / "adapter_config.json"
    start = file.read_text().rstrip().removesuffix("}")

    def is_refused(depth: int) -> bool:
        file.write_text(f'{start}, "extra": {"[" * depth}{"]" * depth}}}')
        try:
            reader.content_of(tmp_path / "ck")
        except InvalidInputError as exc:
            return "adapter_config.json cannot be read" in str(exc)
        return False

    edge = bisect_left(range(500_000), True, key=is_refused)
    assert 100 < edge < 500_000
    answers = [is_refused(edge + n) for n in range(-40, 41)]
    assert answers == sorted(answers)
    assert (answers[0], answers[-1]) == (False, True)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_bytes_changed_after_a_save_are_noticed(tiny, tmp_path, name):
    trainer = tiny().trainer()
    create(trainer)
    save(trainer, tmp_path / "ck")
    file = tmp_path / "ck" / name
    content = bytearray(file.read_bytes())
    if name == "adapter_config.json":
        content = content.replace(b'"lora_alpha": 32', b'"lora_alpha": 33')
    else:
        content[-5] ^= 1
    assert content != file.read_bytes()
    file.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"'ck' is damaged") as caught:
        load(trainer, tmp_path / "ck", with_optimizer=False)
    assert str(tmp_path) not in str(caught.value)
