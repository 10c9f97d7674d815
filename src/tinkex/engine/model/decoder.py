"""One compact decoder for the Llama family, on flat packed tokens.

The decoder computes everything of a transformer but attention itself, which an `Attend` supplies
together with its masks and caches: the trainer passes whole sequences, the sampler a paged cache,
and both get the same numbers. Tokens of many sequences and tenants lie in one stream; a `LoraBatch`
says whose rows are whose. Base weights are frozen: fp32 on a CPU (bf16 matmuls can kill the process
there), bf16 on CUDA, while adapters and reductions stay fp32.

Shapes: T tokens, D hidden, H query heads, K key/value heads, d head size, V vocabulary, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinkex.engine.lora.adapter import (
    NO_SLOTS,
    Kind,
    LoraBatch,
    Slot,
    Target,
    TargetPart,
    accumulate,
    low_rank_backward,
    low_rank_inner,
)
from tinkex.engine.model.attention import Attend
from tinkex.engine.model.base_model import ModelConfig, ModelSource, RopeConfig, resolve
from tinkex.engine.model.layers import glu_linear, linear, norm_linear, rms_norm, rotate
from tinkex.engine.model.weights import WeightReader, open_weights
from tinkex.errors import ConfigError


class DecoderLike(Protocol):
    """What trainer and sampler need of a model, ours or a foreign one."""

    config: ModelConfig
    targets: Mapping[str, Target]
    uncovered: Mapping[Kind, str]
    """By kind, a weight that can carry no adapter: such a kind is not trained by halves."""
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool
    """Whether no bit of a row's forward depends on the other rows of a pass."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraBatch | None = None,
        *,
        recompute: bool = False,
    ) -> Tensor: ...

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor: ...

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor: ...


@dataclass(slots=True)
class _Layer:
    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


class Decoder:
    """A frozen base model. All methods are functions of their arguments; nothing is kept."""

    batch_invariant = False

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = compute_dtype(self.device, dtype)
        read = _Reader(weights, self.device, self.dtype)
        self.embed_VD = read.one("model.embed_tokens.weight")
        self.layers = [_read_layer(read, config, index) for index in range(config.num_layers)]
        self.final_norm_D = read.one("model.norm.weight")
        self.head_VD = self.embed_VD if config.tied_head else read.one("lm_head.weight")
        self.targets: Mapping[str, Target] = native_targets(config)
        self.uncovered: Mapping[Kind, str] = {}
        self._inv_freq_h = rope_frequencies(config.rope, config.head_size).to(self.device)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraBatch | None = None,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states [T, D] behind the final norm, ready for `head`.

        `recompute` keeps one tensor per layer and redoes the layer in the backward pass.
        """
        x_TD = F.embedding(tokens_T, self.embed_VD)
        cos_Th, sin_Th = self._rope(positions_T)
        for index in range(self.config.num_layers):
            if recompute and torch.is_grad_enabled():
                x_TD = checkpoint(
                    self._layer, index, x_TD, cos_Th, sin_Th, attend, lora, use_reentrant=False
                )
            else:
                x_TD = self._layer(index, x_TD, cos_Th, sin_Th, attend, lora)
        return rms_norm(x_TD, self.final_norm_D, self.config.norm_eps)

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Logits [N, V] in fp32. `lora` spans count rows of `hidden_ND`."""
        return linear(hidden_ND, self.head_VD, None, _slots(lora, "head")).float()

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        """d loss / d hidden from d loss / d logits; adapter gradients go to their `.grad`."""
        dlogits_NV = dlogits_NV.to(self.dtype)
        dhidden_ND = dlogits_NV @ self.head_VD
        if slots := _slots(lora, "head"):
            scaled = low_rank_inner(hidden_ND, slots)
            grads = low_rank_backward(dlogits_NV, hidden_ND, dhidden_ND, slots, scaled)
            accumulate(slots, grads)
        return dhidden_ND

    def matrices(self) -> Iterator[Tensor]:
        """Every weight matrix that a token is multiplied with."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head_VD

    def _rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        angles_Th = positions_T.to(torch.float32)[:, None] * self._inv_freq_h
        return angles_Th.cos().to(self.dtype), angles_Th.sin().to(self.dtype)

    def _layer(
        self,
        index: int,
        x_TD: Tensor,
        cos_Th: Tensor,
        sin_Th: Tensor,
        attend: Attend,
        lora: LoraBatch | None,
    ) -> Tensor:
        config, layer = self.config, self.layers[index]
        eps = config.norm_eps
        slots = _slots(lora, f"{index}.qkv")
        qkv = norm_linear(x_TD, layer.attn_norm, eps, layer.qkv, layer.qkv_bias, slots)
        q, k, v = self._rotated(layer, qkv, cos_Th, sin_Th)
        mixed = attend(index, q, k, v).flatten(1)
        x_TD = linear(mixed, layer.out, layer.out_bias, _slots(lora, f"{index}.o"), x_TD)
        slots = _slots(lora, f"{index}.gate_up")
        gate_up = norm_linear(x_TD, layer.mlp_norm, eps, layer.gate_up, layer.gate_up_bias, slots)
        slots = _slots(lora, f"{index}.down")
        return glu_linear(gate_up, layer.down, layer.down_bias, slots, x_TD)

    def _rotated(
        self, layer: _Layer, qkv: Tensor, cos_Th: Tensor, sin_Th: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads
        if layer.q_norm is None or layer.k_norm is None:
            qkv = rotate(qkv, num_q + num_kv, cos_Th, sin_Th)
        heads_Tnd = qkv.unflatten(1, (-1, config.head_size))
        q_THd, k_TKd, v_TKd = heads_Tnd.split([num_q, num_kv, num_kv], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THd = rotate(rms_norm(q_THd, layer.q_norm, config.norm_eps), num_q, cos_Th, sin_Th)
            k_TKd = rotate(rms_norm(k_TKd, layer.k_norm, config.norm_eps), num_kv, cos_Th, sin_Th)
        return q_THd, k_TKd, v_TKd


def _slots(lora: LoraBatch | None, key: str) -> tuple[Slot, ...]:
    return NO_SLOTS if lora is None else lora.slots(key)


def compute_dtype(device: torch.device, wanted: torch.dtype | None = None) -> torch.dtype:
    """fp32 on a CPU, whatever the checkpoint's type; bf16 on CUDA unless another is asked for."""
    if device.type == "cuda":
        return wanted or torch.bfloat16
    if wanted not in (None, torch.float32, torch.float64):
        raise ConfigError(
            f"dtype {wanted} is not computed on {device.type}: some CPUs end the process at the "
            "first bf16 product. Leave it out; the weights are widened to float32."
        )
    return wanted or torch.float32


