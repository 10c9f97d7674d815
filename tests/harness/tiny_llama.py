"""A real model's folder for the torch engine: a few small layers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_llama(folder: Path, **settings: Any) -> Any:
    """Write a model of `SHAPE` with `settings`, the same at every call, and give it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | settings)))
    model.save_pretrained(folder)
    return model
