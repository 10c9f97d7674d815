"""Read base-model weights, one tensor at a time, under their Hugging Face names.

Three readers share one interface (`names`, `read`): safetensors folders (one file or shards, in the
ways of `published.py`), GGUF files, and random weights of a given shape for tests and benchmarks.
The decoder asks for what it needs by name, so fusing or widening one matrix never holds a second
copy of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.gguf import GgufFile, unpermute_rope_rows
from tinkex.engine.model.published import PublishedWeights, text_names
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.numerics.mxfp4 import PackedExperts
from tinkex.errors import InvalidInputError


class WeightReader(Protocol):
    def names(self) -> Iterator[str]: ...

    def read(self, name: str) -> Tensor: ...

    @property
    def in_mxfp4(self) -> bool:
        """Whether the experts are stored in 4 bits."""
        return False

    def packed(self, name: str, dtype: torch.dtype) -> PackedExperts | None:
        """The experts of one linear in 4 bits; None: they are stored otherwise."""
        return None


def open_weights(source: ModelSource, config: ModelConfig | None = None) -> WeightReader:
    config = config or source.config()
    if source.is_gguf:
        return GgufWeights(GgufFile(source.path), config)
    files = SafetensorsWeights(source.path)
    return PublishedWeights(text_names(files.names()), files.read, config, source.name)


class SafetensorsWeights(WeightReader):
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

    def missing_files(self) -> list[str]:
        """Shards that the index names and the folder lacks."""
        return sorted({path.name for path in self._files.values() if not path.is_file()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Read from the header alone."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _handle(self, name: str) -> Any:
        path = self._files.get(name)
        if path is None:
            raise InvalidInputError(
                f"the weights hold no tensor {name!r}; are the shards complete?"
            )
        if not path.is_file():
            raise InvalidInputError(
                f"{path.name} is missing in {path.parent}; the index names it for {name!r}"
            )
        if path not in self._handles:
            self._handles[path] = _open(path)
        return self._handles[path]


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


class GgufWeights(WeightReader):
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


class RandomWeights(WeightReader):
    """Plausible random weights of a config's shape; equal seeds give equal weights."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, device: str = "cpu") -> None:
        self._shapes = dict(expected_shapes(config))
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._norm_offset = config.norm_offset

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(("norm.weight", "A_log", "dt_bias")):
            # Weights stored as their distance from one are small; all others are near one.
            fill = 0.0 if self._norm_offset and "linear_attn" not in name else 1.0
            return torch.full(shape, fill, device=self._device)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        return noise * (0.01 if len(shape) == 1 else 0.02)


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a native model, under our names; the experts of a block are one tensor."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        parts = (
            _delta_shapes(config) if config.has_delta(index) else _attention_shapes(config),
            _mixture_shapes(config) if config.has_experts(index) else _mlp_shapes(config),
        )
        for part in parts:
            for name, shape in part:
                yield prefix + name, shape
    yield "model.norm.weight", (hidden,)
    if not config.tied_head:
        yield "lm_head.weight", (config.vocab_size, hidden)


_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _linear(name: str, rows: int, columns: int, bias: bool) -> _Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention_shapes(config: ModelConfig) -> _Shapes:
    hidden, head = config.hidden_size, config.head_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    gated = q * (1 + config.attn_gate)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (q if config.wide_qk_norm else head,)
        yield "self_attn.k_norm.weight", (kv if config.wide_qk_norm else head,)
    if config.sinks:
        yield "self_attn.sinks", (config.num_heads,)
    yield from _linear("self_attn.q_proj", gated, hidden, config.qkv_bias)
    yield from _linear("self_attn.k_proj", kv, hidden, config.qkv_bias)
    yield from _linear("self_attn.v_proj", kv, hidden, config.qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, q, config.out_bias)


def _delta_shapes(config: ModelConfig) -> _Shapes:
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    yield "linear_attn.conv1d.weight", (delta.channels, 1, delta.conv_width)
    yield "linear_attn.A_log", (delta.value_heads,)
    yield "linear_attn.dt_bias", (delta.value_heads,)
    yield "linear_attn.norm.weight", (delta.value_size,)
    for name, rows in delta.linears.items():
        yield from _linear(f"linear_attn.{name}", rows, hidden, False)
    yield from _linear("linear_attn.out_proj", hidden, delta.values, False)


def _mlp_shapes(config: ModelConfig) -> _Shapes:
    hidden, size, bias = config.hidden_size, config.mlp_size, config.mlp_bias
    yield from _linear("mlp.gate_proj", size, hidden, bias)
    yield from _linear("mlp.up_proj", size, hidden, bias)
    yield from _linear("mlp.down_proj", hidden, size, bias)


def _mixture_shapes(config: ModelConfig) -> _Shapes:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    yield from _linear("mlp.gate", experts.count, hidden, experts.biased)
    yield "mlp.experts.gate_up_proj", (experts.count, 2 * experts.size, hidden)
    yield "mlp.experts.down_proj", (experts.count, hidden, experts.size)
    if experts.biased:
        yield "mlp.experts.gate_up_proj_bias", (experts.count, 2 * experts.size)
        yield "mlp.experts.down_proj_bias", (experts.count, hidden)
    if size := experts.shared_size:
        yield from _linear("mlp.shared_expert.gate_proj", size, hidden, False)
        yield from _linear("mlp.shared_expert.up_proj", size, hidden, False)
        yield from _linear("mlp.shared_expert.down_proj", hidden, size, False)
        yield "mlp.shared_expert_gate.weight", (1, hidden)
