"""A checkpoint is used on the weights it was trained on, or refused; formats do not matter."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import create, save

from tinkex.engine.checkpoint import reader as checkpoint
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import LoadAdapterJob
from tinkex.engine.model import base_model, default_model
from tinkex.engine.model.base_model import resolve
from tinkex.engine.model.fingerprint import Base, fingerprint, witness_of
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import WrongBaseError
from tinkex.export.merge import merge_adapter

HUB_NAME = default_model.STANDS_FOR[0]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TINKEX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bases(tiny, tmp_path):
    """Two copies of one model; a single number of the second is another."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        shutil.copytree(tiny().folder, folder)
    tensors = load_file(two / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    return one, two


def trainer_on(folder, **options) -> Trainer:
    source = resolve(str(folder))
    witness = witness_of(source)
    decoder = load_decoder(source, weights=witness)
    base = Base(folder.name, fingerprint(source, witness), **options)
    return Trainer(decoder, base_model=str(folder), base=base)


def load(trainer, folder) -> None:
    trainer.load(
        LoadAdapterJob(
            job_id="", adapter_id="b", base_model="x", folder=str(folder), with_optimizer=False
        )
    )


def test_shards_and_number_types_of_the_same_numbers_have_one_fingerprint(bases, tmp_path):
    one, two = bases
    tensors = load_file(one / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    kinds = {"bf16": rounded, "widened": {k: v.float() for k, v in rounded.items()}}
    found = {}
    for kind, stored in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()
        shutil.copy(one / "config.json", folder)
        names = sorted(stored)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in shards.items():
            save_file({name: stored[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        found[kind] = fingerprint(resolve(str(folder)))
    assert found["bf16"] == found["widened"]
    assert len({found["bf16"], fingerprint(resolve(str(one))), fingerprint(resolve(str(two)))}) == 3


def test_a_model_that_was_loaded_and_one_that_is_only_read_agree(bases, tmp_path, monkeypatch):
    one, _ = bases
    loaded = trainer_on(one).base.fingerprint
    monkeypatch.setenv("TINKEX_CACHE", str(tmp_path / "another"))
    assert fingerprint(resolve(str(one))) == loaded


def test_a_kept_fingerprint_is_forgotten_when_a_file_changes(bases):
    one, two = bases
    before = fingerprint(resolve(str(one)))
    shutil.copy(two / "model.safetensors", one / "model.safetensors")
    assert fingerprint(resolve(str(one))) == fingerprint(resolve(str(two))) != before


def test_loading_says_how_far_it_is(bases, monkeypatch):
    monkeypatch.setattr("tinkex.engine.model.fingerprint.TELL_EVERY_S", 0.0)
    told = []
    source = resolve(str(bases[0]))
    load_decoder(source, weights=witness_of(source, told.append))
    assert told == sorted(set(told))
    assert len(told) > 2
    assert told[-1] > 90


def test_loading_sampling_and_merging_on_another_base_are_refused_with_both(bases, tmp_path):
    one, two = bases
    first, second = trainer_on(one), trainer_on(two)
    create(first)
    folder = save(first, tmp_path / "saved")
    load(first, folder)
    merge_adapter(folder, tmp_path / "fits", one)
    ours, theirs = first.base.fingerprint, second.base.fingerprint
    with pytest.raises(WrongBaseError, match=f"{ours}.*{theirs}.*--any-base"):
        load(second, folder)
    targets = second.decoder.targets
    with pytest.raises(WrongBaseError, match=f"{ours}.*{theirs}"):
        checkpoint.read(folder, targets, "cpu", with_optimizer=False, base=second.base)
    with pytest.raises(WrongBaseError, match=f"{ours}.*{theirs}.*--any-base"):
        merge_adapter(folder, tmp_path / "merged", two)
    assert not (tmp_path / "merged").exists()


def test_forcing_it_works_and_is_said(bases, tmp_path, caplog):
    one, two = bases
    first = trainer_on(one)
    create(first)
    folder = save(first, tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        load(trainer_on(two, any_base=True), folder)
        merge_adapter(folder, tmp_path / "merged", two, any_base=True)
    assert caplog.text.count("used all the same") == 2
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_a_checkpoint_from_before_fingerprints_loads_with_a_warning(bases, tmp_path, caplog):
    trainer = trainer_on(bases[0])
    create(trainer)
    folder = save(trainer, tmp_path / "saved")
    manifest = json.loads((folder / "tinkex.json").read_text())
    del manifest["base_fingerprint"]
    (folder / "tinkex.json").write_text(json.dumps(manifest))
    with caplog.at_level(logging.WARNING):
        load(trainer, folder)
    assert "unchecked" in caplog.text


# ------------------------------------------------------------------------------ the default model


@pytest.fixture
def hub_cache(monkeypatch, tmp_path, default_model_dir):
    """No network, an empty Hugging Face cache, and the default model where it always is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(base_model, "_not_on_hub", {})
    monkeypatch.setattr(default_model, "folder", lambda **_: default_model_dir)
    return tmp_path / "hub"


def test_the_default_model_says_what_it_is(hub_cache, default_model_dir):
    source = resolve(default_model.NAME)
    assert source.path == default_model_dir
    assert "4-bit" in source.note
    assert not source.stands_in


def test_the_hubs_name_stands_for_it_only_until_the_hubs_files_are_there(
    hub_cache, default_model_dir, bases
):
    """What appears in a cache changes what the hub's name means, never what ours does."""
    before = resolve(HUB_NAME)
    assert (before.path, before.stands_in) == (default_model_dir, True)
    assert "stands in" in before.note
    assert default_model.NAME in before.note
    repo = hub_cache / f"models--{HUB_NAME.replace('/', '--')}"
    shutil.copytree(bases[0], repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    after = resolve(HUB_NAME)
    assert (after.path.name, after.note, after.stands_in) == ("abc", "", False)
    assert resolve(default_model.NAME).path == default_model_dir


def test_values_of_every_tensor_count(tiny, tmp_path):
    """A change of any one tensor, however small the rest of the model, is noticed."""
    source = tiny().folder
    found = {fingerprint(resolve(str(source)))}
    tensors = load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        changed = {**tensors, name: torch.nextafter(tensors[name], torch.tensor(9.0))}
        save_file(changed, folder / "model.safetensors")
        found.add(fingerprint(resolve(str(folder))))
    assert len(found) == 1 + len(tensors)
