"""An HTTP call of the contract, and the error that an answer to it becomes.

`Call.to` is how the clients make one: by the name of its endpoint and a declared message, whose
bytes `wire.requests` writes. A body is a `wire.Body`, so nothing else can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from tinkex.client.http.http1 import Reply
from tinkex.client.http.options import CallLimits, Options, check_options, timeout_of
from tinkex.client.http.retry import parse_retry_after_s
from tinkex.errors import APIStatusError, status_error_class
from tinkex.wire import Body, Generation, requests
from tinkex.wire.endpoints import API, ENDPOINTS

_BELOW = f"{API}/"


class Call(NamedTuple):
    """A call: where it goes, what it carries, how long it is tried."""

    method: str
    path: str
    """Below `/api/v1/`, or below the base URL when it begins with a slash; pasted in as it is."""
    name: str | None = None
    """What errors call it, where that is not the path."""
    pool: str = "train"
    body: Body | None = None
    query: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = None
    """None: the config's."""
    max_retries: int | None = None
    """Most tries after the first; None: the config's."""
    quick_retries: int | None = None
    """Quick tries of a round; None: the contract's ten."""
    own_headers: Mapping[str, str] | None = None
    """Those of the caller's options, which win over all others."""
    idempotency_key: str | None = None
    """None: one is made, the same for every try."""
    window: bool = True
    """Go on with rounds of quick tries for the config's `retry_window_s`."""
    waits_itself: bool = False
    """402 and 429 are raised at once: the caller waits on its own terms."""

    @classmethod
    def to(
        cls,
        endpoint: str,
        request: Any = None,
        generation: Generation = Generation.V0_36,
        *,
        ids: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Call:
        """The call of an endpoint of `wire.endpoints`, with its declared message as the body.

        `request` is the message, or what `wire.requests` made of it before. `ids` fill the
        endpoint's path, `options` are further fields of the call.

        Raises:
            InvalidInputError: The request has a value that cannot travel.
        """
        row = ENDPOINTS[endpoint]
        path = row.path.removeprefix(_BELOW)
        is_body = request is None or isinstance(request, Body)
        body = request if is_body else requests.encode(endpoint, request, generation)
        return cls(
            method=row.method, path=path.format(**ids) if ids else path, body=body, **options
        )

    @property
    def limits(self) -> CallLimits:
        return CallLimits(self.timeout_s, self.max_retries)

    def within(self, limits: CallLimits) -> Call:
        """This call, with the limits of a caller who has some."""
        if limits == CallLimits():
            return self
        return self._replace(
            timeout_s=limits.timeout_s or self.timeout_s,
            max_retries=self.max_retries if limits.max_retries is None else limits.max_retries,
        )

    def having(self, options: Options, part: int = 0) -> Call:
        """This call with the options of a caller; `part` is its number in a call of several.

        Raises:
            InvalidInputError: An option is unknown, or out of range.
        """
        if not options:
            return self
        check_options(options)
        key = options.get("idempotency_key")
        query = {**(self.query or {}), **options.get("params", {})}
        return self._replace(
            own_headers=options.get("headers"),
            timeout_s=timeout_of(options) or self.timeout_s,
            max_retries=options.get("max_retries", self.max_retries),
            query=query or None,
            # The parts are different requests, and a key is that of one.
            idempotency_key=f"{key}-{part + 1}" if key and part else key or self.idempotency_key,
        )


_HINTS = {
    401: "Check the key: api_key= or TINKER_API_KEY.",
    402: "Add credit to the account.",
    403: "The key is valid but may not do this; ask the owner or use another key.",
    429: "Slow down, or let the SDK wait.",
}


_LISTING_CALLS = {
    "checkpoints": "create_rest_client().list_user_checkpoints()",
    "training_runs": "create_rest_client().list_training_runs()",
    "sessions": "create_rest_client().list_sessions()",
}
"""The call in Python for the listing that a refusal names."""
NO_KEY = "Set TINKER_API_KEY, or pass api_key."


def status_error(call: Call, reply: Reply, *, has_key: bool = True) -> APIStatusError:
    """The error of our tree for an answer: what was asked, what came back, what to do."""
    body = reply.json()
    detail = _detail(body)
    if detail is None:
        body = body if body is not None else reply.content.decode("utf-8", "replace")
        detail = orjson.dumps(body).decode() if isinstance(body, (dict, list)) else str(body)
    listing = str(body.get("listing")) if isinstance(body, dict) else ""
    if listing in _LISTING_CALLS:
        detail = detail.replace(f"GET /{listing}", _LISTING_CALLS[listing])
    hint = _HINTS.get(reply.status, "")
    if reply.status == 401 and not has_key:
        detail, hint = "this server wants a key, and none was given.", NO_KEY
    elif hint and (_says_what_to_do(body) or "TINKER_API_KEY" in detail):
        hint = ""  # a second piece of advice would only be another one
    path = call.path if call.path.startswith("/") else f"{_BELOW}{call.path}"
    asked = call.name or f"{call.method} {path}"
    text = f"Error code: {reply.status} on {asked} - {detail[:2000]}"
    asked_s = parse_retry_after_s(reply.headers)
    return status_error_class(reply.status)(
        f"{text} {hint}".rstrip(),
        status_code=reply.status,
        request=f"{call.method} {call.path}",
        body=body,
        headers=dict(reply.headers),
        request_id=reply.headers.get("x-request-id"),
        retry_after_ms=None if asked_s is None else round(asked_s * 1000),
    )


def _says_what_to_do(body: Any) -> bool:
    """Whether a server of Tinkex refused it, whose text ends with the fix.

    But for a 401: the fix is on this side.
    """
    return isinstance(body, dict) and "code" in body and body["code"] != "not_authenticated"


def _detail(body: Any) -> str | None:
    """The human part of the usual error bodies."""
    if not isinstance(body, dict):
        return None
    for name in ("detail", "error", "message"):
        value = body.get(name)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value:
            return value
    return None
