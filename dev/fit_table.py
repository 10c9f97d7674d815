"""The tables of docs/does-it-fit.md: what each model needs, as `tinkex doctor --model` computes it.

The shapes are those of the models' published `config.json`; the sums are the engine's own.
"""

from __future__ import annotations

import torch

from tinkex.engine.model.shape import ExpertsConfig, ModelConfig, RopeConfig
from tinkex.engine.torch.survey import LENGTH, needs

CARDS = (8, 12, 16, 24, 48, 80, 141)


def model(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head: int,
    mlp: int,
    vocab: int,
    *,
    tied: bool = False,
    qk_norm: bool = False,
    experts: ExpertsConfig | None = None,
) -> ModelConfig:
    return ModelConfig(
        arch="qwen3" if qk_norm else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        mlp_size=mlp,
        norm_eps=1e-6,
        rope=RopeConfig(),
        max_context_length=LENGTH,
        tied_head=tied,
        qk_norm=qk_norm,
        experts=experts,
    )


def qwen3(*shape: int, tied: bool = False, experts: ExpertsConfig | None = None) -> ModelConfig:
    return model(*shape, 151936, tied=tied, qk_norm=True, experts=experts)


MODELS: dict[str, ModelConfig] = {
    "SmolLM2-135M": model(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 128, 3072, tied=True),
    "Llama-3.2-1B": model(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 8, 128, 6144, tied=True),
    "Llama-3.2-3B": model(3072, 28, 24, 8, 128, 8192, 128256, tied=True),
    "Qwen3-4B": qwen3(2560, 36, 32, 8, 128, 9728, tied=True),
    "Mistral-7B-v0.3": model(4096, 32, 32, 8, 128, 14336, 32768),
    "Llama-3.1-8B": model(4096, 32, 32, 8, 128, 14336, 128256),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 128, 12288),
    "Qwen3-14B": qwen3(5120, 40, 40, 8, 128, 17408),
    "Qwen3-30B-A3B": qwen3(
        2048, 48, 32, 4, 128, 6144, experts=ExpertsConfig(count=128, per_token=8, size=768)
    ),
    "Qwen3-32B": qwen3(5120, 64, 64, 8, 128, 25600),
}


def table(dtype: torch.dtype) -> str:
    lines = [
        f"| model | {'smallest card' if dtype == torch.bfloat16 else 'memory'} | parameters | "
        "weights | adapter | a training row | recomputed | a sample |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        it = needs(config, dtype)
        numbers = (it.weights, it.adapter, it.training, it.training_recomputed, it.sample)
        cells = [_gb(number) for number in numbers]
        needed = it.total / 1e9
        if dtype == torch.bfloat16:
            card = next((card for card in CARDS if card * 0.95 >= needed), None)
            last = f"**{card} GB**" if card else "none here"
        else:
            last = f"**{needed:.0f} GB**"
        parameters = it.weights / dtype.itemsize / 1e9
        lines.append(f"| {name} | {last} | {parameters:.2f} B | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _gb(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number < 1e10 else f"{number / 1e9:.0f} GB"


def gpu_table() -> str:
    return table(torch.bfloat16)


def cpu_table() -> str:
    return table(torch.float32)
