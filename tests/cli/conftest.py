"""A command line run in this process against the toy server, and a run to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from datums import datum

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(toy_server, monkeypatch, capsys, tmp_path) -> Callable[..., Ran]:
    """`cli("run", "list", "--json")` -> exit code, stdout, stderr."""
    from tinkex.cli.app import run
    from tinkex.engine.model.default_model import cache_dir

    # A home of its own for keys and settings, but the machine's store of models.
    monkeypatch.setenv("TINKEX_CACHE", str(cache_dir()))
    monkeypatch.setenv("TINKER_BASE_URL", toy_server)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)

    def call(*args: str) -> Ran:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@dataclass(frozen=True)
class Saved:
    run_id: str
    session_id: str
    state_path: str
    sampler_path: str


@pytest.fixture
def saved(toy_server) -> Saved:
    """A fresh run with one training and one sampler checkpoint."""
    from tinkex import AdamParams, ServiceClient

    with ServiceClient(base_url=toy_server, user_metadata={"made": "by-a-test"}) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=0)
        training.forward_backward([datum([1, 5, 9, 2])], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
        state = training.save_state("one", user_metadata={"note": "first"}).result().path
        sampler = training.save_weights_for_sampler("one").result().path
    return Saved(training.model_id, training.model_id.split(":")[0], state, sampler)
