"""Put a tokenizer into a GGUF file: vocabulary, merges, special tokens, chat template.

A GGUF file names the rules that split text by one word (`smollm`) and llama.cpp has them built in.
A word is written only when the rules in `tokenizer.json` are the ones it stands for: a wrong split
gives other token ids without any error. Other tokenizers are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    from tinkex.engine.model.shape import ModelConfig

__all__ = ["add_tokens"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RULES = {
    # (pre-tokenizer, whether a word that is a token skips the merges) -> llama.cpp's word
    (("Digits", "ByteLevel+regex"), False): "smollm",
    (("ByteLevel+regex",), False): "gpt-2",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", "ByteLevel"), False): "qwen2",
    ((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", "ByteLevel"), True): "llama-bpe",
}


def add_tokens(writer: Any, folder: Path, config: ModelConfig) -> None:
    """Add the tokenizer of a Hugging Face `folder` to a `gguf.GGUFWriter`."""
    tokenizer = _read(folder / "tokenizer.json")
    settings = _read(folder / "tokenizer_config.json")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_rules(tokenizer))
    tokens, kinds = _vocabulary(tokenizer, config.vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_merges(tokenizer["model"]["merges"]))
    _add_special(writer, folder, settings, {token: i for i, token in enumerate(tokens)}, config)
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _rules(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's word for how this tokenizer splits text."""
    model = tokenizer["model"]
    steps = tokenizer.get("pre_tokenizer") or {}
    parts = tuple(_step(part) for part in steps.get("pretokenizers", [steps]))
    word = _RULES.get((parts, bool(model.get("ignore_merges"))))
    if model.get("type") != "BPE" or model.get("byte_fallback") or word is None:
        raise NotSupportedError(
            f"GGUF export does not know this tokenizer ({model.get('type')}, split by "
            f"{' then '.join(parts)}); known: {', '.join(sorted(_RULES.values()))}. Export with "
            "--to merged and run llama.cpp's convert_hf_to_gguf.py on that folder."
        )
    return word


def _step(part: dict[str, Any]) -> str:
    kind = str(part.get("type"))
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return str(part["pattern"].get("Regex"))
    if kind == "Digits" and not part.get("individual_digits"):
        return "Digits, several at once"
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return "ByteLevel with a space before the text"
    return "ByteLevel+regex" if kind == "ByteLevel" and part.get("use_regex", True) else kind


def _vocabulary(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Tokens and their kinds by id; ids that the embedding has and nothing spells are unused."""
    tokens = [f"[UNUSED_{i}]" for i in range(size)]
    kinds = [_UNUSED] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = token, _NORMAL
    for added in tokenizer.get("added_tokens") or ():
        if added["id"] >= size:
            raise InvalidInputError(
                f"The token {added['content']!r} has id {added['id']}, beyond the model's "
                f"vocabulary of {size}."
            )
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, kinds


def _merges(merges: list[Any]) -> list[str]:
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _add_special(
    writer: Any,
    folder: Path,
    settings: dict[str, Any],
    index_of: dict[str, int],
    config: ModelConfig,
) -> None:
    named = {
        role: index_of.get(_content(settings.get(f"{role}_token")))
        for role in ("bos", "eos", "unk", "pad")
    }
    if named["eos"] is None and config.eos_token_ids:
        named["eos"] = config.eos_token_ids[0]
    for role, index in named.items():
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    first, last = _framing(folder)
    writer.add_add_bos_token(first)
    writer.add_add_eos_token(last)


def _content(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _framing(folder: Path) -> tuple[bool, bool]:
    """Whether encoding puts a token before or behind the text: asked of the tokenizer itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a").ids
    start = framed.index(bare[0]) if bare else 0
    return start > 0, len(framed) > start + len(bare)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        raise InvalidInputError(
            f"{path} cannot be read: {exc}. A GGUF file needs the tokenizer beside the weights."
        ) from exc
