"""Which dialect of the protocol a peer speaks.

A server reads both from one handler, by the content type of what is sent and what its caller
accepts; a client picks by whether the server has a `/client/config`.
"""

from __future__ import annotations

from enum import Enum

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


class Generation(Enum):
    """A dialect, named after the SDK version that fixed it."""

    V0_4 = "0.4.1"
    """JSON everywhere; fields that were never set are left out, and None is sent as null."""
    V0_36 = "0.36"
    """Passes travel as protobuf; JSON elsewhere, with None left out (two fields send null)."""


def names_protobuf(header: str | None) -> bool:
    """Whether a Content-Type says protobuf, or an Accept takes it."""
    return header is not None and PROTOBUF in header.lower()
