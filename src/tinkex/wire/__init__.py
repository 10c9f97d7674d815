"""How the vocabulary travels: JSON, protobuf, zstd, and which generation a peer speaks.

Client and server use the same functions, so that they cannot disagree:

    client: body = requests.encode("optim_step", request, generation)
            value = results.decode(OptimStepResponse, content, content_type)
    server: opened = requests.open_body("optim_step", content, content_type)
            address, request = opened.address(), opened.read()
            body = results.encode(value, accept)

Two kinds of answer are read elsewhere: small ones, by the client with their declared message
(`client/session/holder.py: parse`), and events of a stream (`client/sampling/sample_stream.py`).

`endpoints` lists every call; `metrics` and `chunking` hold the two computations that client and
server must agree on. Bytes that are no message are a `WireError`, a wrong field is an
`InvalidInputError` that names its path. Nothing here opens a connection.
"""

from __future__ import annotations

from tinkex.wire.body import Body
from tinkex.wire.generation import Generation

__all__ = ["Body", "Generation"]
