"""Tiny models of every family that GGUF export knows, each with a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TEXT = (
    "Arr, matey! 12345 pirates can't sail the seven seas; they'll try on day 678.\n\n  Über-café?"
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VOCAB = 384


def _splitter(word: str) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=word in ("smollm", "gpt-2"))
    if word == "gpt-2":
        return level
    if word == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    pattern = Regex(_SPLIT % ("{1,3}" if word == "llama-bpe" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), level])


def write_tokenizer(folder: Path, word: str) -> None:
    """A byte-level BPE with the splitting rules that llama.cpp calls `word`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=word == "llama-bpe"))
    tokenizer.pre_tokenizer = _splitter(word)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB - 8,  # The embedding has a few rows to spare, as real ones do.
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": "{{x}}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[Any, PretrainedConfig, str]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE), "gpt-2"),
    "llama-tied": (
        LlamaForCausalLM,
        LlamaConfig(**{**_SHAPE, "tie_word_embeddings": True}),
        "smollm",
    ),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
        "llama-bpe",
    ),
    "llama3": (LlamaForCausalLM, LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3), "llama-bpe"),
    "mistral": (MistralForCausalLM, MistralConfig(**_SHAPE, sliding_window=None), "smollm"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE), "qwen2"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=128), "qwen2"),
}


def make(family: str, folder: Path) -> torch.nn.Module:
    """Write a random model of `family` and its tokenizer to `folder`; gives the model."""
    kind, config, word = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # Norms of exactly one and biases of zero would hide a mix-up.
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder, word)
    return model
