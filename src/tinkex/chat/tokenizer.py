"""A tokenizer without transformers, whose import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkex.errors import ModelNotFoundError, NotSupportedError

__all__ = ["FastTokenizer"]

LONG_TEXT = 10_000
"""Characters from which a text is tokenized without stopping every other thread."""


class FastTokenizer:
    """A `tokenizers.Tokenizer` with the calls that programs make on a transformers tokenizer."""

    def __init__(self, tokenizer: Any, config: dict[str, Any]) -> None:
        self.backend_tokenizer = tokenizer
        self._config = config

    @classmethod
    def from_folder(cls, folder: Path) -> FastTokenizer:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelNotFoundError(
                f"{folder} has no tokenizer.json. Install transformers to load slow tokenizers."
            )
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        template = folder / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text("utf-8")
        return cls(Tokenizer.from_file(str(file)), config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text as it stands; no chat template."""
        if len(text) < LONG_TEXT:
            encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:  # of the calls of the library only those for batches let other threads run
            (encoding,) = self.backend_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        number: int | None = self.backend_tokenizer.token_to_id(token)
        return number

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        token: str | None = self.backend_tokenizer.id_to_token(token_id)
        return token

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> list[int] | str:
        """The messages in the model's own chat format."""
        from tinkex.chat.template import render

        if not self.chat_template:
            raise NotSupportedError("this tokenizer has no chat template.", path="messages")
        special = {k: self._special(k) for k in self._config if k.endswith("_token")}
        text = render(
            self.chat_template,
            messages=messages,
            special_tokens={name: token for name, token in special.items() if token},
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        return self._config.get("chat_template")

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens outside the learned vocabulary, control tokens among them."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    @property
    def vocab_size(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size()
        return size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def eos_token(self) -> str | None:
        return self._special("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self._special("bos_token")

    @property
    def unk_token(self) -> str | None:
        return self._special("unk_token")

    @property
    def pad_token(self) -> str | None:
        return self._special("pad_token")

    @property
    def all_special_tokens(self) -> list[str]:
        """Tokens that steer the model and are no text."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return [token.content for token in added.values() if token.special]

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.convert_tokens_to_ids(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.convert_tokens_to_ids(self.bos_token)

    def _special(self, name: str) -> str | None:
        value = self._config.get(name)
        return value.get("content") if isinstance(value, dict) else value
