"""SkyRL tx, a server of another hand (JAX), over a Qwen3 of two layers that is made here.

It starts its engine by `uv run ... -m MODULE`; a script of that name runs the module with the same
interpreter instead, which is what `uv` would do after an installation of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import Running, stop

from tinkex.engine.model import default_model

START_TIMEOUT_S = 300
VOCABULARY = 49152  # of the tokenizer, which it loads for the token that ends a text


def make_model(folder: Path) -> None:
    """Random weights of the smallest shape that its Qwen3 takes, and a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    # It reads configurations as transformers 4 wrote them.
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 10000.0}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model.folder() / name, folder / name)


@contextmanager
def serving_skyrl(python: Path, folder: Path) -> Iterator[Running]:
    """Its server over a model in `folder`, for as long as the block runs."""
    make_model(folder / "model")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    log, shims = folder / "skyrl.log", folder / "bin"
    shims.mkdir()
    shim = shims / "uv"
    shim.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {python} "$@"\n')
    shim.chmod(0o755)
    command = [str(python), "-m", "tx.tinker.api", "--base-model", str(folder / "model")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-config", '{"max_lora_adapters": 4, "max_lora_rank": 8}']
    command += ["--checkpoints-base", str(folder / "checkpoints")]
    command += ["--database-url", f"sqlite:///{folder / 'tx.db'}"]
    path = f"{shims}:{python.parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True)
    try:
        base_url = f"http://127.0.0.1:{port}"
        _wait(process, base_url, log)
        yield Running(base_url, process.pid, log)
    finally:
        stop(process)


def _wait(process: subprocess.Popen[str], base_url: str, log: Path) -> None:
    for _ in range(START_TIMEOUT_S):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{base_url}/api/v1/healthz", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"SkyRL tx did not start:\n{log.read_text()[-3000:]}")
