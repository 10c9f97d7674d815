"""An exported adapter names a base that other programs can load."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tinkex.cli.app import run as run_cli
from tinkex.contract.models import DEFAULT_MODEL
from tinkex.export.adapter_base import name_base, trained_on

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def config_of(adapter):
    return json.loads((adapter / "adapter_config.json").read_text())


def adapter_naming(folder, name):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    (folder / "tinkex.json").write_text(json.dumps({"base_fingerprint": "f"}))
    return folder


def test_auto_peft_opens_an_adapter_of_the_default_model(default_model_dir, tmp_path):
    """M10: it asked the hub for `tinkex/...`, which the hub does not have."""
    base = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    named = {**config_of(tmp_path / "adapter"), "base_model_name_or_path": DEFAULT_MODEL}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(named))

    assert name_base(tmp_path / "adapter") == default_model_dir
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapter", local_files_only=True
    )
    assert sum(parameter.numel() for parameter in opened.parameters()) > 134e6
    assert trained_on(tmp_path / "adapter") == DEFAULT_MODEL


def test_the_servers_name_stays_beside_the_folder(default_model_dir, tmp_path):
    adapter = adapter_naming(tmp_path / "adapter", DEFAULT_MODEL)
    name_base(adapter)
    assert config_of(adapter) == {"base_model_name_or_path": str(default_model_dir)}
    assert json.loads((adapter / "tinkex.json").read_text()) == {
        "base_fingerprint": "f",
        "base_model": DEFAULT_MODEL,
    }


def test_a_base_that_is_not_here_is_named_as_before(tmp_path):
    adapter = adapter_naming(tmp_path / "adapter", "acme/no-such-model")
    assert name_base(adapter) is None
    assert config_of(adapter) == {"base_model_name_or_path": "acme/no-such-model"}
    assert trained_on(adapter) is None


def test_a_model_of_the_hub_keeps_its_name(tmp_path, monkeypatch):
    """Its name loads everywhere; a folder of the cache does only here."""
    snapshots = tmp_path / "hub" / "models--acme--real" / "snapshots" / "abc"
    snapshots.mkdir(parents=True)
    (snapshots / "config.json").write_text("{}")
    (snapshots / "model.safetensors").write_text("")
    refs = tmp_path / "hub" / "models--acme--real" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter = adapter_naming(tmp_path / "adapter", "acme/real")
    folder = name_base(adapter)
    assert folder == snapshots
    assert config_of(adapter) == {"base_model_name_or_path": "acme/real"}


def test_model_path_prints_the_folder_and_nothing_else(default_model_dir, capsys):
    assert run_cli(["model", "path", DEFAULT_MODEL]) == 0
    assert capsys.readouterr().out == f"{default_model_dir}\n"
    assert run_cli(["model", "path", "acme/no-such-model"]) == 1
    assert "tinkex pull acme/no-such-model" in capsys.readouterr().err
