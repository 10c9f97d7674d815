"""The header that a caller's key is in: clients of foreign APIs use another than ours."""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = ("/v1", "/oai/api/v1")
"""Of the paths of foreign APIs: OpenAI's own, and the one of the hosted service."""
ANTHROPIC = "/anthropic/api"
"""Of the paths of Anthropic's API at the hosted service; its own has nothing before `/v1`."""
_BELOW = tuple(f"{prefix}/" for prefix in (*PREFIXES, ANTHROPIC))


def is_foreign(path: str) -> bool:
    return path.startswith(_BELOW)


def own_credential(headers: Mapping[bytes, bytes]) -> str | None:
    """The key in `X-API-Key: KEY`."""
    key = headers.get(b"x-api-key")
    return None if key is None else key.decode("latin-1")


def foreign_credential(headers: Mapping[bytes, bytes], *, is_open: bool) -> str | None:
    """The key in `Authorization: Bearer KEY` or `X-API-Key: KEY`.

    These clients cannot be made without a key, so an open server takes whatever they send.
    """
    # OpenAI's clients send the first, Anthropic's the second.
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    credential = own_credential(headers)
    if scheme.lower() == "bearer" and key.strip():
        credential = key.strip()
    if is_open and credential and not credential.startswith(("tml-", "eyJ")):
        return None
    return credential
