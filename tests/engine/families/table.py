"""One row a family: a tiny random model of its kind. A new family is one more row.

The truth is transformers' own model in float64, its delta rule replaced by the recurrence as it is
defined, token by token. Weights that start trivial (norms, biases, sinks) are made to count.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 61
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_HYBRID = {
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-3,  # a norm of outputs near zero would magnify the last digits of fp32
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _config(kind: str, **extra: Any) -> Any:
    return getattr(transformers, kind)(**(_SMALL | extra))


ROWS: dict[str, Any] = {
    "qwen3-yarn": lambda: _config("Qwen3Config", head_dim=16, rope_parameters=_YARN),
    "qwen3_moe": lambda: _config(
        "Qwen3MoeConfig",
        **_MIXTURE,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "mixtral": lambda: _config(
        "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=9
    ),
    "olmoe": lambda: _config("OlmoeConfig", **_MIXTURE, clip_qkv=1.5),
    "qwen3_5": lambda: _config("Qwen3_5TextConfig", **_HYBRID, tie_word_embeddings=True),
    "qwen3_5_moe": lambda: _config(
        "Qwen3_5MoeTextConfig",
        **_HYBRID,
        **_MIXTURE,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
    ),
    "qwen3_next": lambda: _config(
        "Qwen3NextConfig",
        **_HYBRID,
        **_MIXTURE,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[1],
    ),
    "gpt_oss": lambda: _config(
        "GptOssConfig",
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=7,
        rope_parameters=_YARN | {"truncate": False},
    ),
}
FAMILIES = tuple(ROWS)
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe", "qwen3_next", "gpt_oss")
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


@dataclass(frozen=True)
class Model:
    family: str
    folder: Path
    truth: Any

    def decoder(self, dtype: Any = None) -> Any:
        from tinkex.engine.device.backend import load_decoder

        return load_decoder(str(self.folder), dtype=dtype)

    def trainer(self, **config: Any) -> Any:
        from tinkex.engine.train.config import TrainerConfig
        from tinkex.engine.train.trainer import Trainer

        return Trainer(self.decoder(), base_model=str(self.folder), config=TrainerConfig(**config))


def make(family: str, folder: Path) -> Model:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        ROWS[family](), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith(("_bias", "conv1d.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return Model(family, folder, _exact(model.double()))


def _exact(model: Any) -> Any:
    """Norms and the delta rule in float64: transformers' own fall back to fp32 there."""
    module = __import__(type(model).__module__, fromlist=["*"])
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        module.torch_chunk_gated_delta_rule = recurrence
    for one in model.modules():
        if "RMSNorm" in type(one).__name__:
            one.forward = types.MethodType(_norm, one)
    return model


def _norm(self: Any, x: Any, gate: Any = None) -> Any:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    kinds = ("Qwen3_5", "Qwen3Next")
    stored_from_one = type(self).__name__.startswith(kinds) and gate is None
    weight = self.weight + 1 if stored_from_one else self.weight
    y = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return y if gate is None else y * torch.nn.functional.silu(gate)


def recurrence(
    query: Any, key: Any, value: Any, *, g: Any, beta: Any, **kwargs: Any
) -> tuple[Any, None]:
    """[B, L, H, ...] in and out; the state starts at zero."""
    query, key = (
        x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        for x in (query.double(), key.double())
    )
    value, g, beta = value.double(), g.double(), beta.double()
    # Several value heads may share a key head; transformers before 5.23 repeats keys itself.
    num_shared = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(num_shared, dim=2) for x in (query, key))
    state = value.new_zeros(*key[:, 0].shape, value.shape[-1])
    out = []
    for t in range(key.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = beta[:, t, :, None] * (value[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(out, dim=1), None


def merged(model: Any, adapter: Any) -> dict[str, Any]:
    """The model's parameters with an adapter added, as a function of the adapter's tensors."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    if model.config.tie_word_embeddings:
        parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    deltas: dict[str, Any] = {}
    for part, a_rI, b_Or in adapter.modules():
        name, delta = part.target.module, (part.scale * b_Or.double() @ a_rI.double())
        if f"{name}.weight" in parameters:
            parameters[f"{name}.weight"] = parameters[f"{name}.weight"] + delta
        else:
            deltas[name] = delta
    for name in [name for name in parameters if name.endswith(("gate_up_proj", ".down_proj"))]:
        block = name.rpartition(".")[0]
        if not any(module.startswith(f"{block}.") for module in deltas):
            continue
        parts = ("down",) if name.endswith(".down_proj") else ("gate", "up")
        pieces = [
            torch.cat([deltas.pop(f"{block}.{expert}.{part}_proj") for part in parts])
            for expert in range(len(parameters[name]))
        ]
        delta_EOI = torch.stack(pieces)
        if type(model).__name__.startswith("GptOss"):
            if len(parts) == 2:  # gate and up take turns
                half = delta_EOI.shape[1] // 2
                delta_EOI = delta_EOI.unflatten(1, (2, half)).transpose(1, 2).flatten(1, 2)
            delta_EOI = delta_EOI.transpose(1, 2)
        parameters[name] = parameters[name] + delta_EOI
    assert not deltas
    return parameters
