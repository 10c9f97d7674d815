"""The two ways to put a request on a wire: our own HTTP/1.1, or httpx.

Plain `http://` goes through `http1.py`; TLS (and with it HTTP/2) and proxies through httpx. Both
raise `TimeoutError` or `OSError` when there is no answer; neither follows redirects or retries.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from tinkex.client.config import ClientConfig, is_loopback
from tinkex.client.http.http1 import Http1Pool, NoConnectionError, ProtocolError, Reply
from tinkex.wire.loopback import DIRECT

_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})

# httpx logs every request at INFO; ours are on the event bus.
logging.getLogger("httpx").setLevel(logging.WARNING)


class TlsError(ProtocolError):
    """No TLS with this server, whenever it is tried; the text says what to change."""


class Backend(Protocol):
    """A pool of connections to one server."""

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply: ...

    async def close(self) -> None: ...


def choose_backend(config: ClientConfig) -> Backend:
    if config.base_url.startswith("https") or _has_proxy(config.base_url):
        return HttpxBackend(config)
    return Http1Pool(
        config.base_url,
        max_connections=config.max_connections,
        connect_timeout_s=config.connect_timeout_s,
    )


def _has_proxy(url: str) -> bool:
    if is_loopback(url):
        return False
    host = urlsplit(url).hostname or ""
    proxies = getproxies()
    return ("http" in proxies or "all" in proxies) and not proxy_bypass(host)


def make_httpx(config: ClientConfig) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=config.max_connections, max_keepalive_connections=200)
    try:
        return httpx.AsyncClient(
            http2=config.base_url.startswith("https"),
            # Without TLS there is nothing to verify, and loading certificates takes 20 ms.
            verify=config.verify_tls and config.base_url.startswith("https"),
            timeout=config.timeout_s,
            limits=limits,
            mounts=DIRECT,
        )
    except OSError as exc:
        raise unreadable_certificates(exc) from exc


def unreadable_certificates(error: OSError) -> TlsError:
    """The error of a client that cannot be made: only certificates are read for it."""
    file = os.environ.get("SSL_CERT_FILE")
    where = f"SSL_CERT_FILE={file}" if file else "this machine"
    return TlsError(
        f"The certificates of {where} cannot be read: "
        f"{error.strerror or error}. Set SSL_CERT_FILE to a PEM file that can be, or unset it."
    )


class HttpxBackend:
    """TLS, HTTP/2 and proxies.

    One HTTP/2 connection carries only so many requests at once, so a further client is opened when
    all present ones are busy (contract 1.3).
    """

    MAX_PER_CLIENT = 50

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._clients: list[httpx.AsyncClient] = []
        self._busy: list[int] = []

    def _least_busy(self) -> int:
        for index, busy in enumerate(self._busy):
            if busy < self.MAX_PER_CLIENT:
                return index
        self._clients.append(make_httpx(self._config))
        self._busy.append(0)
        return len(self._clients) - 1

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        timeout = httpx.Timeout(timeout_s, connect=min(self._config.connect_timeout_s, timeout_s))
        index = self._least_busy()
        self._busy[index] += 1
        try:
            answer = await self._clients[index].request(
                method, url, headers=dict(headers), content=body, timeout=timeout
            )
        except httpx.ConnectTimeout as exc:
            raise NoConnectionError(f"no connection within {timeout.connect:g} s") from exc
        except httpx.TimeoutException as exc:
            raise TimeoutError(f"{type(exc).__name__} {exc}".strip()) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            if (hopeless := tls_trouble(self._config.base_url, exc)) is not None:
                raise hopeless from exc
            kind = NoConnectionError if isinstance(exc, httpx.ConnectError) else ProtocolError
            raise kind(f"{type(exc).__name__} {exc}".strip()) from exc
        finally:
            self._busy[index] -= 1
        return Reply(answer.status_code, answer.headers, answer.content)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def tls_trouble(base_url: str, error: BaseException) -> TlsError | None:
    """The error of a handshake that no second try can mend; None: it may be mended."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return TlsError(
            f"The certificate of {base_url} does not verify: {cause.verify_message}. Set "
            "SSL_CERT_FILE to a file with the certificate of its authority (or its own, where it "
            "signed itself), or check the address."
        )
    if cause is not None and cause.reason in _NO_TLS:
        return TlsError(
            f"{base_url} does not speak TLS ({cause.reason}). Begin the address with http://, or "
            "give the port that speaks TLS."
        )
    return None
