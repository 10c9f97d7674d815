"""Real clients of other APIs, as released, against a real server on the default model.

`TINKEX_CLIENTS_TABLE=1` rewrites the table of docs/openai.md with what was run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import scenarios
from client_venvs import PACKAGES, client_python

KEY = scenarios.KEY
IN_EVERY_RUN = ("openai", "anthropic")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"


@pytest.fixture(scope="module")
def served(
    start_server, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("clients")
    model = str(default_model_dir)
    flags = ("--model", model, "--api-key", f"{KEY}=ann", "--deterministic")
    with start_server(folder, *flags) as base_url:
        yield SimpleNamespace(base_url=base_url, model=model, caller=caller(base_url, model))


def caller(base_url: str, model: str) -> str:
    """A checkpoint that learned to answer one question with one call of a tool."""
    import tinkex

    body = {
        "model": model,
        "messages": scenarios.WEATHER_ASK,
        "tools": [{"type": "function", "function": scenarios.TOOL}],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = httpx.post(
        f"{base_url}/v1/chat/completions", json=body, headers=headers, timeout=300
    ).json()["prompt_token_ids"]
    with tinkex.ServiceClient(base_url=base_url, api_key=KEY) as service:
        training = service.create_lora_training_client(base_model=model, rank=8, seed=0)
        calls = json.dumps([{"name": "weather", "arguments": scenarios.CITY}])
        words = f"<tool_call>\n{calls}\n</tool_call><|im_end|>"
        said = training.get_tokenizer().encode(words)
        tokens = [*asked, *said]
        weights = [0.0] * (len(asked) - 1) + [1.0] * len(said)
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )
        for _ in range(40):
            result = training.forward_backward([datum], "cross_entropy").result()
            if min(result.loss_fn_outputs[0]["logprobs"].tolist()[-len(said) :]) > -0.1:
                break
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
        return str(training.save_weights_for_sampler("caller").result().path)


def run(name: str, served: SimpleNamespace) -> dict[str, Any]:
    script = str(Path(__file__).parent / "scenarios.py")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    keys = {"TINKEX_API_KEY": KEY, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(client_python(name)), script, name, served.base_url, served.model, served.caller],
        capture_output=True,
        text=True,
        timeout=900,
        env=env | keys,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if os.environ.get("TINKEX_CLIENTS_TABLE"):
        write_row(name, found)
    return found


def write_row(name: str, found: dict[str, Any]) -> None:
    order = [packages[0].partition("[")[0] for packages in PACKAGES.values()]
    package = order[list(PACKAGES).index(name)]
    row = f"| `{package}` {found['version']} | {found['tried']} |"
    head, begin, table, end, tail = re.split(
        r"(<!-- clients:begin -->\n|<!-- clients:end -->)", PAGE.read_text()
    )
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    rows[package] = row
    about = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}"
    lines = [f"{about}, `make test-clients`", "", "| client | tried |", "| --- | --- |"]
    lines += [rows[one] for one in order if one in rows]
    PAGE.write_text(head + begin + "\n".join([*lines, ""]) + end + tail)


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

    measured = run("lm-eval", served)["measured"]
    tokenizer = Tokenizer.from_file(str(Path(served.model) / "tokenizer.json"))
    with tinkex.ServiceClient(base_url=served.base_url, api_key=KEY) as service:
        sampler = service.create_sampling_client(base_model=served.model)
        for one in measured:
            tokens = tokenizer.encode(one["context"] + one["answer"]).ids
            scores = sampler.compute_logprobs(tinkex.ModelInput.from_ints(tokens)).result()
            num_new = len(tokens) - len(tokenizer.encode(one["context"]).ids)
            assert abs(sum(scores[-num_new:]) - one["loglikelihood"]) < 1e-5, one
