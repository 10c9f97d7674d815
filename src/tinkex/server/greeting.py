"""What `tinkex serve` tells a person at a terminal: where, what, how to connect, how to stop.

Text only. A program that starts the server reads the JSON line instead, see `serve.py`.
"""

from __future__ import annotations

import socket

from tinkex import __version__
from tinkex.contract.models import DEFAULT_MODEL
from tinkex.server.process.config import ServerConfig

__all__ = ["greeting"]

_EVERYWHERE = ("0.0.0.0", "::")
_SHOWN = frozenset({"host", "port", "models", "engine", "data_dir"})


def greeting(config: ServerConfig, base_url: str, *, needs_key: bool) -> str:
    """The lines a terminal shows once requests are answered."""
    key = "TINKER_API_KEY=tml-... " if needs_key else ""
    rows = [
        ("model", ", ".join(config.models or (DEFAULT_MODEL,)) + f" ({config.engine_kind.note})"),
        ("data", str(config.data_dir.resolve())),
        ("connect", f"{key}TINKER_BASE_URL={base_url} python your_script.py"),
        ("", f"{key}tinkex --base-url {base_url} chat"),
        ("", _note(config, base_url, needs_key)),
        ("console", f"{base_url}/console"),
        ("settings", _others(config)),
        ("stop", "Ctrl-C; the same command goes on where it was"),
    ]
    lines = [f"Tinkex {__version__} listens on {base_url}"]
    lines += [f"  {name:<10}{text}" for name, text in rows if text]
    return "\n".join(lines)


def _note(config: ServerConfig, base_url: str, needs_key: bool) -> str:
    if config.host in _EVERYWHERE:
        local = base_url.rpartition(":")
        return (
            f"from other machines: {local[0].partition('//')[0]}//{socket.gethostname()}:{local[2]}"
        )
    return "" if needs_key else "(the official SDK also wants a key: any that starts with tml-)"


def _others(config: ServerConfig) -> str:
    """Settings that are not as by default and have no line of their own."""
    changed = config.changed().items()
    return ", ".join(f"{name} = {value}" for name, value in changed if name not in _SHOWN)
