"""An exception as words for a person at a prompt.

The SDK's errors speak to programmers (status, route, keyword arguments) and the server's to whoever
writes requests. Here the same facts name commands and options instead.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
from pathlib import Path

from tinkex.errors import APIStatusError, TinkerError, how_to_install

__all__ = ["program", "words"]

# A module that one of these extras brings is missing: say how to get it, not which import failed.
_EXTRA_OF = {
    "torch": "local",
    "transformers": "local",
    "safetensors": "local",
    "fastapi": "server",
    "uvicorn": "server",
    "sqlalchemy": "server",
    "alembic": "server",
    "matplotlib": "local",
    "huggingface_hub": "hub",
    "gguf": "gguf",
}
_LISTING_COMMANDS = {
    "checkpoints": "`tinkex checkpoint list`",
    "training_runs": "`tinkex run list`",
    "sessions": "`tinkex session list`",
}
"""The command for the listing that a refusal names."""


_REQUEST = re.compile(r"^Error code: \d+ on [A-Z]+ \S+ - ")


def words(exc: Exception) -> str:
    """The sentence that `tinkex` prints for an exception."""
    if isinstance(exc, ModuleNotFoundError) and (root := (exc.name or "").split(".")[0]):
        if extra := _EXTRA_OF.get(root):
            return f"this command needs {root}. Install it with: {how_to_install(extra)}"
    if isinstance(exc, APIStatusError):
        return _answer(exc)
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        where = f" ({exc.filename})" if exc.filename is not None else ""
        return (
            f"the disk is full{where}. Make room (`tinkex disk` shows what Tinkex keeps, "
            "`tinkex gc` removes what nobody needs), or name another place: TINKEX_HOME."
        )
    if isinstance(exc, OSError) and exc.filename is not None and exc.strerror:
        return f"{exc.filename}: {exc.strerror}"
    if isinstance(exc, TinkerError | OSError | TimeoutError):
        return str(exc) or type(exc).__name__
    return (
        f"{type(exc).__name__}: {exc}\n"
        "This looks like a bug in tinkex. Run again with TINKEX_DEBUG=1 for the traceback."
    )


def program() -> str:
    """How to call us again: by name where the shell finds it, else by the path just used."""
    used = sys.argv[0]
    return used if Path(used).name == "tinkex" and not shutil.which("tinkex") else "tinkex"


def _answer(exc: APIStatusError) -> str:
    """The server's words, without the request they answer."""
    body = exc.body if isinstance(exc.body, dict) else {}
    detail, listing = body.get("detail"), str(body.get("listing"))
    text = detail if isinstance(detail, str) and detail else _REQUEST.sub("", str(exc))
    if listing in _LISTING_COMMANDS:
        text = text.replace(f"GET /{listing}", _LISTING_COMMANDS[listing])
    if exc.status_code == 401 and not _has_key():
        return (
            "The server wants an API key and none is set: `tinkex auth login`, or TINKER_API_KEY."
        )
    if exc.status_code == 401 and "TINKER_API_KEY" not in text:
        return f"{text} Check the key: `tinkex auth login`, or TINKER_API_KEY."
    return text


def _has_key() -> bool:
    from tinkex import auth

    return auth.tinker_has_credentials()
