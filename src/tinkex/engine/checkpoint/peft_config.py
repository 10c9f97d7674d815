"""The `adapter_config.json` of a checkpoint: written for `peft`, and read from what it wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.engine.folders import CONFIG
from tinkex.engine.lora.adapter import Adapter, LoraPart, Target
from tinkex.errors import InvalidInputError, NotSupportedError


def peft_config(adapter: Adapter, targets: Mapping[str, Target], base_model: str) -> dict[str, Any]:
    """The config by which `peft` rebuilds the adapter, with patterns where modules differ."""
    parts = [part for part, _, _ in adapter.modules()]
    rank = max((part.rank for part in parts), default=1)
    first = next((part for part in parts if part.rank == rank), None)
    alpha = alpha_of(first) if first is not None else 1.0
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "target_modules": _target_modules(parts, targets),
        "rank_pattern": {p.target.module: p.rank for p in parts if p.rank != rank},
        "alpha_pattern": {p.target.module: alpha_of(p) for p in parts if alpha_of(p) != alpha},
    }


def alpha_of(part: LoraPart) -> float:
    alpha = part.scale * part.rank
    return round(alpha) if abs(alpha - round(alpha)) < 1e-6 else alpha


def _target_modules(parts: Sequence[LoraPart], targets: Mapping[str, Target]) -> list[str]:
    """Short names (`q_proj`) when every module of that name carries the adapter, else full ones."""
    mine = {part.target.module for part in parts}
    leaves = {module.rpartition(".")[2] for module in mine}
    everywhere = {
        part.module
        for target in targets.values()
        for part in target.parts
        if part.module.rpartition(".")[2] in leaves
    }
    return sorted(leaves) if everywhere == mine else sorted(mine)


def check_peft_config(config: Mapping[str, Any]) -> None:
    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}
    for key, value in plain.items():
        if config.get(key, value) != value:
            raise NotSupportedError(
                f"the adapter has {key} = {config[key]!r}; only {value!r} is supported",
                path=CONFIG,
            )
    empty = ("modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias")
    for key in (*empty, "megatron_config", "corda_config", "eva_config"):
        if config.get(key):
            raise NotSupportedError(f"the adapter uses {key}, which is not supported", path=CONFIG)


def scale_of(config: Mapping[str, Any], alpha: Any, rank: int) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidInputError(f"lora_alpha must be a number, got {alpha!r}", path=CONFIG)
    # Kalajdzievski, rsLoRA (arXiv 2312.03732): alpha over the root of the rank.
    root = rank**0.5 if config.get("use_rslora") else rank
    return alpha / root
