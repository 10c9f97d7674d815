"""Pages and names of others: what a Host, an Origin and a proxy's headers say of a request.

An open server on loopback trusts whoever reaches it. A browser reaches it too, for any page it
shows: directly (the page's Origin gives it away) or through a name that resolves to 127.0.0.1 (the
Host does). A proxy reaches it for the whole network. All three are told to use a key. With a key
none of this matters, because a page does not know it; but a page of another site may not log its
reader in, and a server that knows its own address (`public_url`) answers to no other name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from tinkex.server.process.problems import ApiError

_FORWARDED = frozenset(
    {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)
_WAY_OUT = "Make a key with `tinkex keys add --user NAME` and send it."


def check_local(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse what does not come from a program on this machine.

    Raises:
        ApiError: 403.
    """
    for name, value in headers:
        if name == b"host" and not is_loopback_name(value.decode("latin-1")):
            raise ApiError(403, f"This server has no key and answers to localhost only. {_WAY_OUT}")
        if name == b"origin" and not _is_loopback_origin(value.decode("latin-1")):
            raise ApiError(403, f"This server has no key and refuses web pages. {_WAY_OUT}")
        if name in _FORWARDED:
            raise ApiError(
                403, f"This server has no key, and the request came through a proxy. {_WAY_OUT}"
            )


def check_host(host: str, public_url: str) -> None:
    """Refuse a request that was sent to another name than the server's own.

    Raises:
        ApiError: 403.
    """
    if _netloc(f"//{host}") != _netloc(public_url) and not is_loopback_name(host):
        raise ApiError(403, f"This server answers to {public_url} only; see public_url.")


def check_same_site(headers: Mapping[str, str], public_url: str = "") -> None:
    """Refuse a login that a page of another site sent: it would choose who its reader is here.

    Raises:
        ApiError: 403.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:  # written by the browser itself, whatever a proxy does to the Host
        is_foreign = site not in ("same-origin", "none")
    else:
        own = {_netloc(f"//{headers.get('host', '')}"), _netloc(public_url)} - {""}
        is_foreign = origin is not None and _netloc(origin) not in own
    if is_foreign:
        raise ApiError(403, "A page of another site cannot log you in. Open the address yourself.")


def _netloc(url: str) -> str:
    """Host and port of a URL, without the port that its scheme has anyway; empty for none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""
    if port in (None, 80, 443):
        return parts.hostname or ""
    return f"{parts.hostname}:{port}"


def is_loopback_name(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine."""
    # The length is checked outside of the cache, which would keep what strangers send.
    return len(host) <= 300 and _is_loopback(host)


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    # With these, urlsplit takes a part of the text for the host: x@127.0.0.1 would be loopback.
    if any(c in host for c in "/@?# "):
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
        is_named = name == "localhost" or name.endswith(".localhost")
        return is_named or ip_address(name).is_loopback
    except ValueError:
        return False


def _is_loopback_origin(origin: str) -> bool:
    scheme, separator, host = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and is_loopback_name(host)
