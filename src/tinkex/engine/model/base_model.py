"""Say what a base model is and find it: config values, resolution of names, loading.

`ModelConfig` holds everything the decoder needs to know, whether it came from a Hugging Face
`config.json` or from GGUF metadata. A name resolves to a folder or file in this order: a local
path, the Hugging Face cache, the bundled default model, the Hugging Face hub. Weights are read by
`weights.py`; nothing here touches a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.model import default_model
from tinkex.engine.model.gguf import GgufFile
from tinkex.errors import ModelNotFoundError, NotSupportedError

NATIVE_ARCHS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types that our packed decoder computes itself; SmolLM2 is a `llama`."""
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base, and how it is stretched for longer contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_TYPES:
            raise NotSupportedError(
                f"rope scaling {self.kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of one causal language model."""

    arch: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    norm_eps: float
    rope: RopeConfig
    max_context_length: int
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Per layer: the attention window in tokens, None for full causal. Empty: full everywhere."""
    eos_token_ids: tuple[int, ...] = ()
    native: bool = True
    """False: the transformers implementation runs this model behind the same interface."""

    def window(self, layer_index: int) -> int | None:
        return self.windows[layer_index] if self.windows else None


# --------------------------------------------------------------------------------- from HF configs


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a `config.json` (transformers 4 or 5 spelling), with the end tokens of generation."""
    raw = raw.get("text_config") or raw
    arch = str(raw.get("model_type", "unknown"))
    num_heads = int(raw.get("num_attention_heads") or raw.get("n_head") or 0)
    hidden_size = int(raw.get("hidden_size") or raw.get("n_embd") or 0)
    num_layers = int(raw.get("num_hidden_layers") or raw.get("n_layer") or 0)
    if not (num_heads and hidden_size and num_layers and raw.get("vocab_size")):
        raise NotSupportedError(
            f"model type {arch!r} is not supported: its config.json names no hidden size, layers, "
            "attention heads or vocabulary"
        )
    attention_bias = bool(raw.get("attention_bias", False))
    native = arch in NATIVE_ARCHS and _is_plain(raw)
    return ModelConfig(
        arch=arch,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_size=int(raw.get("head_dim") or hidden_size // num_heads),
        mlp_size=int(raw.get("intermediate_size") or 4 * hidden_size),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope_from_hf(raw) if native else RopeConfig(),
        max_context_length=int(
            raw.get("max_position_embeddings") or raw.get("n_positions") or 2048
        ),
        tied_head=bool(raw.get("tie_word_embeddings", arch not in NATIVE_ARCHS)),
        qkv_bias=arch == "qwen2" or attention_bias,
        out_bias=attention_bias and arch in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=arch == "qwen3",
        windows=_windows_from_hf(raw, arch, num_layers),
        eos_token_ids=_eos_ids(raw, generation or {}),
        native=native,
    )


def _is_plain(raw: Mapping[str, Any]) -> bool:
    """True when nothing in the config leaves the arithmetic of our decoder."""
    rope = raw.get("rope_parameters") or {}
    partial = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    return raw.get("hidden_act", "silu") == "silu" and float(partial) == 1.0


def _rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(scaling.get("original_max_position_embeddings") or 8192),
    )


def _windows_from_hf(raw: Mapping[str, Any], arch: str, num_layers: int) -> tuple[int | None, ...]:
    # The defaults of absent keys are those of transformers.
    window = raw.get("sliding_window", 4096 if arch in NATIVE_ARCHS - {"llama"} else None)
    if window is None or not raw.get("use_sliding_window", arch not in ("qwen2", "qwen3")):
        return ()
    if layer_types := raw.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    first = int(raw.get("max_window_layers", 28)) if arch in ("qwen2", "qwen3") else 0
    return tuple(int(window) if index >= first else None for index in range(num_layers))


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of a GGUF file of a native architecture."""
    meta = file.metadata
    arch = str(meta["general.architecture"])
    if arch not in NATIVE_ARCHS:
        raise NotSupportedError(
            f"{file.path} holds a {arch!r} model; GGUF files are read for "
            f"{', '.join(sorted(NATIVE_ARCHS))}. Use the safetensors folder of the model instead."
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
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(name, path)
    # A folder called like a hub name may be there for its tokenizer alone.
    explicit = path.is_absolute() or name.startswith((".", "~"))
    if (path / "config.json").is_file() and (explicit or any(path.glob("*.safetensors"))):
        return ModelSource(name, path)
    if (snapshot := _in_hf_cache(name)) is not None:
        return ModelSource(name, snapshot)
    if name in default_model.NAMES:
        return ModelSource(name, default_model.folder(allow_fetch=allow_fetch))
    if allow_fetch and (snapshot := _from_hub(name)) is not None:
        return ModelSource(name, snapshot)
    raise ModelNotFoundError(
        f"No base model {name!r}: it is neither a local folder with config.json, nor a .gguf file, "
        f"nor in the Hugging Face cache{', nor could the hub give it' if allow_fetch else ''}. "
        f"The default model {default_model.NAMES[0]!r} is always available."
    )


def _hf_cache_dir() -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


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
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes")
    if offline or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as exc:
        # The hub fails in many ways (no route, no such repository, gated); all mean "not here".
        raise ModelNotFoundError(
            f"No base model {name!r}: not on this machine, and the Hugging Face hub answered: {exc}"
        ) from exc
