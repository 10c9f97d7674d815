"""Rebuild a byte-level BPE tokenizer from GGUF metadata as a folder that transformers loads.

GGUF names its pre-tokenizer by a word (`smollm`) and leaves the rules to the reader. The rules for
the words of `_PRE_TOKENIZERS` are written here; any other word is refused, because a wrong split
gives wrong token ids without any error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkex.errors import NotSupportedError

_CONTROL = 3
"""The kind of tokens that are no text."""


def _byte_level(**options: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **options}


_PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    # Every digit is a token of its own; then the splitting of GPT-2.
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        _byte_level(use_regex=True),
    ],
    "gpt-2": [_byte_level(use_regex=True)],
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer_json(metadata), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(metadata), indent=2, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizers` library's own format, from the vocabulary and merges of a GGUF file."""
    model = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre"))
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise NotSupportedError(
            f"The GGUF tokenizer (model {model!r}, pre-tokenizer {pre!r}) is not one of "
            f"'gpt2' with {sorted(_PRE_TOKENIZERS)}. Use a folder with a tokenizer.json instead."
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(kinds) if kind == _CONTROL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i]) for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": True}


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {
        role: tokens[metadata[key]]
        for role, word in roles.items()
        if (key := f"tokenizer.ggml.{word}_token_id") in metadata
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata[f"{metadata['general.architecture']}.context_length"]),
        **named,
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config
