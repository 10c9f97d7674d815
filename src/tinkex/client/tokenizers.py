"""Find and load the tokenizer of a base model.

Order of ids (R25): the server's tokenizer id; else the model's own name, cut at `:` and down to
`org/model`; else, for a name with "Llama-3", the mirrors (`ClientConfig.tokenizer_mirrors`). Order
of places for each id: a folder of that name (absolute, or relative to the working directory), what
a Tinkex server on this machine has cached, the Hugging Face cache and hub. A tokenizer is loaded
once per id and process.

Importing transformers takes seconds, so a model that a Tinkex server here has converted, which
needs nothing but its tokenizer.json, gets a `LightTokenizer`: it encodes and decodes at once, as
transformers does, and loads the rest when it is asked for. Every other model gets the fast
tokenizer of transformers, as from the official SDK, or without that package a `FastTokenizer`.
Encoding never applies a chat template: ask for one with `apply_chat_template`.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tinkex.chat.tokenizer import FastTokenizer
from tinkex.client.config import LLAMA3_MIRRORS
from tinkex.errors import ModelNotFoundError, NotSupportedError

logger = logging.getLogger("tinkex.tokenizers")

_QUANTIZED = re.compile(r"-Q\d+$")
_PRIVATE = ("TML/", "thinkingmachines/")
_FILES = ("tokenizer.json", "tokenizer_config.json")

_cache: dict[str, Any] = {}
_lock = threading.Lock()
_loading: dict[str, threading.Lock] = {}


class Tokenizer(Protocol):
    """The calls that every tokenizer has. Those of transformers have more, so all names pass."""

    def encode(self, text: Any, add_special_tokens: bool = ..., **options: Any) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> str: ...

    def __getattr__(self, name: str) -> Any: ...


def load_tokenizer(
    model_name: str,
    *,
    tokenizer_id: str | None = None,
    trust_remote_code: bool = False,
    mirrors: Sequence[str] = LLAMA3_MIRRORS,
) -> Tokenizer:
    """The tokenizer of a base model. The first call may download it; later ones are instant.

    Args:
        mirrors: Ids on the hub with the tokenizer of Llama 3, whose own repositories are gated.
        tokenizer_id: What the server says the model uses; wins over the model's name.
        trust_remote_code: Allow tokenizers that bring Python code of their own from the hub.

    Raises:
        ModelNotFoundError: It is in none of the places; the message lists them.
    """
    ids = candidate_ids(model_name, tokenizer_id, mirrors)
    for name in ids:
        with _lock:
            lock = _loading.setdefault(name, threading.Lock())
        with lock:
            if name not in _cache:
                tokenizer = _load(name, trust_remote_code)
                if tokenizer is None:
                    continue
                _cache[name] = tokenizer
            found: Tokenizer = _cache[name]
            return found
    raise ModelNotFoundError(
        f"No tokenizer for {model_name!r}: tried {', '.join(map(repr, ids))} as a folder, in "
        f"{_model_cache()}, and on the Hugging Face hub. Put its tokenizer.json into a folder "
        f"{ids[0]!r} relative to the working directory, or connect to the hub once."
    )


def candidate_ids(
    model_name: str, tokenizer_id: str | None = None, mirrors: Sequence[str] = LLAMA3_MIRRORS
) -> list[str]:
    """The ids to try, in order.

    Raises:
        NotSupportedError: The model's tokenizer is not public.
    """
    name = _cut(model_name)
    own = [_org_and_model(name)] if name else []
    if own and "llama-3" in own[0].lower():
        own += mirrors
    if tokenizer_id:
        # A server on another machine may name a folder of its own.
        own = [_cut(tokenizer_id), *own] if _is_path(tokenizer_id) else [_cut(tokenizer_id)]
    if not own:
        raise NotSupportedError("no model name was given.", path="model_name")
    if own[0].startswith(_PRIVATE):
        raise NotSupportedError(
            f"the tokenizer of {own[0]!r} is not public. Ask its owner for it and pass a folder.",
            path="model_name",
        )
    return list(dict.fromkeys(own))


def clear_cache() -> None:
    """Forget loaded tokenizers, for example after replacing a folder."""
    with _lock:
        _cache.clear()


def _cut(name: str) -> str:
    """Drop a `:variant`; a path keeps its colons."""
    return name if _is_path(name) else name.split(":", 1)[0]


def _is_path(name: str) -> bool:
    return os.path.isabs(name) or name.startswith(("./", "../", "~"))


def _org_and_model(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) == 3 and not _is_path(name) else name


# ----------------------------------------------------------------------------------------- places


def _load(name: str, trust_remote_code: bool) -> Any:
    """Load from the first place that has it; None when no place does."""
    folder = _local_folder(name)
    if folder is not None:
        return _from_folder(folder, trust_remote_code)
    if _is_path(name):
        return None
    if find_spec("transformers") is not None:
        return _from_transformers(name, trust_remote_code)
    return _from_hub(name)


def _local_folder(name: str) -> Path | None:
    path = Path(name).expanduser()
    # Converted models carry their quantisation and layout in the name: NAME-q4_1-v1 is NAME-Q4.
    stem = _QUANTIZED.sub("", path.name)
    cached = sorted(_model_cache().glob(f"{glob.escape(stem)}-q[0-9]*-v[0-9]*"))
    for folder in (path, *reversed(cached)):
        if any((folder / file).is_file() for file in _FILES):
            return folder
    return None


def _model_cache() -> Path:
    """Where a Tinkex server on this machine keeps the models it fetched."""
    return Path(os.environ.get("TINKEX_CACHE", "~/.cache/tinkex")).expanduser() / "models"


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    if find_spec("transformers") is None:
        return FastTokenizer.from_folder(folder)
    if folder.parent == _model_cache():
        return LightTokenizer.from_folder(folder)
    try:
        return _of_transformers(folder, trust_remote_code)
    except (ValueError, OSError) as exc:
        raise ModelNotFoundError(
            f"The folder {str(folder)!r} has no tokenizer that transformers can load ("
            f"{str(exc).splitlines()[0].rstrip()}). Put its tokenizer.json there, as "
            "tokenizer.save_pretrained(folder) writes it."
        ) from exc


def _of_transformers(
    name: str | Path, trust_remote_code: bool = False, *, local_files_only: bool = True
) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(name),
        use_fast=True,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
    )


class LightTokenizer(FastTokenizer):
    """The tokenizer of transformers, which is only loaded once a call needs it."""

    folder: Path
    _loaded: Any = None

    @classmethod
    def from_folder(cls, folder: Path) -> LightTokenizer:
        plain = FastTokenizer.from_folder(folder)
        light = cls(plain.backend_tokenizer, plain._config)
        light.folder = folder
        return light

    @property
    def whole(self) -> Any:
        """That of transformers. The first time takes seconds."""
        if self._loaded is None:
            self._loaded = _of_transformers(self.folder)
        return self._loaded

    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self.whole.encode(text, add_special_tokens=add_special_tokens, **options)
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if options:
            return self.whole.decode(token_ids, skip_special_tokens, **options)
        return super().decode(token_ids, skip_special_tokens)

    def convert_tokens_to_ids(self, token: Any) -> Any:
        if not isinstance(token, str):
            return self.whole.convert_tokens_to_ids(token)
        return super().convert_tokens_to_ids(token)

    def convert_ids_to_tokens(self, token_id: Any, **options: Any) -> Any:
        if options or not isinstance(token_id, int):
            return self.whole.convert_ids_to_tokens(token_id, **options)
        return super().convert_ids_to_tokens(token_id)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """As text here; what tokens come in differs between versions of transformers."""
        if options.get("tokenize") is False and options.keys() <= _TEXT_OPTIONS:
            return super().apply_chat_template(messages, **options)
        return self.whole.apply_chat_template(messages, **options)

    @property
    def all_special_tokens(self) -> list[str]:
        named = [self._special(name) for name in self._config if name.endswith("_token")]
        more = [
            item.get("content") if isinstance(item, dict) else item
            for name in ("additional_special_tokens", "extra_special_tokens")
            for item in self._config.get(name) or ()
        ]
        return list(dict.fromkeys(token for token in (*named, *more) if isinstance(token, str)))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.whole(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "folder":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __reduce__(self) -> Any:
        return _from_folder, (self.folder, False)


_TEXT_OPTIONS = frozenset({"add_generation_prompt", "tokenize"})


def _from_transformers(name: str, trust_remote_code: bool) -> Any:
    """From the cache of transformers, else from the hub; None when neither has it."""
    for is_local in (True, False):
        if not is_local and not _is_on_hub(name):
            break
        try:
            return _of_transformers(name, trust_remote_code, local_files_only=is_local)
        except (OSError, ValueError) as exc:
            if "trust_remote_code" in str(exc):
                raise NotSupportedError(
                    f"the tokenizer of {name!r} runs Python code from the hub. Read it, then pass "
                    "trust_remote_code=True.",
                    path="trust_remote_code",
                ) from exc
            if not is_local:
                logger.info("No tokenizer %r on the hub: %s", name, str(exc).splitlines()[:1])
    return None


def _is_on_hub(name: str) -> bool:
    """Whether the hub has the model; offline, transformers would try for most of a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, "tokenizer_config.json"), timeout=10)
    except Exception as exc:  # no route, no such repository, gated: all mean "not from there"
        logger.info("The hub does not give the tokenizer of %r: %s", name, exc)
        return False
    return True


def _from_hub(name: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return FastTokenizer(Tokenizer.from_pretrained(name), {})
    except Exception as exc:  # the Rust library raises bare Exception
        logger.info("No tokenizer %r on the hub: %s", name, exc)
        return None
