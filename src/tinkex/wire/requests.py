"""Every request body, by the name of its endpoint, in both dialects and for both sides.

The client calls `encode`. The server calls `open_body`, which parses and looks at nothing, then
`address` where the request is one of a model's ordered ones, and `read`, which judges the whole: a
request is numbered even when the rest of it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.fields.value import short
from tinkex.wire import json_codec, json_requests, proto_requests, sdk_0_4
from tinkex.wire.body import Body
from tinkex.wire.endpoints import ENDPOINTS, Endpoint
from tinkex.wire.generation import JSON, PROTOBUF, Generation, names_protobuf
from tinkex.wire.json_requests import PASSES, Address

NO_FIELDS = Body(b"{}", JSON)
"""The body of a POST for which no message is declared, where the official SDK sends one."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A body that was parsed and not judged yet."""

    endpoint: Endpoint
    """Of the request that it is, which is not always the one it was sent to."""
    content: bytes
    body: Any
    """The content as a dict, or as a protobuf message."""

    @property
    def is_protobuf(self) -> bool:
        return not isinstance(self.body, dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Of a JSON body, as they were sent."""
        assert isinstance(self.body, dict)
        return self.body

    def address(self) -> Address:
        if not self.is_protobuf:
            return json_codec.read(Address, self.body)
        # Protobuf has no null: a number that was not given is 0.
        seq_id = self.body.seq_id or None
        return json_codec.read(Address, {"model_id": self.body.model_id, "seq_id": seq_id})

    def read(self) -> Any:
        """The request, without where its tokens came from: no engine asks for that.

        Raises:
            InvalidInputError: With the path of the first thing that is wrong.
        """
        if self.endpoint.name not in PASSES:
            return json_codec.read(self.endpoint.request, self.body)
        if not self.is_protobuf:
            return json_requests.read(self.endpoint.name, self.body)
        return proto_requests.read(self.body)


def open_body(name: str, content: bytes, content_type: str | None = JSON) -> Opened:
    """Parse a body, whichever generation wrote it.

    Raises:
        WireError: It is not JSON or not the protobuf message that was expected.
    """
    endpoint = _endpoint(name)
    if not names_protobuf(content_type):
        return Opened(endpoint, content, json_codec.loads_object(content or b"{}"))
    if name not in PASSES:
        raise WireError(f"{name} is sent as JSON, got {short(content_type)}")
    message = proto_requests.parse(content)
    # The way back of `encode`: a forward pass travels to /forward_backward under a flag.
    return Opened(ENDPOINTS["forward"] if message.forward_only else endpoint, content, message)


def encode(
    name: str,
    request: Any,
    generation: Generation = Generation.V0_36,
    *,
    compress: bool = False,
) -> Body:
    """A request as the bytes of a generation.

    In `V0_36` a `ForwardRequest` travels to `/forward_backward` with its forward-only flag; in
    `V0_4` it goes to `/forward`. `compress` puts passes under zstd; only if the server asked.

    Raises:
        InvalidInputError: The request has a value that cannot travel.
        NotSupportedError: It sets a field that this generation does not have.
    """
    endpoint, accepted = _accepted(name)
    if not isinstance(request, accepted):
        raise InvalidInputError(
            f"{name} takes {endpoint.request_name}, got {type(request).__name__}"
        )
    if name in PASSES and generation is Generation.V0_36:
        body = Body(proto_requests.encode(request), PROTOBUF)
        return body.compressed() if compress else body
    if name == "asample_batch":
        return join_samples([encode("asample", item) for item in request.requests])
    try:
        if name in PASSES:
            body = Body(sdk_0_4.encode_pass(name, request), JSON)
            return body.compressed() if compress else body
        if generation is Generation.V0_4:
            return Body(sdk_0_4.encode(request), JSON)
        return Body(json_codec.encode(request, keep_none=endpoint.keeps_null), JSON)
    except InvalidInputError:
        raise
    except (ValueError, TypeError, RecursionError) as exc:  # an object, a lone surrogate, NaN
        raise InvalidInputError(f"the request cannot be written as JSON: {exc}") from exc


def join_samples(samples: Sequence[Body]) -> Body:
    """The `asample_batch` of samples that are encoded already."""
    return Body(b'{"requests":[%b]}' % b",".join(sample.content for sample in samples), JSON)


@cache
def _accepted(name: str) -> tuple[Endpoint, Any]:
    """The endpoint of a name, and the messages that it takes."""
    endpoint = _endpoint(name)
    return endpoint, tuple(PASSES.values()) if name in PASSES else endpoint.request


def _endpoint(name: str) -> Endpoint:
    endpoint = ENDPOINTS.get(name)
    if endpoint is None or endpoint.request_name is None:
        known = ", ".join(sorted(name for name, row in ENDPOINTS.items() if row.request_name))
        raise InvalidInputError(f"unknown endpoint {name!r}; known: {known}")
    return endpoint
