"""How the vocabulary travels: JSON, protobuf, zstd, and which generation a peer speaks.

Both sides meet here, so that they cannot disagree:

    client: body = requests.encode("optim_step", request, generation)
            value = results.decode(OptimStepResponse, content, content_type)
    server: opened = requests.open_body("optim_step", content, content_type)
            address, request = opened.address(), opened.read()
            body = results.encode(value, accept)

`endpoints` lists every call; `metrics` and `chunking` hold the two computations that client and
server must agree on. Bytes that are no message are a `WireError`, a wrong field is an
`InvalidInputError` that names its path. Nothing here opens a connection.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.wire import chunking as chunking
    from tinkex.wire import metrics as metrics
    from tinkex.wire import requests as requests
    from tinkex.wire import results as results
    from tinkex.wire.body import Body as Body
    from tinkex.wire.generation import Generation as Generation

_SUBMODULES = frozenset({"chunking", "metrics", "requests", "results"})
_OWNER = {"Body": "body", "Generation": "generation"}

__all__ = sorted([*_SUBMODULES, *_OWNER])


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"tinkex.wire.{name}")
    if (module := _OWNER.get(name)) is not None:
        return getattr(import_module(f"tinkex.wire.{module}"), name)
    raise AttributeError(f"module 'tinkex.wire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
