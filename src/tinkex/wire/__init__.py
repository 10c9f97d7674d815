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

from tinkex.wire.body import Body
from tinkex.wire.generation import Generation

__all__ = ["Body", "Generation"]
