"""Every native family through the whole server, and bad folders refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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


@pytest.mark.timeout(600)
def test_every_family_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", *flags(tmp_path)) as server:
        check(server, sys.executable, "tinkex", tmp_path)


@pytest.mark.peers
@pytest.mark.timeout(900)
def test_every_family_serves_the_official_sdk(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server", *flags(tmp_path)) as server:
        check(server, str(sdk_python("0.36.0")), "tinker", tmp_path)


@pytest.mark.timeout(300)
def test_a_bad_folder_is_refused_by_name_and_the_others_go_on(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    good, bad = tmp_path / "good", tmp_path / "bad"
    make("qwen3_moe", good)
    make("qwen3_moe", bad)
    tensors = load_file(bad / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    options = ["--engine", "torch", "--device", "cpu", "--model", str(bad), "--model", str(good)]
    with ServerProcess(tmp_path / "server", *options) as server:
        from tinkex import ServiceClient

        with ServiceClient(base_url=server.base_url, api_key="tml-x") as service:
            with pytest.raises(Exception, match="experts.3.up_proj"):
                service.create_lora_training_client(str(bad), rank=4)
        (answer,) = play(server, sys.executable, "tinkex", [good])
        assert answer["losses"][-1] < answer["losses"][0]
