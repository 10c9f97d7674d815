"""Every native family through the whole server, and bad folders refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine" / "families"))
from table import FAMILIES, MIXTURES, make
from venvs import sdk_python


def play(server: ServerProcess, python: str, module: str, models: list[Path]) -> list[dict]:
    command = [python, str(Path(__file__).parent / "family_loop.py"), module, server.base_url]
    done = subprocess.run(
        [*command, *map(str, models)], capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n--- server\n{server.log[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(server: ServerProcess, python: str, module: str, folder: Path) -> None:
    models = [folder / family for family in FAMILIES]
    for family, answer in zip(FAMILIES, play(server, python, module, models), strict=True):
        assert answer["losses"][-1] < answer["losses"][0], family
        assert answer["resumed"][-1] < answer["losses"][0], family
        assert answer["samples"] == [12, 12, 12], family
        assert bool(answer["metrics"]) == (family in MIXTURES), family


def flags(folder: Path, *more: str) -> list[str]:
    """For a server of all families, whose models are made here."""
    for family in FAMILIES:
        make(family, folder / family)
    models = [flag for family in FAMILIES for flag in ("--model", str(folder / family))]
    return ["--engine", "torch", "--device", "cpu", *models, *more]


@pytest.mark.timeout(1200)
def test_every_family_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", *flags(tmp_path)) as server:
        check(server, sys.executable, "tinkex", tmp_path)


@pytest.mark.peers
@pytest.mark.timeout(1200)
def test_every_family_serves_the_official_sdk(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", *flags(tmp_path)) as server:
        check(server, str(sdk_python("0.36.0")), "tinker", tmp_path)


def spoil(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_one(tensors: dict[str, Any]) -> dict[str, Any]:
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    return tensors


def with_a_bent_one(tensors: dict[str, Any]) -> dict[str, Any]:
    name = "model.layers.0.self_attn.q_norm.weight"
    return tensors | {name: tensors[name].repeat(2)}


def with_strange_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(".experts.", ".specialists."): t for name, t in tensors.items()}


@pytest.mark.timeout(1200)
def test_bad_folders_are_refused_by_name_and_size_and_the_others_go_on(tmp_path: Path) -> None:
    kinds = ("good", "missing", "misshapen", "unknown", "huge")
    for kind in kinds:
        make("qwen3_moe", tmp_path / kind)
    spoil(tmp_path / "missing", without_one)
    spoil(tmp_path / "misshapen", with_a_bent_one)
    spoil(tmp_path / "unknown", with_strange_experts)
    config = json.loads((tmp_path / "huge" / "config.json").read_text())
    (tmp_path / "huge" / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}))
    says = {
        "missing": r"holds no tensor 'model.layers.2.mlp.experts.3.up_proj.weight'",
        "misshapen": r"q_norm.weight' has shape \(32,\); config.json asks for \(16,\)",
        "unknown": r"stored in no way that is known here",
        "huge": r"needs [0-9.]+ GB for its weights in float32; cpu has [0-9.]+ GB free",
    }
    models = [flag for kind in kinds for flag in ("--model", str(tmp_path / kind))]
    with ServerProcess(
        tmp_path / "server", "--engine", "torch", "--device", "cpu", *models
    ) as server:
        from tinkex import ServiceClient

        with ServiceClient(base_url=server.base_url, api_key="tml-x") as service:
            for kind, words in says.items():
                with pytest.raises(Exception, match=words):
                    service.create_lora_training_client(str(tmp_path / kind), rank=4)
        (answer,) = play(server, sys.executable, "tinkex", [tmp_path / "good"])
        assert answer["losses"][-1] < answer["losses"][0]
