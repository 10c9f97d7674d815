"""Every error a user of Tinkex can meet, in one tree.

Each class also derives from the builtin a caller would reach for (`ValueError` for a wrong value,
`ConnectionError` for a lost peer), and every instance survives pickling with its attributes, since
errors cross process borders here. This module imports nothing but the standard library: `engine`
runs on machines that have neither pydantic nor httpx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _rebuild(cls: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    # One that is also an OSError has that one's layout, whatever stands first among its bases.
    base: type[Exception] = OSError if issubclass(cls, OSError) else Exception
    error = base.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def wish_to_retry(headers: Mapping[str, str]) -> bool | None:
    """The `x-should-retry` of an answer, in any case; None where the server leaves it open."""
    return {"true": True, "false": False}.get(headers.get("x-should-retry", "").strip().lower())


def is_retryable(category: str | None, status: int | None = None) -> bool:
    """Whether the same request may succeed later; all retries follow this one rule.

    408, 409 and 429 pass by themselves, whoever is said to be at fault. Otherwise a user's mistake
    never passes; a 5xx does, and so does a failure without a status (the request ran and broke on
    the server, or the connection was lost). Every other status stays.
    """
    if status in (408, 409, 429):
        return True
    return (category or "").lower() != "user" and (status is None or status >= 500)


class TinkerError(Exception):
    """The root of the tree. `code` is a short stable name for programs; the text is for people."""

    code = "error"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later, without anything changed by the caller."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def how_to_install(extra: str) -> str:
    """The command that adds an extra to the tinkex that runs, from where that was installed."""
    import json
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(metadata.distribution("tinkex").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    place = Path(unquote(urlsplit(url).path))
    if not url.startswith("file:") or not place.exists():
        return f"pip install 'tinkex[{extra}]'"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{place}[{extra}]'"


MAX_PATH, MAX_MESSAGE = 300, 2000


def cut(text: str, most: int) -> str:
    """The text, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class InvalidInputError(TinkerError, ValueError):
    """A value the caller gave is wrong. `path` names the field, such as `data[3].weights`."""

    code = "invalid_input"

    def __init__(self, message: str, *, path: str = "") -> None:
        # Both may quote what a stranger sent, and end in answers, logs and the journal.
        path = cut(path, MAX_PATH)
        super().__init__(cut(f"{path}: {message}" if path else message, MAX_MESSAGE))
        self.path = path


class WireError(InvalidInputError):
    """Bytes that arrived do not decode into the value that was expected."""

    code = "invalid_wire"


class ConfigError(TinkerError, ValueError):
    """A setting is unknown, missing or out of range."""

    code = "invalid_config"


class NotSupportedError(InvalidInputError):
    """A request that is well formed but asks for something this server or model does not do."""

    code = "not_supported"


class WrongBaseError(InvalidInputError):
    """A checkpoint was trained on other base weights than those it is used on."""

    code = "wrong_base"


class HubError(TinkerError, ConnectionError):
    """The Hugging Face hub could not be reached, or refused what was asked of it."""

    code = "hub_failed"


class ModelNotFoundError(TinkerError, LookupError):
    """No base model, adapter or checkpoint of that name is known here."""

    code = "not_found"


class EngineError(TinkerError, RuntimeError):
    """Compute failed through no fault of the caller."""

    code = "engine_failed"
    is_to_blame = False
    """The job itself kept the engine from getting on."""


class WorkerLostError(EngineError):
    """A worker process died; what it held in memory must be restored."""

    code = "worker_lost"
    is_blameless = False
    """Another job is known to be the reason."""
    cause = ""
    """`memory` or `crash` where the process ended by itself while it worked on this job, `stuck`
    where it was ended for it or for one that shared its passes."""
    was_alone = False
    """The process worked on this job and no other, or this one was on trial and had its turn."""


# ------------------------------------------------------------------------------------ the SDK


class ExperimentalWarning(UserWarning):
    """The call works, but its shape may change."""


class LocalServerError(TinkerError, RuntimeError):
    """The embedded server could not be started or reached."""

    code = "local_server_failed"


class ClientClosedError(TinkerError, RuntimeError):
    """The client was closed; make a new ServiceClient."""

    code = "client_closed"


class BlockedLoopError(TinkerError, RuntimeError):
    """A call would wait on the SDK's own thread for something that only this thread can bring."""

    code = "blocked_loop"


class ResultTimeoutError(TinkerError, TimeoutError):
    """`result(timeout)` ended before the answer came. The request itself goes on."""

    code = "result_timeout"


class RetryableException(TinkerError, RuntimeError):
    """The request is lost but may be made again, as a new one."""

    code = "retryable"

    @property
    def retryable(self) -> bool:
        return True


class PromiseLostError(RetryableException):
    """The server no longer knows the promise (410): its result is gone."""

    code = "promise_lost"

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.category = "server"


