"""Options of a single call: `options=` of every method of every client.

They hold for the requests that make the call. Polls for its result have their own pace, and
`.result(timeout=...)` says how long a caller waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict

import httpx

from tinkex.client.config import check_headers
from tinkex.client.spelling import nearest
from tinkex.errors import InvalidInputError


class RequestOptions(TypedDict, total=False):
    """Options of a single call, by the names other SDKs of this family use. A dict will do."""

    headers: Mapping[str, str]
    """Sent with this call; they win over those of the client."""
    max_retries: int
    """Most tries after the first; 0 fails at once."""
    timeout: float | httpx.Timeout
    """Longest wait for one HTTP answer, in seconds."""
    params: Mapping[str, Any]
    """Further parameters of the query."""
    idempotency_key: str
    """Names this call: a server that goes by it does the same call once."""


class CallLimits(NamedTuple):
    """The longest wait for each answer of a call, and the most tries after the first."""

    timeout_s: float | None = None
    """None: the config's."""
    max_retries: int | None = None
    """None: the config's."""

    @classmethod
    def of(cls, options: Options) -> CallLimits:
        """The limits in the options of a call.

        Raises:
            InvalidInputError: An option is unknown, or out of range.
        """
        if not options:
            return cls()
        check_options(options)
        return cls(timeout_of(options), options.get("max_retries"))


Options: TypeAlias = RequestOptions | None
"""The type of the argument `options` of every call."""
_NAMES = tuple(RequestOptions.__annotations__)


def check_options(options: RequestOptions) -> None:
    """Refuse what cannot be honoured.

    Raises:
        InvalidInputError: With the name of the option.
    """
    if not isinstance(options, Mapping):
        raise InvalidInputError(
            f"expected RequestOptions(...) or a dict, got {type(options).__name__}", path="options"
        )
    for name in options:
        if name not in _NAMES:
            near = nearest(name, _NAMES)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(_NAMES)}"
            raise InvalidInputError(f"there is no such option; {meant}", path=f"options.{name}")
    retries, key = options.get("max_retries", 0), options.get("idempotency_key", "key")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        _refuse("max_retries", "a whole number from 0", retries)
    if not isinstance(key, str) or not key or not key.isprintable() or not key.isascii():
        _refuse("idempotency_key", "a text of printable ASCII letters", key)
    if (timeout_s := timeout_of(options)) is not None and not timeout_s > 0:
        _refuse("timeout", "a number of seconds above 0", options["timeout"])
    for name in ("headers", "params"):
        if not isinstance(given := options.get(name, {}), Mapping):
            _refuse(name, "a dict", given)
    check_headers(options.get("headers", {}))


def timeout_of(options: RequestOptions) -> float | None:
    """The timeout in seconds; None where none was given."""
    timeout = seconds_of(options.get("timeout"))
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
        _refuse("timeout", "a number of seconds above 0", timeout)
    return timeout


def seconds_of(timeout: float | httpx.Timeout | None) -> float | None:
    """The longest wait for an answer that a timeout allows, in seconds."""
    return timeout.read if isinstance(timeout, httpx.Timeout) else timeout


def without_key(options: Options) -> Options:
    """For the requests beside the one that the key names."""
    if not options or "idempotency_key" not in options:
        return options
    rest = options.copy()
    del rest["idempotency_key"]
    return rest


def _refuse(name: str, wanted: str, value: object) -> None:
    raise InvalidInputError(f"must be {wanted}, got {value!r}", path=f"options.{name}")
