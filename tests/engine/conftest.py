"""Tiny random models of each family, ours and transformers' side by side.

The harness of this folder's tests is importable: `training`, `peft_oracle`, `engine_world`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_world import World
from peft_oracle import exact_norms
from tiny_llama import tiny_llama

TINY_VOCAB = 97
_SHAPE = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-llama3-rope": (
        "LlamaConfig",
        {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-biased-linear-rope": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "mistral-window": ("MistralConfig", {"sliding_window": 5, "head_dim": 16}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


@dataclass(frozen=True)
class Tiny:
    """One tiny model: its folder, transformers' model in float64 as the truth, and its family."""

    family: str
    folder: Path
    truth: Any

    def decoder(self) -> Any:
        from tinkex.engine.device.backend import load_decoder

        return load_decoder(str(self.folder))

    def trainer(self, **config: Any) -> Any:
        from tinkex.engine.train.config import TrainerConfig
        from tinkex.engine.train.trainer import Trainer

        return Trainer(self.decoder(), base_model=str(self.folder), config=TrainerConfig(**config))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], Tiny]:
    """`tiny(family)`: made once per session."""
    made: dict[str, Tiny] = {}

    def get(family: str = "llama-tied-llama3-rope") -> Tiny:
        if family not in made:
            made[family] = _make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def _make(family: str, folder: Path) -> Tiny:
    import transformers

    kind, extra = _FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**_SHAPE, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start trivial; make them count
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return Tiny(family, folder, exact_norms(model.double()))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    """The folder of a tiny model whose engine `start` starts."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(folder, max_position_embeddings=256, eos_token_id=1, initializer_range=0.2)
    return str(folder)


@pytest.fixture
def start(base) -> Iterator[Callable[..., World]]:
    """`start(**config)`: a torch engine on the CPU, closed with the test."""
    from tinkex.engine.torch.config import EngineConfig
    from tinkex.engine.torch.engine import TorchEngine

    clients: list[World] = []

    def make(**config: Any) -> World:
        clients.append(World(TorchEngine(EngineConfig(device="cpu", **config)), base))
        return clients[-1]

    yield make
    for client in clients:
        client.engine.close()
