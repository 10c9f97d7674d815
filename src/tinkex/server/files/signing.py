"""Links that open one thing for a while, without a key.

A link carries what it opens and until when, and an HMAC over both; nothing is stored, so a link
survives a restart and ends by itself. What the resource text means is up to the route that made it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Any

import orjson

from tinkex.server.process.problems import ApiError

LINK_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Signed:
    token: str
    expires_at: float


class Signer:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, resource: dict[str, Any]) -> Signed:
        expires_at = time.time() + LINK_TTL_S
        payload = _text(orjson.dumps(resource | {"exp": expires_at}))
        return Signed(f"{payload}.{self._mac(payload)}", expires_at)

    def open(self, token: str) -> dict[str, Any]:
        """The resource of a link that is ours and not over.

        Raises:
            ApiError: 403.
        """
        payload, _, mac = token.partition(".")
        # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
        if not payload.isascii() or not hmac.compare_digest(
            mac.encode(), self._mac(payload).encode()
        ):
            raise ApiError(403, "This link is damaged or was not made by this server.")
        resource: dict[str, Any] = orjson.loads(_bytes(payload))
        if resource["exp"] < time.time():
            raise ApiError(403, "This link has expired. Ask for a new one.", code="link_expired")
        return resource

    def _mac(self, payload: str) -> str:
        return _text(hmac.new(self._secret, payload.encode(), hashlib.sha256).digest())


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