def rope_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Radians per token for each pair of a head, stretched as the model's config says."""
    inv_freq_h = 1.0 / rope.theta ** (torch.arange(0, head_size, 2).float() / head_size)
    if rope.kind == "linear":
        return inv_freq_h / rope.factor
    if rope.kind != "llama3":
        return inv_freq_h
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between blended.
    wavelength_h = 2 * math.pi / inv_freq_h
    turns_h = rope.original_max_position / wavelength_h
    blend_h = (turns_h - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_h = blend_h.clamp(0, 1)
    return (1 - blend_h) * inv_freq_h / rope.factor + blend_h * inv_freq_h


# --------------------------------------------------------------------------------------- loading


def native_targets(config: ModelConfig) -> dict[str, Target]:
    """Every linear of our decoder that can carry an adapter, fused the way it is computed."""
    hidden, mlp = config.hidden_size, config.mlp_size
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    targets: dict[str, Target] = {}
    for index in range(config.num_layers):
        attn, ffn = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        targets[f"{index}.qkv"] = _target(hidden, "attn", attn, q_proj=q, k_proj=kv, v_proj=kv)
        targets[f"{index}.o"] = _target(q, "attn", attn, o_proj=hidden)
        targets[f"{index}.gate_up"] = _target(hidden, "mlp", ffn, gate_proj=mlp, up_proj=mlp)
        targets[f"{index}.down"] = _target(mlp, "mlp", ffn, down_proj=hidden)
    head = TargetPart("lm_head", "unembed", 0, config.vocab_size)
    targets["head"] = Target(hidden, (head,))
    return targets


def _target(in_size: int, kind: Kind, prefix: str, **out_sizes: int) -> Target:
    parts, start = [], 0
    for name, size in out_sizes.items():
        parts.append(TargetPart(f"{prefix}.{name}", kind, start, start + size))
        start += size
    return Target(in_size, tuple(parts))


class _Reader:
    """Reads weights and puts them where and in which type the decoder wants them."""

    def __init__(self, weights: WeightReader, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype

    def one(self, name: str) -> Tensor:
        return self._weights.read(name).to(self._device, self._dtype).contiguous()

    def fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor:
        return torch.cat([self.one(f"{prefix}{name}.{suffix}") for name in names])


def _read_layer(read: _Reader, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")

    def bias(names: tuple[str, ...], present: bool) -> Tensor | None:
        return read.fused(prefix, names, "bias") if present else None

    return _Layer(
        attn_norm=read.one(prefix + "input_layernorm.weight"),
        qkv=read.fused(prefix, qkv, "weight"),
        qkv_bias=bias(qkv, config.qkv_bias),
        out=read.one(prefix + "self_attn.o_proj.weight"),
        out_bias=bias(("self_attn.o_proj",), config.out_bias),
        mlp_norm=read.one(prefix + "post_attention_layernorm.weight"),
        gate_up=read.fused(prefix, gate_up, "weight"),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=read.one(prefix + "mlp.down_proj.weight"),
        down_bias=bias(("mlp.down_proj",), config.mlp_bias),
        q_norm=read.one(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=read.one(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
    )


def load_decoder(
    model: str | ModelSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> DecoderLike:
    """Load a base model by name, path or source: our decoder when it can, else transformers'."""
    source = resolve(model) if isinstance(model, str) else model
    config = source.config()
    if not config.native:
        from tinkex.engine.model.foreign import ForeignDecoder

        return ForeignDecoder(source, config, device=device, dtype=dtype)
    return _decoder_class(config, device)(config, open_weights(source), device=device, dtype=dtype)


def _decoder_class(config: ModelConfig, device: torch.device | str) -> type[Decoder]:
    """The fused decoder where it can run: it needs triton, which machines without CUDA lack."""
    if torch.device(device).type != "cuda":
        return Decoder
    from tinkex.engine.cuda.fused import CudaDecoder, can_fuse

    return CudaDecoder if can_fuse(config) else Decoder
