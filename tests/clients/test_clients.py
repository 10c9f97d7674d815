"""Real clients of other APIs, as released, against a real server on the default model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from client_venvs import PACKAGES, client_python

KEY = "tml-client"
IN_EVERY_RUN = ("openai", "anthropic")


@pytest.fixture(scope="module")
def served(
    start_server, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("clients")
    model = str(default_model_dir)
    flags = ("--model", model, "--api-key", f"{KEY}=ann", "--deterministic")
    with start_server(folder, *flags) as base_url:
        yield SimpleNamespace(base_url=base_url, model=model)


def run(name: str, served: SimpleNamespace) -> dict[str, Any]:
    script = str(Path(__file__).parent / "scenarios.py")
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPENAI_API_KEY")}
    done = subprocess.run(
        [str(client_python(name)), script, name, served.base_url, served.model],
        capture_output=True,
        text=True,
        timeout=900,
        env={**env, "HF_HUB_OFFLINE": "1", "TINKEX_API_KEY": KEY},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow)
        for name in PACKAGES
        if name != "lm-eval"
    ],
)
def test_a_client_works_as_released(name: str, served: SimpleNamespace):
    assert run(name, served)["version"]


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lm_eval_measures_what_compute_logprobs_says(served: SimpleNamespace):
    from tokenizers import Tokenizer

    import tinkex

    found = run("lm-eval", served)["loglikelihoods"]
    tokenizer = Tokenizer.from_file(str(Path(served.model) / "tokenizer.json"))
    service = tinkex.ServiceClient(base_url=served.base_url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=served.model)
    pairs = [("The capital of France is", " Paris"), ("Two plus two is", " four")]
    for (context, answer), measured in zip(pairs, found, strict=True):
        tokens = tokenizer.encode(context + answer).ids
        scores = sampler.compute_logprobs(tinkex.ModelInput.from_ints(tokens)).result()
        num_new = len(tokens) - len(tokenizer.encode(context).ids)
        assert abs(sum(scores[-num_new:]) - measured) < 1e-5
