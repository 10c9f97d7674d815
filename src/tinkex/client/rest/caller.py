"""A call that answers at once: the base of the clients that only ask.

`RestClient` and `AdminClient` say which calls there are; how one is built from the row of an
endpoint, sent and parsed is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel

from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.call import Call
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.client.http.options import Options
from tinkex.client.session.holder import Holder, parse, shared_holder
from tinkex.errors import InvalidInputError
from tinkex.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinkex.client.session.telemetry import Reporter


class Caller:
    """The base of RestClient and AdminClient: a session-less holder and the SDK's headers."""

    def __init__(
        self,
        _holder: Holder | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if _holder is None:
            _holder = shared_holder(ClientConfig.from_env(base_url=base_url, api_key=api_key))
        self.holder = _holder

    def _ask(
        self, method: str, row: str | None = None, request: BaseModel | None = None, **given: Any
    ) -> APIFuture[Any]:
        """Make the call of an endpoint's row; gives what the row says, None where that is nothing.

        `given` is that of `_call`.
        """
        call = self._call(method, row, request, **given)
        return self._send(call, ENDPOINTS[row or method].result)

    def _call(
        self,
        method: str,
        row: str | None = None,
        request: BaseModel | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        pool: str = "train",
        options: Options = None,
        **ids: str,
    ) -> Call:
        """A row's call, by default of the row with the method's name; `ids` fill its path."""
        call = Call.to(
            row or method,
            request,
            ids=ids,
            pool=pool,
            query=query,
            headers={**_sdk_headers(method), **(headers or {})},
        )
        return call.having(options)

    def _send(self, call: Call, answer: Any = None) -> APIFuture[Any]:
        async def send(waiting: Waiting) -> Any:
            reply = await self.holder.transport.call(call, waiting)
            return None if answer is None else parse(reply, answer)

        return self.holder.spawn(send, call.limits)

    def get_telemetry(self) -> Reporter | None:
        """The reporter that tells the server of errors; None where telemetry is off."""
        return self.holder.reporter

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.holder.config.base_url}>"


def _sdk_headers(method: str) -> dict[str, str]:
    return {"x-sdk-version": CONTRACT_VERSION, "x-sdk-method": method}


def quoted(value: str, name: str) -> str:
    """A name of any letters as one part of a URL path."""
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"expected a name, got {value!r}", path=name)
    return quote(value, safe=":")


def segment(value: str, name: str) -> str:
    """An id that may stand in a URL path as it is."""
    if not isinstance(value, str) or not value or any(c in value for c in "/?#% \n"):
        raise InvalidInputError(f"expected an id, got {value!r}", path=name)
    return value
