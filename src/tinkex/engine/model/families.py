"""The model families that our decoder computes itself, and how their `config.json` is read.

One row a family: what its config leaves unsaid, and what it has beyond Llama. Every other causal
model of transformers runs through `foreign.py`, or is refused there by name. `tinkex model list`,
the docs and the tests walk this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkex.engine.model.shape import DeltaConfig, ExpertsConfig, ModelConfig, RopeConfig
from tinkex.errors import NotSupportedError

Raw = Mapping[str, Any]
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A `model_type`, under which many models are published."""

    arch: str
    says: str
    """Well-known models of the family."""
    fields: Callable[[Raw], Fields]
    """What of `ModelConfig` it sets beyond Llama's fields."""
    in_gguf: bool = False
    """GGUF files of the family are read too."""


# ------------------------------------------------------------------------------------------- parts


def _num_layers(raw: Raw) -> int:
    return int(raw.get("num_hidden_layers") or raw.get("n_layer") or 0)


def _attention_bias(raw: Raw) -> bool:
    return bool(raw.get("attention_bias", False))


def _everywhere(raw: Raw, window: int | None) -> tuple[int | None, ...]:
    return () if window is None else (int(window),) * _num_layers(raw)


def _by_layer_types(raw: Raw, window: int) -> tuple[int | None, ...]:
    kinds = raw["layer_types"]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    """Off unless asked for; then in the layers named, or from `max_window_layers` on."""
    window = raw.get("sliding_window", 4096)
    if window is None or not raw.get("use_sliding_window", False):
        return ()
    if raw.get("layer_types"):
        return _by_layer_types(raw, int(window))
    first = int(raw.get("max_window_layers", 28))
    return tuple(int(window) if index >= first else None for index in range(_num_layers(raw)))


def _mixture(raw: Raw, **options: Any) -> ExpertsConfig:
    count = raw.get("num_experts") or raw.get("num_local_experts")
    size = raw.get("moe_intermediate_size") or raw.get("intermediate_size")
    per_token = raw.get("num_experts_per_tok")
    if not (count and size and per_token):
        raise NotSupportedError(
            "the config.json of this mixture does not say how many experts it has, how wide they "
            "are, or how many a token passes"
        )
    return ExpertsConfig(count=int(count), per_token=int(per_token), size=int(size), **options)


# ------------------------------------------------------------------------------------------ fields


def _llama(raw: Raw) -> Fields:
    return {"out_bias": _attention_bias(raw)}


def _mistral(raw: Raw) -> Fields:
    return {"windows": _everywhere(raw, raw.get("sliding_window", 4096))}


def _qwen2(raw: Raw) -> Fields:
    return {"qkv_bias": True, "windows": _qwen_windows(raw)}


def _qwen3(raw: Raw) -> Fields:
    return {"out_bias": _attention_bias(raw), "qk_norm": True, "windows": _qwen_windows(raw)}


def _qwen3_moe(raw: Raw) -> Fields:
    step = int(raw.get("decoder_sparse_step") or 1)
    only = set(raw.get("mlp_only_layers") or ())
    dense = [i for i in range(_num_layers(raw)) if i in only or (i + 1) % step]
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    return {
        "out_bias": _attention_bias(raw),
        "qk_norm": True,
        "windows": _everywhere(raw, window),
        "experts": _mixture(raw, normalised=bool(raw.get("norm_topk_prob", False))),
        "dense_layers": tuple(dense),
    }


def _mixtral(raw: Raw) -> Fields:
    return {"windows": _everywhere(raw, raw.get("sliding_window")), "experts": _mixture(raw)}


def _olmoe(raw: Raw) -> Fields:
    clip = raw.get("clip_qkv")
    return {
        "out_bias": _attention_bias(raw),
        "qk_norm": True,
        "wide_qk_norm": True,
        "qkv_clip": None if clip is None else float(clip),
        "experts": _mixture(raw, normalised=bool(raw.get("norm_topk_prob", False))),
    }


def _qwen3_5(raw: Raw) -> Fields:
    every = int(raw.get("full_attention_interval") or 4)
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention"
        for i in range(_num_layers(raw))
    ]
    head = int(raw.get("head_dim") or 256)
    share: Any = _scaling(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    return {
        "out_bias": _attention_bias(raw),
        "head_size": head,
        "qk_norm": True,
        "attn_gate": True,
        "norm_offset": True,
        "rotary_size": int(head * float(share)),
        "delta": DeltaConfig(
            key_heads=int(raw.get("linear_num_key_heads", 16)),
            value_heads=int(raw.get("linear_num_value_heads", 32)),
            key_size=int(raw.get("linear_key_head_dim", 128)),
            value_size=int(raw.get("linear_value_head_dim", 128)),
            conv_width=int(raw.get("linear_conv_kernel_dim", 4)),
        ),
        "delta_layers": tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
    }


def _qwen3_5_moe(raw: Raw) -> Fields:
    shared = int(raw.get("shared_expert_intermediate_size") or 512)
    return {**_qwen3_5(raw), "experts": _mixture(raw, shared_size=shared)}


def _qwen3_next(raw: Raw) -> Fields:
    hybrid, mixture = _qwen3_5(raw), _qwen3_moe(raw)
    shared = int(raw.get("shared_expert_intermediate_size") or 512)
    normalised = bool(raw.get("norm_topk_prob", True))
    return {
        **hybrid,
        "delta": replace(hybrid["delta"], by_head=True),
        "experts": _mixture(raw, shared_size=shared, normalised=normalised),
        "dense_layers": mixture["dense_layers"],
    }


def _gpt_oss(raw: Raw) -> Fields:
    kinds = raw.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(_num_layers(raw))
    ]
    bias = bool(raw.get("attention_bias", True))
    limit = float(raw.get("swiglu_limit", 7.0))
    if (alpha := float(raw.get("swiglu_alpha", 1.702))) != 1.702:
        raise NotSupportedError(f"swiglu_alpha {alpha} is not supported; gpt_oss has 1.702")
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "windows": _by_layer_types({"layer_types": kinds}, int(raw.get("sliding_window", 128))),
        "experts": _mixture(raw, biased=True, clamp=limit),
    }


