"""Which dialect of the protocol a peer speaks.

Three facts decide: the SDK version a client announces, the content type of what it sends, and what
it accepts. A server reads both dialects from one handler; a client picks by what the server offers.
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

    @classmethod
    def of_server(cls, *, has_client_config: bool) -> Generation:
        """The dialect of a server. `/client/config` came with 0.18; without it, speak JSON."""
        return cls.V0_36 if has_client_config else cls.V0_4


def is_protobuf(content_type: str | None) -> bool:
    """Whether a body with this content type is protobuf."""
    return content_type is not None and PROTOBUF in content_type.lower()


def accepts_protobuf(accept: str | None) -> bool:
    """Whether a caller that sent this Accept header understands protobuf results."""
    return accept is not None and PROTOBUF in accept.lower()
