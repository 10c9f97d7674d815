"""Say what a base model is and find it: config values, resolution of names, loading.

What a model is comes from its `config.json` (`families.py`) or from GGUF metadata. A name resolves
to a folder or file in this order: the bundled default model's own name, a local path, the Hugging
Face cache, the Hugging Face hub; the bundled model stands in for the hub's unquantized one where
that cannot be had. Weights are read by `weights.py`; nothing here touches a tensor.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tinkex.engine.model import default_model
from tinkex.engine.model.families import FAMILIES, config_from_hf
from tinkex.engine.model.gguf import GgufFile
from tinkex.engine.model.shape import ModelConfig, RopeConfig
from tinkex.errors import ModelNotFoundError, NotSupportedError

_GGUF_ARCHS = sorted(arch for arch, family in FAMILIES.items() if family.in_gguf)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of a GGUF file of a native architecture."""
    meta = file.metadata
    arch = str(meta["general.architecture"])
    if arch not in _GGUF_ARCHS:
        raise NotSupportedError(
            f"{file.path} holds a {arch!r} model; GGUF files are read for "
            f"{', '.join(_GGUF_ARCHS)}. Use the safetensors folder of the model instead."
        )
    if (kind := meta.get(f"{arch}.rope.scaling.type", "none")) not in ("none", "linear"):
        raise NotSupportedError(f"{file.path} uses rope scaling {kind!r}, which is not read")
    factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
    if "rope_freqs.weight" in file.tensors:
        raise NotSupportedError(
            f"{file.path} carries llama3 rope factors as a tensor. Use its safetensors folder."
        )
    num_heads = int(meta[f"{arch}.attention.head_count"])
    hidden_size = int(meta[f"{arch}.embedding_length"])
    return ModelConfig(
        arch=arch,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        num_layers=int(meta[f"{arch}.block_count"]),
        num_heads=num_heads,
        num_kv_heads=int(meta.get(f"{arch}.attention.head_count_kv", num_heads)),
        head_size=int(meta.get(f"{arch}.attention.key_length", hidden_size // num_heads)),
        mlp_size=int(meta[f"{arch}.feed_forward_length"]),
        norm_eps=float(f"{meta[f'{arch}.attention.layer_norm_rms_epsilon']:.6g}"),
        rope=RopeConfig(
            theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
            kind="linear" if kind == "linear" else "default",
            factor=factor,
        ),
        max_context_length=int(meta[f"{arch}.context_length"]),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        eos_token_ids=(int(meta["tokenizer.ggml.eos_token_id"]),),
    )


# --------------------------------------------------------------------------------------- finding


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a base model lies: a folder in Hugging Face layout, or one GGUF file."""

    name: str
    path: Path
    note: str = ""
    """What a user should know about these weights."""
    stands_in: bool = False
    """They are other weights than those the name means."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def config(self) -> ModelConfig:
        if self.is_gguf:
            return config_from_gguf(GgufFile(self.path))
        generation = self.path / "generation_config.json"
        return config_from_hf(
            json.loads((self.path / "config.json").read_text()),
            json.loads(generation.read_text()) if generation.exists() else None,
        )


def resolve(name: str, *, allow_fetch: bool = True) -> ModelSource:
    """Find a base model by path or name; fetches it when it is nowhere on this machine.

    Raises:
        ModelNotFoundError: Nothing of that name was found; the message lists what was tried.
    """
    if name == default_model.NAME:
        folder = default_model.folder(allow_fetch=allow_fetch)
        return ModelSource(name, folder, f"{name} is {default_model.NOTE}.")
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(name, path)
    # A folder called like a hub name may be there for its tokenizer alone.
    explicit = path.is_absolute() or name.startswith((".", "~"))
    if (path / "config.json").is_file() and (explicit or any(path.glob("*.safetensors"))):
        return ModelSource(name, path)
    if (snapshot := _in_hf_cache(name)) is not None:
        return ModelSource(name, snapshot)
    if name in default_model.STANDS_FOR:
        return _hub_or_stand_in(name, allow_fetch=allow_fetch)
    if allow_fetch and (snapshot := _from_hub(name)) is not None:
        return ModelSource(name, snapshot)
    raise ModelNotFoundError(
        f"No base model {name!r}: it is neither a local folder with config.json, nor a .gguf file, "
        f"nor in the Hugging Face cache{', nor could the hub give it' if allow_fetch else ''}. "
        f"The default model {default_model.NAME!r} is always available."
    )


_not_on_hub: dict[str, str] = {}
"""Why the hub did not give a model, so that a process asks it once."""


def _hub_or_stand_in(name: str, *, allow_fetch: bool) -> ModelSource:
    """The hub's files of the unquantized default model, else our copy, which says what it is."""
    if allow_fetch and name not in _not_on_hub:
        try:
            if (snapshot := _from_hub(name)) is not None:
                return ModelSource(name, snapshot)
            _not_on_hub[name] = "the hub was not asked"
        except ModelNotFoundError as exc:
            _not_on_hub[name] = _why(exc.__cause__ or exc)[:200]
    note = (
        f"{default_model.NAME} stands in for {name}, whose files could not be had "
        f"({_not_on_hub.get(name, 'the hub was not asked')}): {default_model.NOTE}."
    )
    folder = default_model.folder(allow_fetch=allow_fetch)
    return ModelSource(name, folder, note, stands_in=True)


def require(name: str) -> None:
    """Refuse a name that `resolve` will not find. Fetches nothing: the hub is asked if it has it.

    Raises:
        ModelNotFoundError: It is nowhere; the message lists what was tried.
    """
    if name == default_model.NAME or name in default_model.STANDS_FOR:
        return
    try:
        resolve(name, allow_fetch=False)
    except ModelNotFoundError:
        if not _may_be_on_hub(name):
            raise
        from huggingface_hub import model_info

        try:
            model_info(name, timeout=10)
        except Exception as exc:  # no route, no such repository, gated: it cannot be had
            raise _not_had(name, exc) from exc


def _may_be_on_hub(name: str) -> bool:
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    return not offline and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _not_had(name: str, exc: Exception) -> ModelNotFoundError:
    """The hub fails in many ways; all mean that the model is not here."""
    return ModelNotFoundError(
        f"No base model {name!r}: it is not on this machine, and the Hugging Face hub cannot give "
        f"it ({_why(exc)[:300]}). Check the name and the network, or give the path of a folder "
        "with its files."
    )


def _why(exc: BaseException) -> str:
    """The first line that says something."""
    said = next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
    return said.strip().removeprefix("Got: ").rstrip(". ")


def _hf_cache_dir() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def cached_names() -> list[str]:
    """The hub's models that lie in the Hugging Face cache, whole."""
    found = [folder.name.split("--", 1)[1] for folder in _hf_cache_dir().glob("models--*")]
    names = [name.replace("--", "/", 1) for name in found]
    return sorted(name for name in names if _in_hf_cache(name) is not None)


def _in_hf_cache(name: str) -> Path | None:
    """The newest complete snapshot of `org/model`, without importing huggingface_hub."""
    repo = _hf_cache_dir() / f"models--{name.replace('/', '--')}"
    ref = repo / "refs" / "main"
    if "/" not in name or not ref.is_file():
        return None
    snapshot = repo / "snapshots" / ref.read_text().strip()
    has_weights = any(snapshot.glob("*.safetensors"))
    return snapshot if has_weights and (snapshot / "config.json").is_file() else None


def _from_hub(name: str) -> Path | None:
    if not _may_be_on_hub(name):
        return None
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as exc:  # no route, no such repository, gated
        raise _not_had(name, exc) from exc
