"""A request body as the server reads it, in one call, for tests that look at what was sent.

The server opens a body, numbers the request and judges it; nobody there asks where tokens came
from. Here both steps are one, and the spans of provenance are put back from the message itself.
"""

from __future__ import annotations

from typing import Any

from tinkex import types
from tinkex.wire import requests
from tinkex.wire.body import unpack
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.generation import JSON


def decode(name: str, raw: bytes, content_type: str = JSON, encoding: str | None = None) -> Any:
    if encoding is not None:
        raw = unpack(raw, encoding, max_bytes=ENDPOINTS[name].limit.sent_bytes)
    opened = requests.open_body(name, raw, content_type)
    request = opened.read()
    if not opened.is_protobuf:
        return request
    given = request.input
    data = [_marked(*pair) for pair in zip(given.data, opened.body.data, strict=True)]
    asked = types.ForwardBackwardInput(data, given.loss_fn, given.loss_fn_config)
    return type(request)(asked, request.model_id, request.seq_id)


def _marked(datum: types.Datum, message: Any) -> types.Datum:
    spans = (message.model_input_spans, message.loss_fn_input_spans)
    if not any(spans):
        return datum
    return types.Datum(datum.model_input, datum.loss_fn_inputs, *map(_spans, spans))


def _spans(messages: Any) -> types.ProvenanceSpans:
    found: types.ProvenanceSpans = []
    for message in messages:
        is_prompt = message.WhichOneof("span") == "prompt_tokens"
        kind = types.PromptProvenanceSpan if is_prompt else types.SampledProvenanceSpan
        span = message.prompt_tokens if is_prompt else message.sampled_tokens
        found.append(kind(sequence_id=span.sequence_id, offset=span.offset, length=span.length))
    return found
