"""Find and load the tokenizer of a base model.

Order of ids (R25): the server's tokenizer id; else the model's own name, cut at `:` and down to
`org/model`; else, for Llama 3, the known mirrors. Order of places for each id: a folder of that
name (absolute, or relative to the working directory), what a Tinkex server on this machine has
cached, the Hugging Face cache and hub. A tokenizer is loaded once per id and process.

With transformers installed the result is its fast tokenizer, as the official SDK returns; with
`tokenizers` alone it is a `FastTokenizer`, which encodes and decodes alike. Encoding never applies
a chat template: ask for one with `apply_chat_template`.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tinkex.chat.tokenizer import FastTokenizer
from tinkex.errors import ModelNotFoundError, NotSupportedError

__all__ = [
    "FastTokenizer",
    "candidate_ids",
    "clear_cache",
    "load_light_tokenizer",
    "load_tokenizer",
]

logger = logging.getLogger("tinkex.tokenizers")

LLAMA3_MIRRORS = (
    "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "baseten/Meta-Llama-3-tokenizer",
)
_PRIVATE = ("TML/", "thinkingmachines/")
_FILES = ("tokenizer.json", "tokenizer_config.json")

_cache: dict[str, Any] = {}
_lock = threading.Lock()
_loading: dict[str, threading.Lock] = {}


def load_tokenizer(
    model_name: str, *, tokenizer_id: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a base model. The first call may download it; later ones are instant.

    Args:
        tokenizer_id: What the server says the model uses; wins over the model's name.
        trust_remote_code: Allow tokenizers that bring Python code of their own from the hub.

    Raises:
        ModelNotFoundError: It is in none of the places; the message lists them.
    """
    ids = candidate_ids(model_name, tokenizer_id)
    for name in ids:
        with _lock:
            lock = _loading.setdefault(name, threading.Lock())
        with lock:
            if name not in _cache:
                found = _load(name, trust_remote_code)
                if found is None:
                    continue
                _cache[name] = found
            return _cache[name]
    raise ModelNotFoundError(
        f"No tokenizer for {model_name!r}: tried {', '.join(map(repr, ids))} as a folder, in "
        f"{_model_cache()}, and on the Hugging Face hub. Put its tokenizer.json into a folder "
        f"{ids[0]!r} relative to the working directory, or connect to the hub once."
    )


def load_light_tokenizer(model_name: str) -> Any:
    """A tokenizer that encodes and decodes as `load_tokenizer`'s does, without its import time.

    Importing transformers takes seconds, which a command that asks one question should not. A model
    that a Tinkex server here has converted needs nothing but its tokenizer.json; any other may rely
    on what transformers does on top, and gets `load_tokenizer`.
    """
    folder = _local_folder(candidate_ids(model_name)[0])
    if folder is None or folder.parent != _model_cache():
        return load_tokenizer(model_name)
    return FastTokenizer.from_folder(folder)


def candidate_ids(model_name: str, tokenizer_id: str | None = None) -> list[str]:
    """The ids to try, in order.

    Raises:
        NotSupportedError: The model's tokenizer is not public.
    """
    name = _cut(model_name)
    own = [_org_and_model(name)] if name else []
    if own and own[0].startswith("meta-llama/Llama-3"):
        own += LLAMA3_MIRRORS
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
    given = Path(name).expanduser()
    # Converted models carry their quantisation and layout in the name: NAME-q4_1-v1.
    cached = sorted(_model_cache().glob(f"{glob.escape(given.name)}-q[0-9]*-v[0-9]*"))
    for folder in (given, *reversed(cached)):
        if any((folder / file).is_file() for file in _FILES):
            return folder
    return None


def _model_cache() -> Path:
    """Where a Tinkex server on this machine keeps the models it fetched."""
    return Path(os.environ.get("TINKEX_CACHE", "~/.cache/tinkex")).expanduser() / "models"


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    if find_spec("transformers") is not None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            str(folder), use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True
        )
    return FastTokenizer.from_folder(folder)


def _from_transformers(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    options = {"use_fast": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, **options)
    except (OSError, ValueError) as exc:
        _check_remote_code(name, exc)
    if not _is_on_hub(name):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as exc:
        _check_remote_code(name, exc)
        logger.info("No tokenizer %r on the hub: %s", name, str(exc).splitlines()[:1])
        return None


def _check_remote_code(name: str, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        raise NotSupportedError(
            f"the tokenizer of {name!r} runs Python code from the hub. Read it, then pass "
            "trust_remote_code=True.",
            path="trust_remote_code",
        ) from error


def _is_on_hub(name: str) -> bool:
    """One quick question: without a network, transformers would try for most of a minute."""
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
