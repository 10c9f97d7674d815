"""Is what was just installed whole? Run by the Python of an otherwise empty environment.

`python smoke.py sdk` expects the SDK alone: no torch, no server. `python smoke.py server` expects
`tinkex[server]` and trains a step on the toy engine, so that everything a wheel must carry besides
code (database migrations, the console, type marks) is used once.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tinkex


def main() -> None:
    folder = Path(tinkex.__file__).parent
    assert "site-packages" in str(folder), f"this is not the installed one: {folder}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["TINKEX_HOME"] = home
        {"sdk": sdk, "server": server}[sys.argv[1]]()
    version = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {version}, {sys.argv[1]}: tinkex {tinkex.__version__} works")


def sdk() -> None:
    assert importlib.util.find_spec("torch") is None, "the SDK alone needs no torch"
    assert importlib.util.find_spec("fastapi") is None, "the SDK alone needs no server"
    assert tinkex.__version__ == importlib.metadata.version("tinkex")
    assert (Path(tinkex.__file__).parent / "py.typed").is_file()
    for name in tinkex.__all__:
        getattr(tinkex, name)
    assert command("--version") == f"tinkex {tinkex.__version__}\n"
    assert "Usage: tinkex train sft" in command("train", "sft", "--help")
    refused = ""
    try:
        tinkex.ServiceClient().get_server_capabilities()
    except tinkex.LocalServerError as exc:
        refused = str(exc)
    assert "[local]" in refused, f"without a server the SDK says what to install, not: {refused}"


def server() -> None:
    os.environ["TINKEX_LOCAL_ENGINE"] = "toy"
    with tinkex.ServiceClient() as service:
        model = service.get_server_capabilities().supported_models[0].model_name
        training = service.create_lora_training_client(base_model=model, rank=4)
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
        )
        losses = []
        for _ in range(3):
            result = training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
            losses.append(result.result().metrics["loss:sum"])
        assert losses[2] < losses[0], losses
        sampler = training.save_weights_and_get_sampling_client()
        params = tinkex.SamplingParams(max_tokens=4)
        answer = sampler.sample(tinkex.ModelInput.from_ints([1, 2]), 1, params).result()
        assert len(answer.sequences[0].tokens) <= 4
    packaged = Path(tinkex.__file__).parent / "server" / "console"
    assert list(packaged.rglob("*.html")), "the console is not in the wheel"


def command(*words: str) -> str:
    tool = Path(sys.executable).with_name("tinkex")
    return subprocess.run([tool, *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