FAMILIES: Mapping[str, Family] = {
    family.arch: family
    for family in (
        Family(arch="llama", says="Llama 2 and 3, SmolLM2", fields=_llama, in_gguf=True),
        Family(arch="mistral", says="Mistral 7B", fields=_mistral, in_gguf=True),
        Family(arch="qwen2", says="Qwen2, Qwen2.5", fields=_qwen2, in_gguf=True),
        Family(arch="qwen3", says="Qwen3 dense", fields=_qwen3, in_gguf=True),
        Family(arch="qwen3_moe", says="Qwen3-30B-A3B, Qwen3-235B-A22B", fields=_qwen3_moe),
        Family(arch="mixtral", says="Mixtral 8x7B, 8x22B", fields=_mixtral),
        Family(arch="olmoe", says="OLMoE-1B-7B", fields=_olmoe),
        Family(arch="qwen3_5", says="Qwen3.5 and 3.6 dense, text only", fields=_qwen3_5),
        Family(
            arch="qwen3_5_moe",
            says="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, text only",
            fields=_qwen3_5_moe,
        ),
        Family(arch="qwen3_next", says="Qwen3-Next-80B-A3B", fields=_qwen3_next),
        Family(arch="gpt_oss", says="gpt-oss-20b, gpt-oss-120b", fields=_gpt_oss),
    )
}


# ----------------------------------------------------------------------------------------- reading


def config_from_hf(whole: Raw, generation: Raw | None = None) -> ModelConfig:
    """Read a `config.json` (transformers 4 or 5 spelling), with the end tokens of generation.

    Of a model with other towers, only the text model is read.
    """
    raw: Raw = whole.get("text_config") or whole
    arch = str(raw.get("model_type", "unknown")).removesuffix("_text")
    num_heads = int(raw.get("num_attention_heads") or raw.get("n_head") or 0)
    hidden_size = int(raw.get("hidden_size") or raw.get("n_embd") or 0)
    num_layers = _num_layers(raw)
    if not (num_heads and hidden_size and num_layers and raw.get("vocab_size")):
        raise NotSupportedError(
            f"model type {arch!r} is not supported: its config.json names no hidden size, layers, "
            "attention heads or vocabulary"
        )
    family = FAMILIES.get(arch)
    native = family is not None and _is_plain(raw, arch)
    fields: Fields = {
        "arch": arch if family is not None else str(raw.get("model_type", "unknown")),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_size": int(raw.get("head_dim") or hidden_size // num_heads),
        "mlp_size": int(raw.get("intermediate_size") or 4 * hidden_size),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-5 if arch == "gpt_oss" else 1e-6)),
        "max_context_length": _context_length(raw),
        "tied_head": bool(
            whole.get("tie_word_embeddings", raw.get("tie_word_embeddings", family is None))
        ),
        "qkv_bias": _attention_bias(raw),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "windows": _foreign_windows(raw),
        "eos_token_ids": _eos_ids(whole, raw, generation or {}),
        "native": native,
    }
    if native and family is not None:
        fields |= {"windows": (), **family.fields(raw), "rope": _rope(raw)}
    else:
        fields |= {"rope": RopeConfig()}
    return ModelConfig(**fields)


def _context_length(raw: Raw) -> int:
    """As the config says; a config may be stretched by YaRN and still name the shorter length."""
    length = int(raw.get("max_position_embeddings") or raw.get("n_positions") or 2048)
    scaling = _scaling(raw)
    original = scaling.get("original_max_position_embeddings")
    if (scaling.get("rope_type") or scaling.get("type")) == "yarn" and original:
        length = max(length, int(original * float(scaling.get("factor") or 1.0)))
    return length


def _is_plain(raw: Raw, arch: str) -> bool:
    """True when nothing in the config leaves the arithmetic of our decoder."""
    rope = raw.get("rope_parameters") or {}
    partial = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    whole_heads = float(partial) == 1.0 or arch in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    return raw.get("hidden_act", "silu") == "silu" and whole_heads


def _foreign_windows(raw: Raw) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", True):
        return ()
    if raw.get("layer_types"):
        return _by_layer_types(raw, int(window))
    return _everywhere(raw, window)


def _scaling(raw: Raw) -> Raw:
    """How rotary embeddings are stretched, as transformers 5 or 4 spells it."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope(raw: Raw) -> RopeConfig:
    scaling = _scaling(raw)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    context = int(raw.get("max_position_embeddings") or 8192)
    is_yarn = kind == "yarn"
    original = scaling.get("original_max_position_embeddings") or (context if is_yarn else 8192)
    factor = float(scaling.get("factor") or (context / int(original) if is_yarn else 1.0))
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=factor,
        original_max_position=int(original),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention(scaling, factor) if is_yarn else 1.0,
        **{name: float(scaling[name]) for name in names if scaling.get(name)},
    )


def _yarn_attention(scaling: Raw, factor: float) -> float:
    """How much sharper attention is made at longer contexts, as the YaRN paper has it."""
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(float(one)) / mscale(float(all_dims)) if one and all_dims else mscale(1.0)


def _eos_ids(whole: Raw, raw: Raw, generation: Raw) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", whole.get("eos_token_id", raw.get("eos_token_id")))
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
