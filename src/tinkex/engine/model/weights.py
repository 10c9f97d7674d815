"""Read base-model weights, one tensor at a time, under their Hugging Face names.

Three readers share one interface (`names`, `read`): safetensors folders (one file or shards), GGUF
files, and random weights of a given shape for tests and benchmarks. The decoder asks for what it
needs by name, so fusing or widening one matrix never holds a second copy of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tinkex.engine.model.base_model import ModelConfig, ModelSource
from tinkex.engine.model.gguf import GgufFile, unpermute_rope_rows
from tinkex.errors import InvalidInputError


class WeightReader(Protocol):
    def names(self) -> Iterator[str]: ...

    def read(self, name: str) -> Tensor: ...


def open_weights(source: ModelSource) -> WeightReader:
    if source.is_gguf:
        file = GgufFile(source.path)
        return GgufWeights(file, source.config())
    return SafetensorsWeights(source.path)


class SafetensorsWeights:
    """A folder with `model.safetensors`, or shards and their index."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").is_file():
            files = dict.fromkeys(_open(folder / "model.safetensors").keys(), "model.safetensors")
        else:
            raise InvalidInputError(
                f"{folder} has no model.safetensors and no model.safetensors.index.json. "
                "Convert .bin weights with transformers' save_pretrained first."
            )
        self._files = {name: folder / file for name, file in files.items()}
        self._handles: dict[Path, Any] = {}

    def names(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, name: str) -> Tensor:
        path = self._files.get(name)
        if path is None:
            raise InvalidInputError(
                f"the weights hold no tensor {name!r}; are the shards complete?"
            )
        if path not in self._handles:
            self._handles[path] = _open(path)
        tensor: Tensor = self._handles[path].get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


_GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufWeights:
    """A GGUF file under Hugging Face names, with q and k rows in their original order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names = {hf: gguf for gguf in file.tensors if (hf := self._hf_name(gguf)) is not None}

    @staticmethod
    def _hf_name(gguf: str) -> str | None:
        if gguf in _GGUF_TOP:
            return _GGUF_TOP[gguf]
        if not gguf.startswith("blk."):
            return None
        _, layer, rest = gguf.split(".", 2)
        for hf, theirs in _GGUF_NAMES.items():
            if rest == theirs or rest.startswith(theirs + "."):
                return f"model.layers.{layer}.{hf}{rest[len(theirs) :]}"
        return None

    def names(self) -> Iterator[str]:
        return iter(self._names)

    def read(self, name: str) -> Tensor:
        if name not in self._names:
            raise InvalidInputError(f"{self._file.path} holds no tensor for {name!r}")
        values = self._file.read(self._names[name])
        # llama.cpp permutes these rows for its own rope kernel, in llama-type files only.
        if self._config.arch in ("llama", "mistral"):
            if ".q_proj." in name:
                values = unpermute_rope_rows(values, self._config.num_heads)
            elif ".k_proj." in name:
                values = unpermute_rope_rows(values, self._config.num_kv_heads)
        return torch.from_numpy(values.copy() if not values.flags.writeable else values)


class RandomWeights:
    """Plausible random weights of a config's shape; equal seeds give equal weights."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, device: str = "cpu") -> None:
        self._shapes = dict(_shapes(config))
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        return noise * (0.02 if len(shape) == 2 else 0.01)


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config.hidden_size, config.head_size
    q, kv, mlp = config.num_heads * head, config.num_kv_heads * head, config.mlp_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.out_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (head,)
            yield prefix + "self_attn.k_norm.weight", (head,)
        for name, (rows, columns, bias) in linears.items():
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tied_head:
        yield "lm_head.weight", (config.vocab_size, hidden)
