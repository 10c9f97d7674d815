"""Tinkex: the Tinker training API on your laptop, your GPUs, a cluster or the hosted service.

Names load when first touched, so `import tinkex` costs milliseconds and pulls in neither torch nor
a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__title__ = "tinkex"

# Public name -> module that owns it. Submodules map to themselves.
_EXPORTS: dict[str, str] = {
    "InvalidInputError": "tinkex.errors",
    "TinkerError": "tinkex.errors",
}
_SUBMODULES = frozenset({"errors", "types"})

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"tinkex.{name}")
    if (module := _EXPORTS.get(name)) is not None:
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
