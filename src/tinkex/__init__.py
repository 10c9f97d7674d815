"""Tinkex: the Tinker training API on your laptop, your GPUs, a cluster or the hosted service.

Names load when first touched, so `import tinkex` costs milliseconds and pulls in neither torch nor
a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__title__ = "tinkex"

# Public name -> module that owns it.
_EXPORTS: dict[str, str] = {
    "InvalidInputError": "tinkex.errors",
    "TinkerError": "tinkex.errors",
}
# Public submodule -> where it lives.
_SUBMODULES: dict[str, str] = {
    "errors": "tinkex.errors",
    "events": "tinkex.client.events",
    "regularizers": "tinkex.regularizers",
    "types": "tinkex.types",
}

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__title__", "__version__"])


def __getattr__(name: str) -> Any:
    if (module := _SUBMODULES.get(name)) is not None:
        return import_module(module)
    if (module := _EXPORTS.get(name)) is not None:
        value = globals()[name] = getattr(import_module(module), name)
        return value
    raise AttributeError(f"module 'tinkex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
