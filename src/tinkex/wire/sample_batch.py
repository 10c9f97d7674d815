"""The samples of one `asample_batch`, each with the bytes that it came in.

A batch is `{"requests": [asample body, ...]}`. The server knows the repeat of a sample by its
bytes, and a client may send it again in another batch, or alone: so the bodies are cut out of the
batch and parsed one by one, which takes no longer than to parse the whole.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from tinkex.errors import WireError
from tinkex.types.service.extensions import SampleBatchRequest
from tinkex.wire import json_codec
from tinkex.wire.budget import check_json
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.generation import JSON, names_protobuf
from tinkex.wire.requests import Opened, open_body

_BEGIN = re.compile(rb'\s*\{\s*"requests"\s*:\s*\[\s*')
_NEXT = re.compile(rb"\s*,\s*")
_END = re.compile(rb"\s*\]\s*\}\s*")
_MAX_SAMPLES = 1024
_MAX_DEPTH = 16
"""A sample is nested four deep; what is deeper is left to the parser."""


def open_samples(name: str, content: bytes, content_type: str | None = JSON) -> list[Opened]:
    """The samples of a batch, parsed and not judged yet; one that is no object is among them.

    Raises:
        WireError: The batch is not JSON, or no batch.
    """
    check_json(content)
    row = ENDPOINTS["asample"]
    bodies = [] if names_protobuf(content_type) else _cut(content)
    if bodies:
        try:
            return [Opened(row, body, json_codec.loads(body, is_counted=True)) for body in bodies]
        except WireError:
            pass  # a brace in a text, or JSON that is none: the parser of the whole will tell
    whole = json_codec.read(SampleBatchRequest, open_body(name, content, content_type).fields)
    return [
        Opened(row, _written(fields, index, content), fields)
        for index, fields in enumerate(whole.requests)
    ]


def _written(fields: Any, index: int, content: bytes) -> bytes:
    """A sample that could not be cut out, as our client writes it, so that it may come alone too.

    One that cannot be written again is known by the bytes of its batch and its index in it.
    """
    try:
        return json_codec.dumps(fields)
    except (TypeError, ValueError, RecursionError):
        return b"%d %b" % (index, hashlib.blake2b(content, digest_size=16).digest())


def _cut(content: bytes) -> list[bytes]:
    """The objects in the list of a batch, told by their braces; empty where those do not tell.

    Braces inside texts are counted like others, so a part may be cut wrongly: it is no JSON then.
    When all parts are, they are what a parser of the whole would find between the same commas.
    """
    begin = _BEGIN.match(content)
    if begin is None:
        return []
    bodies: list[bytes] = []
    start, depth = begin.end(), 0
    # `find` looks at each byte once in all: a brace is not looked for again before it is passed.
    find = content.find
    opening, closing = find(b"{", start), find(b"}", start)
    while opening == start and len(bodies) < _MAX_SAMPLES:
        while depth <= _MAX_DEPTH and closing >= 0:
            if 0 <= opening < closing:
                depth, opening = depth + 1, find(b"{", opening + 1)
                continue
            depth, end = depth - 1, closing + 1
            closing = find(b"}", end)
            if depth == 0:
                break
        else:
            return []
        bodies.append(content[start:end])
        comma = _NEXT.match(content, end)
        if comma is None:
            return bodies if _END.fullmatch(content, end) else []
        start = comma.end()
    return []