class RequestFailedError(TinkerError, RuntimeError):
    """The server accepted the request and could not fulfil it.

    `category` is "user" (the caller can fix it), "server" or "unknown".
    """

    code = "request_failed"

    def __init__(
        self, message: str, request_id: str | None = None, category: str = "unknown"
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.category = category
        self.status_code: int | None = None
        self.retry_after_ms: int | None = None

    @property
    def retryable(self) -> bool:
        return is_retryable(self.category, self.status_code)


class APIError(TinkerError):
    """An HTTP call failed. `body` is what the server sent, decoded where it was JSON."""

    code = "api_error"
    status_code: int | None = None

    def __init__(
        self,
        message: str,
        request: Any = None,
        *,
        body: Any = None,
        request_id: str | None = None,
        retry_after_ms: int | None = None,
        category: str = "unknown",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        """`METHOD path` of the call, as text."""
        self.body = body
        self.request_id = request_id
        self.retry_after_ms = retry_after_ms
        self.category = category

    @property
    def retryable(self) -> bool:
        return is_retryable(self.category, self.status_code)


class APIResponseValidationError(APIError, ValueError):
    """The server answered with something that is not the expected result."""

    code = "invalid_response"

    @property
    def retryable(self) -> bool:
        return False


class APIConnectionError(APIError, ConnectionError):
    """The server could not be reached, or the connection broke.

    `category` is "user" where trying again cannot help, such as a certificate that does not verify.
    """

    code = "connection_failed"

    def __init__(
        self, message: str = "Connection error.", request: Any = None, *, category: str = "server"
    ) -> None:
        super().__init__(message, request, category=category)


class APITimeoutError(APIConnectionError, TimeoutError):
    """The server did not answer in time."""

    code = "timeout"

    def __init__(self, message: str = "Request timed out.", request: Any = None) -> None:
        super().__init__(message, request)


class CircuitOpenError(APIConnectionError):
    """The circuit breaker holds calls back, because the last ones to this host all failed."""

    code = "circuit_open"


class APIStatusError(APIError):
    """The server answered with an error status."""

    code = "status_error"

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        request: Any = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        request_id: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        category = "user" if 400 <= status_code < 500 and status_code != 408 else "server"
        super().__init__(
            message,
            request,
            body=body,
            request_id=request_id,
            retry_after_ms=retry_after_ms,
            category=category,
        )
        self.status_code = status_code
        self.headers = headers or {}

    @property
    def retryable(self) -> bool:
        """The server's `x-should-retry` decides, where it sends one; else the table."""
        wish = wish_to_retry(self.headers)
        return is_retryable(self.category, self.status_code) if wish is None else wish

    @property
    def response(self) -> Any:
        """The answer as an `httpx.Response`, for programs that look into it."""
        import httpx

        if isinstance(self.body, (dict, list)):
            return httpx.Response(self.status_code or 0, headers=self.headers, json=self.body)
        text = "" if self.body is None else str(self.body)
        return httpx.Response(self.status_code or 0, headers=self.headers, text=text)


class BadRequestError(APIStatusError, ValueError):
    """400: the request is malformed or not allowed in this state."""

    code = "bad_request"


class AuthenticationError(APIStatusError, PermissionError):
    """401: no credential, or one the server does not know."""

    code = "unauthenticated"


class BillingError(APIStatusError, RuntimeError):
    """402: the account cannot pay for the request."""

    code = "billing"


class PermissionDeniedError(APIStatusError, PermissionError):
    """403: the credential is known but may not do this."""

    code = "permission_denied"


class NotFoundError(APIStatusError, LookupError):
    """404: no such thing, or not yours."""

    code = "not_found"


class ConflictError(APIStatusError, RuntimeError):
    """409: the thing exists already or is in another state."""

    code = "conflict"


class UnprocessableEntityError(APIStatusError, ValueError):
    """422: a field has a wrong value."""

    code = "unprocessable"


class RateLimitError(APIStatusError, RuntimeError):
    """429: too many requests; `retry_after_ms` says how long to wait, if the server said so."""

    code = "rate_limited"


class InternalServerError(APIStatusError, RuntimeError):
    """5xx: the server failed."""

    code = "server_error"


class RetrieveError(APIStatusError, ValueError):
    """Asking for a result was refused for good (the promise is not ours, or not valid)."""

    code = "retrieve_refused"


STATUS_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error_class(status_code: int) -> type[APIStatusError]:
    """The class of the tree for an HTTP status; codes without their own give APIStatusError."""
    if status_code >= 500:
        return InternalServerError
    return STATUS_ERRORS.get(status_code, APIStatusError)


class RecoveryFailedError(TinkerError, RuntimeError):
    """A training run was lost and every attempt to rebuild it failed; the last one is the cause."""

    code = "recovery_failed"


# ------------------------------------------------------------------------------- regularizers


class RegularizerError(TinkerError, RuntimeError):
    """A regularizer, or the base loss, failed. `name` says which; nothing was sent or applied."""

    code = "regularizer_failed"

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(f"regularizer {name!r}: {message}" if name else message)
        self.name = name


class RegularizerTimeoutError(RegularizerError, TimeoutError):
    """A regularizer did not finish in the time the pipeline gives it."""

    code = "regularizer_timeout"
