"""The proof that a visitor is the person who runs this server.

A server without keys trusts every program on this machine, other people's included. Starting
programs in the owner's name takes more: a token that stands in the beacon's file, which nobody else
can read. `tinkex console` puts it into its link.
"""

from __future__ import annotations

import hmac
import secrets

OWNER_TOKEN = secrets.token_urlsafe(24)
"""Made anew by each server."""


def is_owner(token: str | None) -> bool:
    return hmac.compare_digest((token or "").encode(), OWNER_TOKEN.encode())
