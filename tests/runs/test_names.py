"""Runs are called by name or folder, and what is no run is told apart."""

from __future__ import annotations

import json

import pytest

from tinkex.errors import ConfigError, ModelNotFoundError
from tinkex.runs import names


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    folder = tmp_path / "runs" / "pirate"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"log_dir": "x", "model": "m", "beta": 0.1}))
    return folder


def save(folder, step: int) -> None:
    line = {"step": step, "state_path": f"tinker://r/weights/{step}", "sampler_path": "tinker://s"}
    with (folder / "checkpoints.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def test_a_run_is_found_by_name_and_by_folder(run_folder):
    names.remember("pirate", run_folder)
    with pytest.raises(ModelNotFoundError, match="has no checkpoint yet"):
        names.find_path("pirate")
    save(run_folder, 1)
    save(run_folder, 2)
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    for what in ("pirate", str(run_folder)):
        assert names.find_path(what) == "tinker://s"
        assert names.find_path(what, for_training=True) == "tinker://r/weights/2"
    (run,) = names.known()
    assert (run.name, run.recipe, run.step, run.loss) == ("pirate", "dpo", 2, 0.5)


def test_what_is_no_run_is_left_to_others(run_folder, tmp_path):
    assert names.find_path("tinker://a/weights/b") == "tinker://a/weights/b"
    assert names.find_path("Qwen/Qwen3-0.6B") is None
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert names.find_path(str(model)) is None


def test_a_name_belongs_to_one_run(run_folder, tmp_path):
    names.remember("pirate", run_folder)
    names.remember("pirate", run_folder)
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match="another run is called 'pirate'"):
        names.remember("pirate", other)
    for bad in ("", "a b", "../x", "x" * 65):
        with pytest.raises(ConfigError, match="no name for a run"):
            names.remember(bad, other)
    run_folder.rename(tmp_path / "gone")
    names.remember("pirate", other)  # the folder is gone, and its name is free
